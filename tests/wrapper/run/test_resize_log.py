"""What a job's log says of its resizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_wrapper.process.log import log
from ones_wrapper.protocol import (
    Batch,
    Bye,
    Checkpoint,
    Hello,
    Membership,
    Order,
    ProtocolError,
    Report,
    Throughput,
    decode_order,
    encode,
    encode_report,
    reports_name,
)
from ones_wrapper.run.resize_log import Before, ResizeLog, before

HELLO = Hello(1, 2, 2, 32, 1.0, 16, 64, 1000, 3, 0, 0, 0, "")


def reports(folder: Path, restart: int, *lines: tuple[float, Report]) -> None:
    text = b"".join(encode_report(n + 1, time, report) for n, (time, report) in enumerate(lines))
    (folder / reports_name(restart)).write_bytes(text)


def speed(samples: int, seconds: float, noise: float | None = None) -> Throughput:
    return Throughput(0, 10, 0, samples, seconds, 32, 1.0, noise=noise)


def test_how_the_run_before_trained(tmp_path: Path) -> None:
    """Protects the line at a resize: the shape, the batch, the end of the last step, and the speed."""
    assert before(tmp_path, 1) is None
    reports(
        tmp_path,
        0,
        (100.0, HELLO),
        (110.0, speed(320, 1.0)),
        (112.0, speed(640, 1.0)),
        (113.0, Checkpoint("step-10", 0, 0, 10, 1, 0.1, order=7)),
        (120.0, Bye("drained", 10, 143)),
    )
    assert before(tmp_path, 1) == Before("1x2", 32, 112.0, 480.0)
    # Started again in the same run: that is what came before, whatever the one before was.
    reports(tmp_path, 1, (130.0, HELLO), (131.0, speed(320, 1.0, noise=16.0)))
    found = before(tmp_path, 1)
    assert found is not None and found.useful_per_s == pytest.approx(320 * (16 + 16) / (16 + 32))
    # Of a job of blocks the last membership counts, and what was measured with it.
    one = Membership(1, (0, 2), (0, 0), 2, 0, 3, 10, 48, 0.1)
    reports(tmp_path, 2, (1.0, HELLO), (2.0, speed(320, 1.0)), (3.0, one), (4.0, speed(90, 1.0)))
    assert before(tmp_path, 2) == Before("3 GPUs", 48, 4.0, 90.0)


def test_the_batch_of_an_order_is_not_what_was_measured(tmp_path: Path) -> None:
    """Protects the line on what a resize brought: each order to requeue names a batch just before the run's end."""
    trained = [(101.0, Throughput(0, 5, 0, 90, 1.0, 16, 1.0)), (110.0, speed(320, 1.0))]
    for batch in (32, 64):
        reports(tmp_path, 0, (100.0, HELLO), *trained, (112.0, Batch(10, batch, 1.0, 7)))
        assert before(tmp_path, 1) == Before("1x2", batch, 110.0, 320.0)


def test_a_long_file_costs_no_memory(tmp_path: Path) -> None:
    """Protects the start of a run whose last one wrote reports for weeks."""
    reports(tmp_path, 0, (1.0, HELLO), *((2.0 + n, speed(320, 1.0)) for n in range(5000)))
    assert before(tmp_path, 1) == Before("1x2", 32, 5001.0, 320.0)


def test_a_line_at_a_resize_and_one_of_what_it_brought(capsys: pytest.CaptureFixture[str]) -> None:
    """Protects what users see of a requeue: from, to, step, pause, what was expected, and what came of it."""
    lines = ResizeLog(clock=lambda: 130.0)
    lines.started(Before("1x2", 32, 100.0, 480.0), "1x4", 1.84)
    lines.stepped(813, 32.0, 2.0)
    assert capsys.readouterr().err == "ones: 1x2 → 1x4 at step 812: paused 30 s; expected 1.8 times as fast\n"
    for step in range(100):
        lines.stepped(814 + step, 816.0, 1.0)
    assert capsys.readouterr().err == "ones: 1x4 trains 1.7 times as fast as 1x2 did\n"
    lines.switched("1x4", "1x1", 914, 0.081, None)
    assert capsys.readouterr().err == "ones: 1x4 → 1x1 at step 914: paused 0.081 s\n"
    for step in range(33):
        lines.stepped(915 + step, 204.0, 1.0)
    assert capsys.readouterr().err == "ones: 1x1 trains 0.25 times as fast as 1x4 did\n"


def test_nothing_is_said_of_what_did_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Protects the log from a line at each restart, and from those of ranks that do not speak for the job."""
    lines = ResizeLog(clock=lambda: 130.0)
    lines.started(Before("1x2", 32, 100.0, 480.0), "1x2", 1.0)
    lines.started(None, "1x2", None)
    lines.switched("1x2", "1x4", 5, 0.1, 2.0, speaks=False)
    for step in range(100):
        lines.stepped(step, 32.0, 1.0)
    assert capsys.readouterr().err == ""


def test_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Protects logs that people search: a message is one line, whatever error is part of it."""
    log("failed: one\n  two", "ones-run")
    assert capsys.readouterr().err.splitlines() == ["ones-run: failed: one   two"]


def test_an_expected_gain_is_checked() -> None:
    """Protects the job from an order that says nonsense: it is one of another program's numbers."""
    order = Order(1, 0, drain=True, gain=1.5)
    assert decode_order(encode(order)) == order
    assert decode_order(b'{"number": 1, "restart": 0}').gain is None
    for gain in ("-1", "1e400", "NaN", '"2"', "true"):
        with pytest.raises(ProtocolError):
            decode_order(f'{{"number": 1, "restart": 0, "gain": {gain}}}'.encode())
