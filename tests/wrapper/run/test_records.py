"""What a run reports of a change of its ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership.plan import Plan
from ones_wrapper.protocol import Batch, Bye, Membership, Report, decode_report
from ones_wrapper.run.loop_state import Loop
from ones_wrapper.run.meter import Meter
from ones_wrapper.run.records import Records
from ones_wrapper.run.series import Open
from ones_wrapper.run.settings import Common, Identity, RunSettings
from ones_wrapper.run.sizes import StepSizes
from tests.wrapper.membership.test_plan import member

ONE, TWO = Plan(1, 0, (member(0),)), Plan(2, 0, (member(0), member(1)))


class Device:
    """One whose queue holds a step more than the script has waited for."""

    now = owed = 0.0

    def wait(self) -> None:
        self.now, self.owed = self.now + self.owed, 0.0

    def launch(self, seconds: float) -> None:
        self.now += 0.01
        self.owed += seconds


class Run:
    """Rank 0 of a job of blocks, whose steps the device takes 0.3 s for."""

    def __init__(self, directory: Path, series: Open | None = None) -> None:
        self.device, self.progress, self.directory = Device(), TrainingProgress(), directory
        sizes = cast(StepSizes, SimpleNamespace(batch=8, lr_factor=1.0))
        group = TorchGroup(0, 1, 0, 1, 1, torch.device("cpu"), None)
        settings = RunSettings(True, None, False, series=series)
        common = Common(group, Identity(7, 0), settings, directory, None, self.progress, Loop())
        self.records = Records(common, sizes, 0.0)
        self.records.meter = Meter(2.0, lambda: self.device.now, self.device.wait)
        self.records.membership(ONE, 0.0, 0, 0.0, None)

    def step(self, seconds: float = 0.3) -> None:
        self.records.meter.start()
        self.device.launch(seconds)
        self.progress.step += 1
        self.records.step(8, 8.0)

    def change(self, pause_s: float) -> None:
        self.records.ranks_changed(TWO)
        self.records.membership(TWO, pause_s, 100, 0.2, None)

    def reported(self, *kinds: type[Report]) -> list[Report]:
        lines = (self.directory / "reports-0.jsonl").read_bytes().splitlines(keepends=True)
        return [report for line in lines if isinstance(report := decode_report(line)[2], kinds)]


def test_a_pause_lasts_until_the_first_step_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects what resizes are weighed by: connecting, compiling and filling the caches fall into the first step,
    which counts once the device did it. Neither an evaluation before it nor the second step is the change's."""
    run = Run(tmp_path)
    for _ in range(2):
        run.step()
    run.device.wait()
    run.change(0.5)
    run.records.send(Batch(2, 16, 1.0))
    run.device.now += 60.0  # an evaluation
    assert [report.generation for report in run.reported(Membership)] == [1]
    run.step()
    changed = run.reported(Membership, Batch)[1:]
    assert [type(report) for report in changed] == [Membership, Batch], "in the order in which they came"
    assert (changed[0].step, changed[0].transfer_s, changed[0].pause_s) == (2, 0.2, pytest.approx(0.5 + 0.31))
    assert "at step 2: paused 0.81 s" in capsys.readouterr().err
    run.step()
    assert len(run.reported(Membership)) == 2


def test_a_usual_step_is_no_pause(tmp_path: Path) -> None:
    """Protects jobs of long steps: a change that costs them nothing must not seem to cost a step."""
    run = Run(tmp_path)
    for _ in range(20):
        run.step()
    run.records.flush()
    run.change(0.5)
    run.step(0.9)
    assert run.reported(Membership)[-1].pause_s == pytest.approx(0.5 + 0.91 - 0.31)
    run.change(0.5)
    run.step(0.1)  # twice as many ranks
    assert run.reported(Membership)[-1].pause_s == pytest.approx(0.5)


def test_a_change_without_a_step_is_reported_at_the_end(tmp_path: Path) -> None:
    """Protects the job's history from a leader that leaves, or ends, right after a change."""
    run = Run(tmp_path)
    run.step()
    run.change(0.5)
    run.records.bye("finished", 0)
    assert [report.pause_s for report in run.reported(Membership)] == [0.0, 0.5]
    assert isinstance(run.reported(Bye, Membership)[-1], Bye)
