"""The demo's ten jobs on a simulated Slurm under the companion itself: `python -m tests.demo.simulated [SEEDS]`.

Seconds instead of minutes, and no machine that has to be quiet: for what is decided, not for figures. Costs are those
of the real run. A job is done when its progress is, so a batch that is worth less for each sample takes longer here.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from slurm_ones.demo.jobs import ON_CLUSTER, workload
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot

READY_S = 4.5
"""Until a block trains."""
TICK_S = 5.0
APART_S = 0.37
"""By how much later jobs come in each further run, so that ticks fall elsewhere."""
COSTS = ClusterSettings(backfill_s=2.0, report_s=2.0, first_report_s=2.0, speed_noise=0.02, stop=0.05)

HOT = Hot(pause_s=0.04, shrink_pause_s=0.002, launch_s=READY_S)


def simulated(policy: str = "ones", seed: int = 0) -> Outcome:
    """The ten jobs under a policy."""
    work = workload([replace(job, at=job.at + (APART_S * seed if job.at else 0.0)) for job in ON_CLUSTER])
    return run(policy, {}, work, ClusterSpec(4, 4), interval_s=TICK_S, mechanism=HOT, seed=seed, cluster_settings=COSTS)


def mean_jct_s(outcome: Outcome) -> float:
    """Of all ten."""
    return float(np.mean([job.jct_s for job in outcome.jobs]))


def main(seeds: int) -> None:
    """Print each job's sizes in the first run, and the mean JCT of all."""
    alone, found = mean_jct_s(simulated("fifo")), [simulated(seed=seed) for seed in range(seeds)]
    for job in found[0].jobs:
        sizes = " → ".join(f"{one.gpus} at {one.start:.0f} s" for one in found[0].segments if one.job == job.name)
        print(f"{job.name}: {job.jct_s:.0f} s; {sizes}")
    means = [mean_jct_s(outcome) for outcome in found]
    print(f"mean JCT {np.mean(means):.1f} s ({min(means):.1f} to {max(means):.1f}), Slurm alone {alone:.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
