"""The demo's twelve jobs on a simulated Slurm under the companion itself: `python -m tests.demo.simulated [SEEDS [S]]`.

Seconds instead of minutes, and no machine that has to be quiet: for what is decided, not for figures. A block takes S
seconds to start, and all other costs are those of the real run. A job is done when its progress is, so a batch that is
worth less for each sample takes longer here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from slurm_ones.demo.jobs import ON_CLUSTER, DemoJob, workload
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run
from slurm_ones.simulate.slurm.nodes import PartitionSpec, SlurmConf
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot

READY_S = 4.5
"""Until a block trains."""
TICK_S = 5.0
APART_S = 0.37
"""By how much later jobs come in each further run, so that ticks fall elsewhere."""
COSTS = ClusterSettings(backfill_s=2.0, report_s=2.0, first_report_s=2.0, speed_noise=0.02, stop=0.05)
GUESTS = "scavenge"
SETTINGS = {"guests": {"gpu": {"partition": GUESTS, "charged": False, "most": 2}}, "resize": {"preempted_s": 5}}
"""Those of `make demo`."""
RIGID = (DemoJob("rigid-1", 34, 3, 2, "cnn"), DemoJob("rigid-2", 66, 5, 4, "cnn"))
"""Of about 20 s."""


class DemoSpec(ClusterSpec):
    """The demo's nodes, with its partition for guests."""

    def partitions(self) -> Iterator[PartitionSpec]:
        """See `ClusterSpec`."""
        for one in super().partitions():
            yield replace(one, tier=10)
            yield replace(one, name=GUESTS, default=False, preempt="cancel")


def simulated(policy: str = "ones", seed: int = 0, ready_s: float = READY_S) -> Outcome:
    """The jobs under a policy."""
    jobs = [replace(job, at=job.at + (APART_S * seed if job.at else 0.0)) for job in (*ON_CLUSTER, *RIGID)]
    work = workload(jobs)
    names = {job.name for job in RIGID}
    work = replace(work, submissions=tuple(replace(one, elastic=one.name not in names) for one in work.submissions))
    return run(
        policy,
        {},
        work,
        DemoSpec(4, 4),
        interval_s=TICK_S,
        mechanism=Hot(pause_s=0.04, shrink_pause_s=0.002, launch_s=ready_s),
        seed=seed,
        settings=SETTINGS if policy == "ones" else {},
        cluster_settings=COSTS,
        conf=SlurmConf(youngest_first=True, kill_wait_s=5.0),
    )


def mean_jct_s(outcome: Outcome) -> float:
    return float(np.mean([job.jct_s for job in outcome.jobs]))


def waits_s(outcome: Outcome) -> list[float]:
    """Of the rigid jobs, until they started."""
    started = {job.name: (job.started or np.inf) - job.submitted for job in outcome.jobs}
    return [started[job.name] for job in RIGID]


def main(seeds: int, ready_s: float = READY_S) -> None:
    """Print each job's sizes in the first run, the mean JCT of all, and the waits of rigid jobs."""
    alone = simulated("fifo", ready_s=ready_s)
    found = [simulated(seed=seed, ready_s=ready_s) for seed in range(seeds)]
    for job in found[0].jobs:
        sizes = " → ".join(f"{one.gpus} at {one.start:.0f} s" for one in found[0].segments if one.job == job.name)
        print(f"{job.name}: {job.jct_s:.0f} s; {sizes}")
    means = [mean_jct_s(outcome) for outcome in found]
    print(
        f"mean JCT {np.mean(means):.1f} s ({min(means):.1f} to {max(means):.1f}), Slurm alone {mean_jct_s(alone):.1f} s"
    )
    for outcome in (alone, *found):
        print("rigid jobs started after " + ", ".join(f"{wait:.1f} s" for wait in waits_s(outcome)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, float(sys.argv[2]) if len(sys.argv) > 2 else READY_S)
