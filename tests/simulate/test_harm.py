"""What others wait for growth: the whole companion on a simulated Slurm, in which one job has grown over all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_ones.companion import Tick
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Schedule
from slurm_ones.policy.shapes import shape_of
from slurm_ones.simulate.run import AT_ONCE, WarningLog, companion_settings, run_companion
from slurm_ones.simulate.slurm.nodes import PartitionSpec, SlurmConf
from slurm_ones.simulate.slurm.simulated_job import Program, Request
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Application, Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import JobKey
from tests.marks import nightly
from tests.simulate.harness import QUIET, Sleep

SPEC = ClusterSpec(4, 4, cpus_per_gpu=4)
TICK_S = 30.0
FREE = {**AT_ONCE, "limits.growth_cost": 1000.0}
LICENSE = (("matlab", 1),)
WORK = Workload(
    "one", (Submission("job", 0.0, "nlp", 1, 16, elastic=True, epochs=9.0),), {"nlp": build(KINDS["bert-glue"])}
)
OTHERS = tuple(
    PartitionSpec(name, SPEC.names, 4, name == "whole", default=False, cpus_per_node=16) for name in ("other", "whole")
)


class Grow:
    """All GPUs that there are, for a job that runs; else what its user asked for."""

    name = "grow"

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        found = {}
        for job in jobs:
            most = job.requested if job.shape is None else cluster.gpus
            shapes = (shape_of(cluster, gpus) for gpus in reversed(job.limits.gpus) if gpus <= most)
            shape = job.shape if job.fixed else next((one for one in shapes if one is not None), job.shape)
            if shape is not None:
                found[job.job_id] = Allocation(shape, job.batch)
        return Schedule(found)


class Shared(World):
    """A job with an account and a license, in which it has grown."""

    def _request(self, submission: Submission, app: Application) -> Request:
        return replace(super()._request(submission, app), licenses=LICENSE, account="lab")


def waited_s(folder: Path, mechanism: Mechanism, asked: dict[str, Any]) -> tuple[float, int]:
    """Seconds from a rigid job's submission, between two ticks, to its start; and how often the grown job, or its base,
    was requeued."""
    settings = companion_settings(SPEC, folder, FREE, tick_s=TICK_S, policy="fifo")
    conf = SlurmConf(licenses={"matlab": 20}, account_gpus={"lab": 20})
    world = Shared(WORK, SPEC, folder, QUIET, mechanism=mechanism, others=OTHERS, conf=conf)
    cluster, rigid = world.cluster, list[int]()

    def submit() -> None:
        def program(job_id: JobKey) -> Program:
            return Sleep(lambda code: cluster.exited(job_id, code), world.timeline, 1e9, 1.0)

        used = sum(job.running for job in cluster.jobs.values())
        cluster.conf = replace(conf, licenses={"matlab": used}, account_gpus={"lab": 16})
        request = Request(time_limit_s=600.0, user="bob", **asked)
        rigid.append(cluster.submit(request, program))

    def on_tick(tick: Tick) -> bool:
        grown = sum(sum(job.gpus.values()) for job in cluster.jobs.values()) == 16 and not tick.begun
        if grown and not rigid and world.seconds > 300:
            world.timeline.after(7.0, submit)
        return world.seconds > 3600 or bool(rigid and cluster.jobs[rigid[0]].start_time)

    with WarningLog().recording() as log, run_companion(world, settings, log, on_tick, Grow):
        pass
    assert rigid, "it has not grown"
    job = cluster.jobs[rigid[0]]
    assert job.start_time, f"not served: {job.reason}"
    assert all(training.blocks for training in world.trainings.values()), "no base was taken"
    return job.start_time - job.submit_time, cluster.records.of(1)[0].restart


ASKED = [
    {"gpus_per_node": 1},
    nightly({"gpus_per_node": 1, "partition": "other"}),
    {"nodes": 2, "gpus_per_node": 4, "partition": "other"},
    nightly({"cpus_per_node": 16}),
    nightly({"cpus_per_node": 2, "partition": "other"}),
    nightly({"gpus_per_node": 1, "node_names": ("n3",)}),
    nightly({"gpus_per_node": 1, "exclusive": True}),
    {"nodes": 2, "partition": "whole"},
    nightly({"gpus_per_node": 1, "account": "lab"}),
]
"""What somebody waits for; whom the rule serves is a table of tests/rules/test_growth.py."""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*ASKED, {"licenses": LICENSE}], ids=str)
def test_blocks_go_back_within_a_tick(tmp_path: Path, asked: dict[str, Any]) -> None:
    seconds, requeues = waited_s(tmp_path, Hot(launch_s=5.0), asked)
    assert seconds <= TICK_S + 5.0
    assert requeues == 0


@pytest.mark.nightly
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_plain_job_goes_back_by_one_requeue(tmp_path: Path, asked: dict[str, Any]) -> None:
    """The checkpoint, the end of its run, and the next tick come on top."""
    seconds, requeues = waited_s(tmp_path, Requeue(10.0), asked)
    assert seconds <= 2 * TICK_S + 15.0
    assert requeues == 2, "it had grown by one, and goes back by one"
