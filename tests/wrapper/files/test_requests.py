"""`touch ones.save` and `touch ones.stop`: what an owner asks for, and what a run finds of the one before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ones_wrapper.files.job_io import SAVE, STOP, OwnerRequests, previous
from ones_wrapper.process.exit_codes import DONT_RESTART
from ones_wrapper.protocol import (
    Bye,
    Checkpoint,
    Epoch,
    First,
    Hello,
    Throughput,
    decode_spec,
    encode_report,
    reports_name,
)
from tests.wrapper.runs import Run, assert_exactly_once

pytestmark = pytest.mark.slow


def test_save_and_stop_and_what_each_start_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in passing, and the end with the code that means 'do not restart', after a checkpoint; both answered
    once. The breakdown of a restart: queue, launch, import, process group, load, first step; and the counts."""
    with monkeypatch.context() as patch:
        patch.setattr(Run, "forked", False)  # with imports
        run = Run(tmp_path, "--step-ms", "20", "--epochs", "1000", ranks=2)
    run.wait_for(Throughput)
    (tmp_path / SAVE).touch()
    passing = run.wait_for(Checkpoint)
    (tmp_path / STOP).touch()
    assert run.end() == DONT_RESTART, run.errors
    assert not (tmp_path / SAVE).exists() and not (tmp_path / STOP).exists()
    bye = run.of(Bye)[0]
    assert (bye.reason, bye.exit_code) == ("stopped", DONT_RESTART)
    last = run.of(Checkpoint)[-1]
    assert last.step == bye.step > passing.step
    hello, first = run.of(Hello)[0], run.of(First)
    assert [report.step for report in first] == [1] and first[0].seconds > 0
    assert 0 < hello.import_s <= hello.launch_s
    assert hello.group_s > 0 and hello.queue_s == 0 and hello.attempt == 0
    for restart in (1, 2):  # at another size, and at the same one
        again = Run(tmp_path, "--epochs", str(last.epoch + restart), restart=restart)
        assert again.end() == 0, again.errors
        hello = again.of(Hello)[0]
        assert hello.resizes == 1 and hello.queue_s > 0 and hello.load_s > 0


def test_looks_are_rare_and_files_of_others_are_no_requests(tmp_path: Path) -> None:
    clock = [0.0]
    requests = OwnerRequests(tmp_path, clock=lambda: clock[0])
    assert requests.due() and not requests.due()
    clock[0] = 1.0
    assert requests.due()
    (tmp_path / STOP).touch()
    assert requests.requested(STOP) and not requests.requested(SAVE)
    os.chown(tmp_path / STOP, 12345, 12345) if os.geteuid() == 0 else (tmp_path / STOP).unlink()
    assert not requests.requested(STOP)


def test_the_start_before(tmp_path: Path) -> None:
    """The last whole line tells."""
    assert previous(tmp_path, 0) == (0.0, False)
    first = tmp_path / reports_name(0)
    epoch = encode_report(1, 10.0, Epoch(0, 1, 97))
    first.write_bytes(epoch + encode_report(2, 20.0, Bye("signal", 3)) + b'{"n": 3, "t"')
    assert previous(tmp_path, 1) == (20.0, False)
    (tmp_path / reports_name(1)).write_bytes(epoch)
    assert previous(tmp_path, 1) == (10.0, True)
    assert previous(tmp_path, 3) == (0.0, False)
    first.write_bytes(b"\x00" * 100_000 + b"\n")
    assert previous(tmp_path, 0) == (0.0, False)


def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path) -> None:
    """Memory is emulated: the ranks start again with half, and half of that, from the last checkpoint; the batch stays,
    in passes; the companion is told; each sample counts once."""
    options = ("--batch", "48", "--max-local-batch", "32", "--max-passes", "8", "--memory", "7", "--epochs", "2")
    run = Run(tmp_path, *options, ranks=2)
    assert run.end() == 0, run.errors
    assert [hello.attempt for hello in run.of(Hello)] == [0, 1, 2]
    assert [hello.batch for hello in run.of(Hello)] == [48] * 3
    assert decode_spec((tmp_path / "spec.json").read_bytes()).max_local_batch == 6
    assert "starting the ranks again with smaller passes" in run.errors
    assert_exactly_once(tmp_path, 2, 97)
    alone = Run(tmp_path / "alone", "--memory", "1", "--max-local-batch", "1", "--epochs", "1")
    assert alone.end() == 0, alone.errors


def test_a_loss_that_is_no_number_is_reported(tmp_path: Path) -> None:
    """In reports and in the log."""
    run = Run(tmp_path, "--nan-at", "9", "--epochs", "4", "--step-ms", "30", ranks=2)
    assert run.end() == 0, run.errors
    epochs = run.of(Epoch)
    assert epochs[0].nonfinite == 0 and epochs[0].loss is not None
    assert epochs[1].nonfinite == 5 and epochs[3].nonfinite == 7
    assert epochs[3].loss is None
    assert sum(report.nonfinite for report in run.of(Throughput)) > 0
    assert "not a finite number" in run.errors
