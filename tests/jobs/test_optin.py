"""The comment that opts a job in: what is understood, and that a wrong word is named."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.protocol.optin import (
    MAX_BATCH,
    MAX_GPUS,
    BadComment,
    Deadline,
    GuestQueue,
    OptIn,
    near_miss,
    parse_comment,
    with_size,
)


@pytest.mark.parametrize(
    ("comment", "optin"),
    [
        ("ones: gpus=1-16 batch=256-4096", OptIn((1, 16), None, (256, 4096))),
        ("ones: gpus=1-16 batch=2880+-10%", OptIn((1, 16), None, (2592, 3168))),
        ("ones: gpus=1-16 batch=2880±10%", OptIn((1, 16), None, (2592, 3168))),
        ("ones: gpus=1-16 batch=3±10%", OptIn((1, 16), None, (3, 3))),
        ("ones: nodes=1-4", OptIn(None, (1, 4), None)),
        ("ones: gpus=8", OptIn((8, 8), None, None)),
        ("ones: gpus=4-16:4 size=12", OptIn((4, 16), None, None, size=12, step=4)),
        ("ones: gpus=2-8:3, batch=64", OptIn((2, 8), None, (64, 64), step=3)),
        ("ones: gpus=1-2 batch=64", OptIn((1, 2), None, (64, 64))),
        ("ones: gpus=1-2, batch=64, resize=off", OptIn((1, 2), None, (64, 64), resize=False)),
        ("ones: gpus=1-2 resize=on", OptIn((1, 2), None, None)),
        ("ones: resize=off", OptIn(None, None, None, resize=False)),
        ("ones: gpus=1 fuse=lr-sweep.2", OptIn((1, 1), None, None, fuse="lr-sweep.2")),
        ("ones: gpus=1, kinds=a100,v100, batch=64", OptIn((1, 1), None, (64, 64), kinds=("a100", "v100"))),
        ("ones: kinds=2080ti,gpus=1-2", OptIn((1, 2), None, None, kinds=("2080ti",))),
        ("ones: gpus=1-2 kinds=any", OptIn((1, 2), None, None, kinds=("any",))),
        ("ones: gpus=1-2 guests=partition:s", OptIn((1, 2), None, None, guests=GuestQueue("partition", "s"))),
        ("ones: gpus=1-2 guests=qos:low.2", OptIn((1, 2), None, None, guests=GuestQueue("qos", "low.2"))),
        ("ones: gpus=1-2 guests=off", OptIn((1, 2), None, None, guests=False)),
        ("ones: gpus=1-2 cost=1.25", OptIn((1, 2), None, None, cost=1.25)),
        ("ones: gpus=1-2 cost=2", OptIn((1, 2), None, None, cost=2.0)),
        ("ones: gpus=1 deadline=6h", OptIn((1, 1), None, None, deadline=Deadline(21600.0, True))),
        ("ones: gpus=1 deadline=1d2h3m4s", OptIn((1, 1), None, None, deadline=Deadline(93784.0, True))),
        ("  ONES:gpus=1-2", OptIn((1, 2), None, None)),
    ],
)
def test_what_is_understood(comment: str, optin: OptIn) -> None:
    assert parse_comment(comment) == optin


def test_a_deadline_is_a_moment_of_local_time_or_follows_from_the_submission() -> None:
    """A requeue changes neither: the first submission counts."""
    moment = datetime(2026, 12, 1, 18).timestamp()
    found = parse_comment("ones: gpus=1-2 deadline=2026-12-01T18:00")
    assert found is not None
    assert found.deadline is not None
    assert found.deadline.after(5.0) == moment
    assert Deadline(60.0, True).after(5.0) == 65.0


@pytest.mark.parametrize(
    "comment", ["", "ones", "my ones: gpus=1-4", "once: gpus=1", "http://ones:8080", "eins: gpus=1"]
)
def test_other_comments_are_nobodys_business(comment: str) -> None:
    """A job that did not opt in is never touched, so nothing is guessed."""
    assert parse_comment(comment) is None


@pytest.mark.parametrize(
    ("comment", "word"),
    [
        ("ones: gpus=1 kinds=a100,,v100", "',v100': expected gpus="),
        ("ones: gpus=1 kinds=any,a100", "'kinds=any,a100': expected types of GPU"),
        ("ones: gpus=1 kinds=", "'kinds=': expected types of GPU"),
        ("ones: gpus=1 kinds=a100 kinds=v100", "kinds is given twice"),
        ("ones: gpu=1-16", "'gpu=1-16': expected gpus="),
        ("ones: gpu=1-16", "or notify= (did you mean gpus=?)"),
        ("ones: gpus=1 Bacth=64", "or notify= (did you mean batch=?)"),
        ("ones: gpus=16-1", "'gpus=16-1': expected 1 <= first <= last"),
        ("ones: gpus=0-4", "'gpus=0-4'"),
        ("ones: gpus=4-16:", "'gpus=4-16:': expected a step within the range"),
        ("ones: gpus=4-16:0", "'gpus=4-16:0': expected a step"),
        ("ones: gpus=4-16:13", "'gpus=4-16:13': expected a step"),
        ("ones: nodes=1-4:2", "'nodes=1-4:2': expected a number or a range"),
        ("ones: gpus=4-16:4 size=6", "'size=6': not in steps of 4 from 4"),
        ("ones: gpus=-4", "'gpus=-4'"),
        ("ones: gpus=1-", "'gpus=1-'"),
        ("ones: gpus=one", "'gpus=one': expected a number or a range"),
        ("ones: gpus=1.5", "'gpus=1.5'"),
        ("ones: gpus=٤", "'gpus=٤'"),
        ("ones: gpus=1–16", "'gpus=1–16'"),
        ("ones: gpus", "'gpus'"),
        ("ones: gpus=1 fuse=", "'fuse=': expected a name"),
        ("ones: gpus=1 fuse=-a", "'fuse=-a': expected a name"),
        ("ones: gpus=1 fuse=a/b", "'fuse=a/b': expected a name"),
        ("ones: gpus=1 fuse=a fuse=b", "'fuse=b': fuse is given twice"),
        ("ones: gpus=1 deadline=", "'deadline=': expected a time such as deadline=2026-12-01T18:00"),
        ("ones: gpus=1 deadline=6", "'deadline=6': expected a time"),
        ("ones: gpus=1 deadline=2026-13-01T18:00", "'deadline=2026-13-01T18:00': expected a time"),
        ("ones: gpus=1 deadline=6h deadline=7h", "'deadline=7h': deadline is given twice"),
        ("ones: gpus=1-4 batch=", "'batch='"),
        ("ones: gpus=1-4 resize=yes", "'resize=yes': expected resize=on or resize=off"),
        ("ones: gpus=1-4 guests=partition:", "'guests=partition:': expected guests=on, guests=off, or a queue"),
        ("ones: gpus=1-4 guests=scavenge", "'guests=scavenge': expected guests=on"),
        ("ones: gpus=1-4 guests=account:a", "'guests=account:a': expected guests=on"),
        ("ones: gpus=1-4 please", "'please'"),
        ("ones: gpus=1-4 gpus=1-8", "'gpus=1-8': gpus is given twice"),
        ("ones: gpus=1 resize=on resize=off", "'resize=off': resize is given twice"),
        ("ones: gpus=1-4 nodes=1-2", "gpus= and nodes= contradict each other"),
        ("ones:", "neither gpus= nor nodes="),
        ("ones: batch=64-128", "neither gpus= nor nodes="),
        (f"ones: gpus=1-{MAX_GPUS + 1}", "expected 1 <= first <= last <= 100000"),
        (f"ones: gpus=1 batch={MAX_BATCH + 1}", "batch=2147483649"),
        ("ones: gpus=" + "9" * 4000, "gpus=9999"),
    ],
)
def test_a_wrong_word_is_named(comment: str, word: str) -> None:
    with pytest.raises(BadComment) as error:
        parse_comment(comment)
    assert word in str(error.value)


@pytest.mark.parametrize(
    ("comment", "right"),
    [
        ("ones gpus=1-4", "ones: gpus=1-4"),
        ("one: gpus=1-4 batch=32", "ones: gpus=1-4 batch=32"),
        ("Ones : gpus=1-4", "ones: gpus=1-4"),
        ("ones; gpus=1 - 4", "ones: gpus=1-4"),
        ("ones\uff1a nodes=2", "ones: nodes=2"),
        ("my run; ones: gpus=1-4", "ones: gpus=1-4"),
        ("'ones: gpus=1–4'", "ones: gpus=1-4"),
        ("ones gpus:4-1", "ones: gpus=1-16 batch=32-1024"),
        *((text, "") for text in ("", "ones", "once: gpus=1", "http://ones:8080", "zones: gpus=1", "ones: gpus=1")),
        ("gpus=1-16, but not for ones", ""),
    ],
)
def test_what_nearly_opts_in_is_told_and_never_taken(comment: str, right: str) -> None:
    """Protects owners who wrote it nearly right, who learn the right line, and everybody else's jobs: no near miss is
    an opt-in, not even where the words follow other text, since such a comment may talk of ones, or quote it."""
    assert near_miss(comment) == right
    if right:
        assert parse_comment(comment) is None
    with pytest.raises(BadComment, match="without spaces: ones: gpus=1-4"):
        parse_comment("ones: gpus = 1 - 4")


@given(st.integers(1, MAX_GPUS), st.integers(1, MAX_GPUS), st.integers(1, MAX_BATCH), st.integers(1, MAX_BATCH))
def test_ranges_read_back(gpus: int, more: int, batch: int, larger: int) -> None:
    ranges = (min(gpus, more), max(gpus, more)), (min(batch, larger), max(batch, larger))
    comment = "ones: gpus={}-{} batch={}-{}".format(*ranges[0], *ranges[1])
    assert parse_comment(comment) == OptIn(ranges[0], None, ranges[1])


@pytest.mark.parametrize(
    "comment",
    [
        "ones: gpus=1-16 size=8 batch=64",
        "ones: gpus=1-16,size=8,batch=64",
        "ones:size=8 gpus=1-16, batch=64",
        "ones: gpus=1-16,kinds=a100,v100,size=8",
        "ones: gpus=1-16, size=8, batch=64,",
    ],
)
def test_a_size_is_changed_however_words_are_separated(comment: str) -> None:
    """Protects `resize`: the size by hand stands next to commas, too, and is there once."""
    before = parse_comment(comment)
    assert before is not None and before.size == 8
    assert parse_comment(with_size(comment, 4)) == replace(before, size=4)
    assert parse_comment(with_size(comment, None)) == replace(before, size=None)


def test_a_long_comment_takes_no_time() -> None:
    comment = "ones" + " " * 996
    began = time.process_time()
    assert [near_miss(comment) for _ in range(100)] == [""] * 100
    assert time.process_time() - began < 0.1
