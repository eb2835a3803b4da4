"""The lines and files between job and companion: whatever is written is read back, and nothing else is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.protocol import (
    MAX_BLOCKS,
    MAX_INT,
    MAX_LINE,
    MAX_TEXT,
    REPORTS,
    FusedMember,
    Membership,
    Order,
    ProtocolError,
    Report,
    Spec,
    Throughput,
    decode_order,
    decode_report,
    decode_spec,
    encode,
    encode_report,
)
from ones_wrapper.protocol.fields import TINY
from ones_wrapper.protocol.limits import MAX_NOTES, SizeLimits, StrategyLimits

PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=40)
COUNTS = st.integers(0, MAX_INT)
MEASURED = st.floats(TINY, MAX_INT, allow_nan=False) | st.just(0.0)
SIGNED = ("loss", "exit_code")
TASKS = st.lists(COUNTS, max_size=20).map(tuple)
BYTES = dict.fromkeys(("fixed_bytes", "sample_bytes", "replica_bytes", "data_bytes"), COUNTS)
ROWS = st.builds(
    lambda parts, each, **others: SizeLimits(parts * each, parts, **others),
    st.integers(1, 16),
    st.integers(1, 16),
    quantum=st.integers(1, 64),
    **BYTES,
)
NOTES = st.lists(PRINTABLE, max_size=MAX_NOTES).map(tuple)
LIMITS = st.builds(
    StrategyLimits,
    PRINTABLE.filter(bool),
    st.lists(ROWS, max_size=9, unique_by=lambda row: row.gpus).map(
        lambda rows: tuple(sorted(rows, key=lambda r: r.gpus))
    ),
    memory_bytes=COUNTS,
    carries=NOTES,
    resets=NOTES,
    min_steps=COUNTS,
    batch_fixed=st.booleans(),
)
MEMBERS = st.lists(st.builds(FusedMember, COUNTS, st.lists(PRINTABLE, max_size=4).map(tuple)), max_size=4).map(tuple)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: COUNTS,
    float: MEASURED,
    str: PRINTABLE,
    bool: st.booleans(),
    StrategyLimits: LIMITS,
    tuple[int, ...]: TASKS,
    tuple[FusedMember, ...]: MEMBERS,
}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def _field(name: str, kind: Any) -> st.SearchStrategy[Any]:
    """Every value that the protocol allows in a field."""
    if name == "batch" and kind == int | None:
        return st.none() | st.integers(1, MAX_INT)
    if name == "blocks" and kind == tuple[int, ...] | None:
        return st.none() | st.sets(COUNTS, min_size=1, max_size=20).map(lambda tasks: tuple(sorted(tasks)))
    for plain in VALUES:
        if kind in (plain, plain | None):
            values = VALUES[plain]
            if name in SIGNED:
                values = values | values.map(lambda value: -value)
            return values if kind == plain else st.none() | values
    raise AssertionError(f"{name}: {kind} is new to this test")


def built(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: _field(field.name, hints[field.name]) for field in fields(cls)})


ANY_REPORT: st.SearchStrategy[Report] = st.one_of([built(cls) for cls in REPORTS.values()])


@given(COUNTS, st.floats(0, 1e11), ANY_REPORT)
def test_every_report_is_read_as_it_was_written(number: int, time: float, report: Report) -> None:
    """One line, and the time to a millisecond."""
    line = encode_report(number, time, report)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) <= MAX_LINE
    assert decode_report(line) == (number, round(time, 3), report)


@given(built(Spec), built(Order))
def test_spec_and_order_are_read_as_they_were_written(spec: Spec, order: Order) -> None:
    assert decode_spec(encode(spec)) == spec
    assert decode_order(encode(order)) == order


def test_a_number_next_to_zero_is_zero() -> None:
    """Protects views from products that PostgreSQL refuses."""
    line = b'{"n":1,"t":1.0,"kind":"epoch","epoch":1,"step":1,"samples":1,"loss":%s}'
    losses = [decode_report(line % loss)[2].loss for loss in (b"5e-324", b"-5e-324", b"1e-99", b"-1e-99", b"0")]
    assert losses == [0.0, 0.0, 1e-99, -1e-99, 0.0]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 2.6e28])
def test_a_loss_that_nobody_could_read_is_left_out(odd: float) -> None:
    """A training that went wrong still reports its throughput, and the steps that had no loss."""
    report = Throughput(0, 1, 64, 64, 0.5, 64, 1.0, loss=odd, nonfinite=1)
    line = encode_report(1, 1.0, report)
    _, _, told = decode_report(line)
    assert isinstance(told, Throughput)
    assert (told.loss, told.nonfinite, told.samples) == (None, 1, 64)
    assert not {b"null", b"loss", b"noise", b"progress"} & {*line.replace(b'"', b" ").split()}, "nothing else is longer"


def _no_errors_but_ours(read: Callable[[bytes], object], text: bytes) -> None:
    try:
        read(text)
    except ProtocolError as error:
        assert len(str(error)) < MAX_TEXT


READERS = st.sampled_from([decode_report, decode_spec, decode_order])


@given(READERS, st.binary(max_size=200))
def test_bytes_of_any_kind(read: Callable[[bytes], object], text: bytes) -> None:
    _no_errors_but_ours(read, text)


@given(READERS, ANY_JSON)
def test_json_of_any_kind(read: Callable[[bytes], object], value: Any) -> None:
    """NaN and numbers beyond 64 bits included."""
    _no_errors_but_ours(read, json.dumps(value).encode())


@given(ANY_REPORT, st.data())
def test_a_report_with_a_wrong_field(report: Report, data: st.DataObject) -> None:
    """What comes out of a line with one field replaced by anything has the types that readers count on."""
    body = json.loads(encode_report(1, 1.0, report))
    name = data.draw(st.sampled_from([*sorted(body), *(field.name for field in fields(report))]))
    body[name] = data.draw(ANY_JSON)
    try:
        _, _, told = decode_report(json.dumps(body).encode())
    except ProtocolError:
        return
    hints = get_type_hints(type(told))
    for field in fields(told):
        value = getattr(told, field.name)
        if hints[field.name] == tuple[int, ...]:
            assert isinstance(value, tuple) and len(value) <= MAX_BLOCKS
            assert all(type(task) is int and 0 <= task <= MAX_INT for task in value)
        else:
            assert isinstance(value, hints[field.name])
        if isinstance(value, (int, float)):
            assert abs(value) <= MAX_INT
            assert value >= 0 or field.name in SIGNED
        if isinstance(value, str):
            assert value.isprintable() and len(value) <= MAX_TEXT


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"null", b"[]", b"{}", b"[" * 10_000, b"\xff\xfe{}"),
        b'{"n":1,"t":1,"kind":"hello"}',
        b'{"n":1,"t":1,"kind":["first"]}',
        b'{"n":1,"t":1,"kind":"first","step":true,"seconds":1}',
        b'{"n":1,"t":1,"kind":"first","step":1,"seconds":-1}',
        b'{"n":1,"t":1,"kind":"first","step":1,"seconds":1e999}',
        b'{"n":1,"t":NaN,"kind":"first","step":1,"seconds":1}',
        b'{"n":-1,"t":1,"kind":"first","step":1,"seconds":1}',
        b'{"n":1,"t":1,"kind":"first","step":1e3,"seconds":1}',
        b'{"n":1,"t":1,"kind":"first","step":' + b"9" * 5_000 + b',"seconds":1}',
        b'{"n":1,"t":1,"kind":"first","step":1,"seconds":1,"x":"' + b"y" * MAX_LINE + b'"}',
    ],
)
def test_lines_that_are_not_believed(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_report(line)


def test_what_a_newer_job_adds_is_passed_over() -> None:
    """One that an older version did not write has its default."""
    line = b'{"n":1,"t":1,"kind":"batch","step":1,"batch":2,"lr_factor":1,"later":{"x":[1]}}'
    _, _, report = decode_report(line)
    assert report == REPORTS["batch"](1, 2, 1.0)  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize(
    "blocks", ["[]", "[1,1]", "[-1]", "[true]", "[1.0]", '"1"', "1", "{}", "[[1]]", str([*range(600)])]
)
def test_tasks_that_are_no_tasks(blocks: str) -> None:
    """An order to train with them costs a `ProtocolError`: a block would leave because of it."""
    with pytest.raises(ProtocolError, match="blocks"):
        decode_order(f'{{"number":1,"restart":0,"blocks":{blocks}}}'.encode())


def test_a_membership_of_the_most_blocks_is_one_line() -> None:
    """Of as many blocks as a job may have, with task numbers and restart counts as Slurm gives them."""
    report = Membership(9, tuple(range(3000, 3000 + MAX_BLOCKS)), (1000,) * MAX_BLOCKS, 512, 8, 4096, 10**6, 4096, 0.1)
    line = encode_report(1, 1.0, report)
    assert len(line) <= MAX_LINE
    assert decode_report(line)[2] == report
