"""Both engines tell policies what is to be expected, from what arrived so far alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from slurm_ones.decide.ordered import Fifo
from slurm_ones.schedule.policy import Arrivals, ClusterView, JobView, Schedule
from slurm_ones.simulate.engines.companion_engine import run
from slurm_ones.simulate.engines.idealized import idealized_cluster, run_idealized
from slurm_ones.simulate.engines.world import ClusterSpec
from slurm_ones.simulate.slurm.timeline import EPOCH
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.workload import Workload

SHORT = {"cnn": build(replace(KINDS["resnet18-cifar10"], epochs=2), name="cnn")}


class Watching(Fifo):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, Arrivals | None]] = []

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        self.told.append((now, cluster.arrivals))
        return super().decide(cluster, jobs, now, rng)


def every(seconds: float, jobs: int) -> Workload:
    submissions = tuple(Submission(f"job-{i}", i * seconds, "cnn", 1, 32) for i in range(jobs))
    return Workload("steady", submissions, SHORT)


def check(told: list[tuple[float, Arrivals | None]], gap_s: float, begin: float) -> None:
    """Nothing at first, about the truth after hours, never more than had come, and a look an hour."""
    assert told[0][1] is None
    looks = [next(group) for _, group in groupby(told, key=lambda pair: pair[1])]
    for now, arrivals in looks[1:]:
        assert arrivals is not None
        assert arrivals.seen <= (now - begin) / gap_s + 1
    assert all(then[0] - now[0] >= 3600.0 for now, then in pairwise(looks[1:]))
    last = looks[-1][1]
    assert last is not None
    assert 0.7 * gap_s < last.gap_s() < 1.4 * gap_s
    assert 0 < last.gpu_s < 10 * 3600.0 and last.stay_s > 0


def test_the_plain_engine_tells_what_came_so_far() -> None:
    """No job that is still to be submitted is counted."""
    policy = Watching()
    run_idealized(policy, every(600.0, 24), idealized_cluster(2, 4), interval_s=120.0)
    check(policy.told, 600.0, 0.0)


def test_the_companion_asks_its_database_from_time_to_time() -> None:
    """The same figures reach a policy through the job database."""
    policy = Watching()
    workload = every(600.0, 24)
    run("fifo", {}, workload, ClusterSpec(2, 4), interval_s=300.0, make=lambda: policy)
    check(policy.told, 600.0, EPOCH)
