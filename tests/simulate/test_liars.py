"""What lies about speed gain: six jobs of blocks that do not scale, of which three say that they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ones_wrapper.protocol import Hello, Membership, Report, Throughput
from slurm_ones.companion import Tick
from slurm_ones.simulate.run import AT_ONCE, WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot, Submission
from slurm_ones.simulate.training.reports import JobFiles
from slurm_ones.simulate.workloads.catalogue import KINDS, ParametricSpeed, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World
from tests.marks import nightly

BEFORE_S, TICK_S, DECISIONS = 300.0, 60.0, 10
CLUSTER = ClusterSpec(3, 4)
# Exchanging gradients takes as long as more GPUs save, and a larger batch is not allowed.
SPEED = ParametricSpeed(0.0, 0.02, (0.16, 0.04), (0.16, 0.04), 1.0)
FLAT = build(KINDS["bert-glue"]).altered(speed=SPEED, max_batch=KINDS["bert-glue"].base_batch)
NAMES = [f"{kind}{i}" for i in range(3) for kind in ("honest", "liar")]
JOBS = tuple(Submission(name, 0.0, "flat", 1, FLAT.base_batch, elastic=True, epochs=9.0) for name in NAMES)

Lie = Callable[[Throughput, int], Throughput]
"""What a liar on this number of GPUs makes of a report."""
LIES: dict[str, Lie] = {
    "samples": lambda true, gpus: replace(true, samples=true.samples * gpus),
    "samples and batch": lambda true, gpus: replace(true, samples=true.samples * gpus, batch=true.batch * gpus),
    "samples and steps": lambda true, gpus: replace(true, samples=true.samples * gpus, step=true.step * gpus),
}


class LyingFiles(JobFiles):
    """The files of a job that multiplies what it reports by its GPUs."""

    lie: Lie
    gpus = 1

    def report(self, time: float, report: Report) -> None:
        if isinstance(report, (Hello, Membership)):
            self.gpus = report.world
        super().report(time, self.lie(report, self.gpus) if isinstance(report, Throughput) else report)


class Liars(World):
    """A world in which half of the jobs lie."""

    lie: Lie

    def _files(self, submission: Submission, job_id: int) -> JobFiles:
        if submission.name.startswith("honest"):
            return super()._files(submission, job_id)
        files = LyingFiles(self.directory, job_id)
        files.lie = type(self).lie
        return files


def held(folder: Path, lie: Lie) -> dict[str, float]:
    """GPU-seconds that liars and honest jobs hold over the first decisions."""
    folder.mkdir()
    settings = companion_settings(CLUSTER, folder, AT_ONCE, tick_s=TICK_S, policy="ones")
    work = Workload("six", JOBS, {"flat": FLAT})
    world = type("Lying", (Liars,), {"lie": staticmethod(lie)})(
        work, CLUSTER, folder, ClusterSettings(), mechanism=Hot(launch_s=5.0)
    )
    sums, ticks = {"honest": 0.0, "liar": 0.0}, list[Tick]()

    def on_tick(tick: Tick) -> bool:
        ticks.append(tick)
        for name, job_id in world.job_ids.items():
            tasks = (task for task in world.cluster.records.of(job_id) if task.running)
            sums[name[:-1]] += TICK_S * sum(sum(task.gpus.values()) for task in tasks)
        return len(ticks) == DECISIONS

    world.pass_time(BEFORE_S)
    with WarningLog().recording() as log, run_companion(world, settings, log, on_tick):
        pass
    return sums


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What they hold if nobody lies."""
    return held(tmp_path_factory.mktemp("honest") / "jobs", lambda true, gpus: true)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [nightly("samples"), nightly("samples and batch"), "samples and steps"])
def test_liars_hold_no_more_than_honest_jobs(tmp_path: Path, honest: dict[str, float], lie: str) -> None:
    lied = held(tmp_path / "lied", LIES[lie])
    assert lied["liar"] <= lied["honest"]
    assert lied["honest"] >= 0.95 * honest["honest"]
