"""What is checked at submission, against the one definition of what a comment means: never stricter, and early where it
promises to be."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ones_wrapper.protocol.optin import BadComment, near_miss, parse_comment
from slurm_ones.cli.check import examine
from slurm_ones.plugin.build import source
from tests.plugin.lua import Lua, NoLua, is_here, literal

# `make check` builds no root for its Lua; once `make test` or a demo has, these tests need nothing else.
pytestmark = [] if is_here() else [pytest.mark.cluster]
KEYS = ("gpus", "nodes", "batch", "size", "resize", "array", "fuse", "deadline", "kinds", "gpu", "GPUS", "")
VALUES = (
    *("1", "0", "4", "1-16", "16-1", "4-16:4", "1-16:", "1-16:0", ":", "1-", "-1", "01-04", "1-99999999999999", "1.5"),
    *(
        "on",
        "off",
        "blocks",
        "sweep1",
        "a100,v100",
        "any",
        "6h30m",
        "2026-12-01T18:00",
        "",
        "a=b",
        "１",
        "1–4",
        "%s",
        "'\"",
        "\\n",
    ),
)
words = st.builds(
    lambda key, equals, value: key + equals + value,
    st.sampled_from(KEYS),
    st.sampled_from(("=", "=", "=", ":", "")),
    st.one_of(st.sampled_from(VALUES), st.text(max_size=6)),
)
PREFIXES = (
    "ones:",
    "ones: ",
    " Ones:",
    "ONES:\t",
    "one: ",
    "ones ",
    "ones; ",
    "ones = ",
    "my ones: ",
    "",
    "ones:\u00a0",
    "one",
)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)
comments = st.one_of(
    st.builds(
        lambda prefix, many, between: prefix + between.join(many),
        st.sampled_from(PREFIXES),
        st.lists(words, max_size=4),
        st.sampled_from((" ", ",", ", ", "  ", "\n", "\u2003", "\x1f")),
    ).map(lambda text: text.replace("\0", "")),
    texts,
)


@pytest.fixture(scope="module")
def lua() -> Iterator[Lua]:
    try:
        lua = Lua()
    except NoLua as why:
        pytest.skip(str(why))
    lua.run(f"ones = (function() {source('slurm_ones.lua')} end)()")
    yield lua


def refusal(comment: str) -> str | None:
    """What slurm-ones itself says against a comment."""
    try:
        parse_comment(comment)
    except BadComment as error:
        return str(error)
    return None


@given(comments)
@example("ones: gpus=1-4 " + "batch=1 " * 200)
@example("ones: gpus=1-4 cost=1.5 guests=partition:scavenge")
@example("ones:\u00a0gpus=1-4")
@example("ones:\x1cgpus=1-4")
def test_never_stricter(lua: Lua, comment: str) -> None:
    """Whoever is refused at submission would not have been understood later either; others are not touched."""
    if lua.run(f"return ones.fault({literal(comment)})") is not None:
        assert refusal(comment) is not None
    if lua.run(f"return ones.near_miss({literal(comment)}) and 1 or nil") is not None:
        assert near_miss(comment)


@pytest.mark.parametrize(
    "comment",
    [
        *("ones: gpu=1-16", "ones: gpus", "ones: gpus=", "ones: gpus=1-16 gpus=2", "ones: gpus=16-1", "ones: gpus=0"),
        *(
            "ones: batch=32",
            "ones:",
            "ones: gpus=1-4 nodes=1-2",
            "ones: gpus=1..4",
            "ones: gpus=a-b",
            "ones: nodes=1-4:2",
        ),
        *("ones: gpus=1-8:0", "ones: gpus =1-4", "ones: GPUS=1-4", "ones: gpus=1-4 batch", "ones: gpus=1-4 fuse="),
    ],
)
def test_what_is_found_early(lua: Lua, comment: str) -> None:
    """The mistakes that people make are refused, by both."""
    assert lua.run(f"return ones.fault({literal(comment)})")
    assert refusal(comment)


@pytest.mark.parametrize(
    "comment",
    ["one: gpus=1-16", "ones gpus=1-16", "Ones; nodes=2", "ones-batch=32", " one gpus=4", "one: batch=32 gpus=1-4"],
)
def test_near_misses(lua: Lua, comment: str) -> None:
    """Nobody writes these who does not mean to opt in."""
    assert lua.run(f"return ones.near_miss({literal(comment)}) and 1 or nil") == "1"
    assert near_miss(comment)


@pytest.mark.parametrize(
    "comment",
    [
        "",
        "one batch=64",
        "one: batch=64 lr=1",
        "one batch: five",
        "my gpus=4 run",
        "the ones: gpus=1",
        "phones: gpus=1-4",
        "ones",
        "one gpus=4 baseline, see table 2",
        "ones: the second try",
    ],
)
def test_comments_that_are_no_business_of_ours(lua: Lua, comment: str) -> None:
    assert lua.run(f"return ones.near_miss({literal(comment)}) and 1 or nil") is None
    assert lua.run(f"return ones.fault({literal(comment)})") is None


@example("gpus=1-16", "ones:kinds=1 gpus=1 gpus:1")
@given(st.sampled_from(("gpus=1-16", "nodes=1-4", "gpus=2-8:2 batch=32-64", "deadline=6h gpus=4")), comments)
def test_options_become_the_comment(lua: Lua, given_words: str, comment: str) -> None:
    """The words of options are in it, once each, and it is understood where the comment before was."""
    merged = lua.run(f"return ones.merged({literal(comment)}, {literal(given_words)})")
    if merged is None:
        text = comment.strip(" \t\n\v\f\r")
        assert text and not text.lower().startswith("ones:")
        return
    assert merged.startswith(f"ones: {given_words}")
    assert lua.run(f"return ones.merged({literal(merged)}, {literal(given_words)})") == merged
    # A size of before may lie outside the new range; rarer spaces are spaces in Python alone.
    if (
        comment.isascii()
        and not re.search(r"[\x1c-\x1f]", comment)
        and refusal(comment) is None
        and "size=" not in comment
    ):
        parse_comment(merged)


def said(lua: Lua, **job: str | bool | None) -> tuple[str | None, str | None]:
    """The comment that a job gets, and why it is refused."""
    table = ", ".join(
        f"{key} = {str(value).lower() if isinstance(value, bool) else literal(value)}" for key, value in job.items()
    )
    chunk = f"local comment, elastic, refused = ones.check({{ {table} }})"
    return lua.run(f"{chunk} return comment"), lua.run(f"{chunk} return refused")


SCRIPT = "#!/bin/bash\n#SBATCH --comment='{comment}' --requeue {options}\nones-run {blocks} train.py\n"


@pytest.mark.parametrize(
    ("options", "job", "comment"),
    [
        ("--nodes=1 --gres=gpu:1", {}, "ones: gpus=1-4"),
        ("--no-requeue", {"no_requeue": True}, "ones: gpus=1-4"),
        ("--ntasks=4", {"tasks": True}, "ones: gpus=1-4"),
        ("--gpus=4", {"per_job": True}, "ones: gpus=1-4"),
        ("--array=0-7", {"array": "0-7"}, "ones: gpus=1-4 array=blocks"),
        ("--array=0-7%1", {"array": "0-7%1"}, "ones: gpus=1-4 array=blocks"),
        ("--nodes=1", {}, "ones: gpus=1-4 array=blocks"),
        ("--nodes=1", {}, "ones: gpus=4-1"),
        ("--nodes=1", {}, "one: gpus=1-4"),
    ],
)
def test_agrees_with_the_check_of_a_script(lua: Lua, options: str, job: dict[str, str | bool], comment: str) -> None:
    """`slurm-ones check` finds an error in the script of each job that is refused, and in no other of these."""
    blocks = "--blocks" if "array=blocks" in comment else ""
    verdict = examine(SCRIPT.format(comment=comment, options=options, blocks=blocks))
    _, refused = said(lua, comment=comment, script="ones-run x", **job)
    assert (refused is None) == verdict.elastic, (refused, verdict)


def test_arrays_of_blocks_are_marked(lua: Lua) -> None:
    """Where the script starts blocks; and only there."""
    script = "#!/bin/sh\n# ones-run --blocks\nexec ones-run {} train.py\n"
    assert (
        said(lua, words="gpus=1-4", array="0-7%1", script=script.format("--blocks"))[0] == "ones: gpus=1-4 array=blocks"
    )
    assert said(lua, words="gpus=1-4", array="0-7%1", script=script.format(""))[0] == "ones: gpus=1-4"
    assert said(lua, words="gpus=1-4", script=script.format("--blocks"))[0] == "ones: gpus=1-4"
    assert said(lua, comment="a sweep", array="0-7", script=script.format("--blocks")) == (None, None)
    assert said(lua, words="gpus=1-4", array="0-7", script=script.format("--blocks"))[1] is not None


@pytest.mark.parametrize("comment", ["ones: resize=off", "ones:resize=off", "ONES:\tgpus=1-4,resize=off"])
def test_a_job_that_is_only_measured_may_be_of_any_form(lua: Lua, comment: str) -> None:
    assert said(lua, comment=comment, no_requeue=True, tasks=True) == (comment, None)


@pytest.mark.parametrize("comment", ["ones:\u00a0gpus=1-4\u00a0resize=off", "ones: gpus=1-4 " + "x" * 1000])
def test_what_is_not_looked_at_is_handed_on(lua: Lua, comment: str) -> None:
    """With a word that only slurm-ones finds the job may be of any form."""
    assert said(lua, comment=comment, no_requeue=True, tasks=True)[1] is None
    if len(comment) > 1000:
        assert "too long" in str(said(lua, words="gpus=1-4", comment=comment)[1])


def test_long_text_costs_the_controller_nothing(lua: Lua) -> None:
    """The controller answers nobody while it reads a script of a few MB, or a comment that Slurm will refuse."""
    took = float(
        lua.run(
            """
            local began = os.clock()
            ones.runs_blocks(string.rep("ones-run ", 400000))
            ones.runs_blocks(string.rep("ones-run x\\n", 300000))
            ones.check({ comment = "ones: gpus=1-4 kinds=" .. string.rep("a,", 200000) })
            ones.check({ words = "gpus=1-4 kinds=" .. string.rep("a,", 200000) })
            return os.clock() - began
            """
        )
        or "nan"
    )
    assert took < 2.0
    lines = "x\nones-run --blocks"
    assert lua.run(f"return ones.runs_blocks({literal(lines)}) and 1 or nil") == "1"
    assert lua.run(f"return ones.runs_blocks({literal('--blocks ones-run x')}) and 1 or nil") is None
