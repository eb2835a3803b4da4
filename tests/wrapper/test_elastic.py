"""Whole runs outside Slurm: resizes, orders, signals and failures, with real processes and gradients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ones_wrapper.protocol import (
    Batch,
    Bye,
    Checkpoint,
    Epoch,
    First,
    Hello,
    Order,
    Throughput,
    decode_report,
    decode_spec,
)
from tests.wrapper.runs import Run, assert_exactly_once, write_order

EPOCHS, SAMPLES = 4, 97


def parameters(path: Path) -> torch.Tensor:
    return torch.tensor(json.loads(path.read_text())["parameters"], dtype=torch.float64)


def drain(run: Run, number: int, **order: int) -> Checkpoint:
    """Order a drain, and end the run as a requeue does."""
    write_order(run.job_dir, Order(number, run.restart, drain=True, **order))
    checkpoint = run.wait_for(Checkpoint, lambda report: report.order == number)
    run.signal(signal.SIGTERM)
    assert run.end() == 143, run.errors
    assert run.of(Bye) == [Bye("drained", checkpoint.step, 143)]
    return checkpoint


@pytest.mark.slow
def test_resizes_change_neither_the_samples_nor_the_parameters(tmp_path: Path) -> None:
    """Protects the core promise: 1 → 3 → 2 ranks by drains and a kill end where an uninterrupted run ends."""
    job = tmp_path / "job"
    job.mkdir()
    slow = ("--epochs", str(EPOCHS), "--step-ms", "300", "--hurry", str(job / "hurry"))  # which never comes
    first = Run(job, *slow)
    plain = Run(tmp_path / "plain", "--epochs", str(EPOCHS), "--out", str(tmp_path / "plain.json"))
    first.wait_for(Throughput)
    left = drain(first, 1)
    assert left.cursor < SAMPLES and left.step > 0

    second = Run(job, *slow, ranks=3, restart=1)
    hello = second.wait_for(Hello)
    assert (hello.world, hello.step, hello.cursor, hello.checkpoint) == (3, left.step, left.cursor, left.name)
    second.wait_for(Throughput)
    second.signal(signal.SIGUSR1)
    passing = second.wait_for(Checkpoint)
    assert passing.order is None
    second.wait_for(Throughput, lambda report: report.step > passing.step + 1)
    second.process.kill()  # its ranks die with it, and the steps after the checkpoint are lost
    second.end()

    last = Run(job, "--epochs", str(EPOCHS), "--out", str(tmp_path / "job.json"), ranks=2, restart=2)
    assert last.end() == 0, last.errors
    assert last.of(Hello)[0].step == passing.step
    assert last.of(Bye) == [Bye("finished", 7 * EPOCHS)]
    assert plain.end() == 0, plain.errors
    assert_exactly_once(job, EPOCHS, SAMPLES)
    assert_exactly_once(tmp_path / "plain", EPOCHS, SAMPLES)
    torch.testing.assert_close(parameters(tmp_path / "job.json"), parameters(tmp_path / "plain.json"))
    spec = decode_spec((job / "spec.json").read_bytes())
    assert (spec.dataset, spec.gradient_bytes) == (SAMPLES, 8 * (9 * 64 + 65 * 64 + 65))
    assert [r.samples for r in plain.of(Epoch)] == [SAMPLES] * EPOCHS
    assert sorted(p.name for p in (job / "checkpoints").iterdir())[-1] == f"step-{7 * EPOCHS:09d}"
    assert len(list((job / "checkpoints").iterdir())) == 2


@pytest.mark.slow
def test_batch_order_takes_effect_without_a_restart(tmp_path: Path) -> None:
    """Protects: the batch changes at a step boundary, is cut to what the ranks hold, the learning rate
    follows up to its cap and schedulers do not see it; a drain that nobody requeues ends by itself; a foreign
    drain is no order."""
    hurry = tmp_path / "hurry"
    run = Run(
        tmp_path, "--step-ms", "250", "--hurry", str(hurry), "--epochs", "8", "--workers", "1",
        "--out", str(tmp_path / "out.json"), ranks=2, ONES_DRAIN_WAIT_S="0.5",
    )  # fmt: skip
    run.wait_for(Throughput)
    write_order(tmp_path, Order(1, restart=5, batch=8, drain=True))  # of a run that is not this one
    write_order(tmp_path, Order(2, restart=0, batch=48))
    changed = run.wait_for(Batch)
    assert (changed.batch, changed.momentum_power, changed.order) == (48, 1.0, 2)
    run.wait_for(Throughput, lambda report: report.batch == 48)
    write_order(tmp_path, Order(3, restart=0, batch=1000, drain=True))
    drained = run.wait_for(Checkpoint, lambda report: report.order == 3)
    run.wait_for(Throughput, lambda report: report.batch == 64)
    hurry.touch()
    assert run.end() == 0, run.errors
    assert "no requeue came" in run.errors
    assert run.of(Bye)[0].reason == "finished" and run.of(Bye)[0].step > drained.step
    assert [(b.batch, b.order) for b in run.of(Batch)] == [(48, 2), (64, 3)]
    factors = {(report.batch, report.lr_factor) for report in (changed, *run.of(Throughput))}
    assert {batch for batch, _ in factors} == {16, 48, 64}
    # Twice the schedule's largest rate, which falls by a fifth each epoch, at most.
    assert all((batch == 16 and one == 1.0) or 2.0 <= one <= batch / 16 for batch, one in factors)
    assert_exactly_once(tmp_path, 8, SAMPLES)
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["lr"] == pytest.approx(0.02 * 0.8**8)
    assert out["omp"] == "1"


@pytest.mark.slow
def test_newer_order_calls_a_drain_off(tmp_path: Path) -> None:
    """Protects: a resize that the companion gives up costs the job a pause, not a run."""
    hurry = tmp_path / "hurry"
    run = Run(tmp_path, "--step-ms", "400", "--hurry", str(hurry))
    run.wait_for(Throughput)
    write_order(tmp_path, Order(1, 0, drain=True))
    run.wait_for(Checkpoint, lambda report: report.order == 1)
    paused = time.monotonic()
    time.sleep(2.0)
    paused = time.monotonic() - paused
    write_order(tmp_path, Order(2, 0))
    run.wait_for(Throughput, lambda report: report.step > run.of(Checkpoint)[0].step + 2)
    hurry.touch()
    assert run.end() == 0, run.errors
    assert "a newer order came" in run.errors
    # The pause is no step: however slow a busy machine makes some, it is in none of them.
    lines = [decode_report(line) for line in (tmp_path / "reports-0.jsonl").read_bytes().splitlines(keepends=True)]
    measured = [(at, report) for _, at, report in lines if isinstance(report, Throughput)]
    span = measured[-1][0] - measured[0][0]
    assert sum(report.seconds for _, report in measured[1:]) < span - 0.7 * paused


@pytest.mark.slow
def test_full_disk_does_not_stop_training(tmp_path: Path) -> None:
    """Protects: where a checkpoint cannot be written the last one stays, it is said, and a drain reports
    nothing.
    """
    hurry = tmp_path / "hurry"
    options = ("--step-ms", "400", "--hurry", str(hurry), "--epochs", "4", "--full", "15", "26")
    run = Run(tmp_path, *options, ranks=2)
    run.wait_for(First)
    run.signal(signal.SIGUSR1)
    good = run.wait_for(Checkpoint)
    run.wait_for(Throughput, lambda report: report.step >= 15)
    write_order(tmp_path, Order(1, 0, drain=True))
    run.wait_for(Throughput, lambda report: report.step >= 17)  # the next look comes with the next step
    hurry.touch()
    assert run.end() == 0, run.errors
    assert "could not be written" in run.errors
    assert good.step < 15
    assert [c.order for c in run.of(Checkpoint)] == [None, None]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert_exactly_once(tmp_path, 4, SAMPLES)


@pytest.mark.slow
def test_plain_python_runs_the_same_script(tmp_path: Path) -> None:
    """Protects: the edits do not tie a script to Slurm or to ones-run."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
    run = Run.__new__(Run)
    run.job_dir, run.restart = tmp_path / "ones-0", 0
    script = Path(__file__).parent / "train.py"
    command = [sys.executable, str(script), "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run.of(Bye)[-1].reason == "finished"
