"""The reader of messages, for any bytes cut in any way."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.network.frames import FrameError, Frames, fields, frame, parts_of

MOST = 64
BODIES = st.lists(st.binary(max_size=MOST), max_size=8)


@given(BODIES, st.lists(st.integers(1, 40), min_size=1))
def test_what_was_sent_arrives_however_it_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    """Whole, in order, and nothing else."""
    data, frames, found, at, turn = b"".join(map(frame, bodies)), Frames(MOST), list[bytes](), 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
        while (body := frames.take()) is not None:
            found.append(body)
    assert found == bodies and frames.empty


@given(st.lists(st.binary(max_size=50), max_size=30))
def test_any_bytes_end_in_messages_or_in_an_error(chunks: list[bytes]) -> None:
    """It neither fails otherwise, nor holds more than came, nor gives out a message that is too long."""
    frames, came, gone = Frames(MOST), 0, 0
    try:
        for chunk in chunks:
            came += len(chunk)
            frames.feed(chunk)
            while (body := frames.take()) is not None:
                assert len(body) <= MOST
                gone += 4 + len(body)
            assert len(frames._bytes) == came - gone
    except FrameError:
        pass


@given(st.integers(MOST + 1, 2**32 - 1), st.binary(max_size=10))
def test_a_length_that_is_too_much_is_refused_at_once(length: int, more: bytes) -> None:
    """Before any of it has come."""
    with pytest.raises(FrameError, match=str(length)):
        Frames(MOST).feed(struct.pack("!I", length) + more)


@given(BODIES)
def test_fields_come_out_as_they_went_in(parts: list[bytes]) -> None:
    assert parts_of(fields(*parts)) == parts


@given(st.binary(max_size=200))
def test_any_bytes_are_fields_or_an_error(body: bytes) -> None:
    """What is taken for fields is the same bytes again."""
    with suppress(FrameError):
        assert fields(*parts_of(body)) == body
