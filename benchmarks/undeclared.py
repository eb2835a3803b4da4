"""Policies on jobs that do not say how long they train, stop before what they say, or lie about it.

    OMP_NUM_THREADS=1 python benchmarks/undeclared.py --seeds 2 --jobs 40 --json undeclared.json

The companion drives generated jobs on a simulated cluster. Every case is the same work but for what jobs say and when
they stop; half of the users, chosen by chance, are of the case's kind. Pollux weighs no remaining work.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.generated import parser_of
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload

PER_NODE, TICK_S = 4, 60.0
Change = Callable[[Submission, np.random.Generator], Submission]


def _early(job: Submission, rng: np.random.Generator) -> Submission:
    """Stops after a tenth to nine tenths of what it declares."""
    share = float(rng.uniform(0.1, 0.9))
    return replace(job, epochs=share, declares=1.0 / share)


CASES: dict[str, Change] = {
    "declared": lambda job, rng: job,
    "undeclared": lambda job, rng: replace(job, declares=0.0),
    "half undeclared": lambda job, rng: replace(job, declares=0.0) if rng.random() < 0.5 else job,
    "early stop": lambda job, rng: _early(job, rng) if rng.random() < 0.5 else job,
    "undeclared, early stop": lambda job, rng: replace(_early(job, rng), declares=0.0),
    "half lying x 0.25": lambda job, rng: replace(job, declares=0.25) if rng.random() < 0.5 else job,
    "half lying x 4": lambda job, rng: replace(job, declares=4.0) if rng.random() < 0.5 else job,
}


def changed(work: Workload, case: str, seed: int) -> Workload:
    """The same work with what the case makes of each job."""
    jobs = tuple(CASES[case](job, np.random.default_rng([seed, 23, i])) for i, job in enumerate(work.submissions))
    return replace(work, submissions=jobs)


def mean_jct(jobs: int, gpus: int, mix: str, load: float, task: tuple[int, str, str]) -> float:
    """Of one seed, case and policy, in seconds."""
    seed, case, policy = task
    work = changed(generate(mix, jobs=jobs, seed=seed, load=load, gpus=gpus, gpus_per_node=PER_NODE), case, seed)
    cluster = ClusterSpec(gpus // PER_NODE, PER_NODE)
    name, _, option = policy.partition(":")
    options = dict(pair.split("=") for pair in option.split(",")) if option else {}
    done = run(name, {k: json.loads(v) for k, v in options.items()}, work, cluster, interval_s=TICK_S, seed=seed)
    return float(np.mean([job.jct_s for job in done.jobs]))


def table(found: dict[tuple[str, str], list[float]], cases: Sequence[str], policies: Sequence[str]) -> str:
    """Geometric means over seeds; the last column the first policy over the last."""
    lines = [
        f"| case | {' | '.join(f'{policy}: mean JCT, s' for policy in policies)} | {policies[0]} over {policies[-1]} |",
        "| --- |" + " ---: |" * (len(policies) + 1),
    ]
    for case in cases:
        means = [math.exp(float(np.mean(np.log(found[case, policy])))) for policy in policies]
        lines.append(f"| {case} | " + " | ".join(f"{mean:,.0f}" for mean in means) + f" | {means[0] / means[-1]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate and print."""
    parser = parser_of(__doc__, seeds=2, jobs=40, gpus=32)
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="first seed")
    parser.add_argument("--load", type=float, default=1.0, metavar="X", help="rate of arrival")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="simulations side by side")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="these cases alone; all by default")
    parser.add_argument("--policy", action="append", help="ones and pollux by default")
    options = parser.parse_args()
    cases, policies = options.case or list(CASES), options.policy or ["ones", "pollux"]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    tasks = [(seed, case, policy) for seed in seeds for case in cases for policy in policies]
    found: dict[tuple[str, str], list[float]] = {}
    one = partial(mean_jct, options.jobs, options.gpus, options.mix, options.load)
    with ProcessPoolExecutor(options.processes) as pool:
        for (seed, case, policy), mean in zip(tasks, pool.map(one, tasks), strict=True):
            found.setdefault((case, policy), []).append(mean)
            print(f"seed {seed}, {case}, {policy}: {mean:.0f} s", file=sys.stderr, flush=True)
    print(table(found, cases, policies))
    if options.json:
        rows = [{"case": case, "policy": policy, "mean_jct_s": means} for (case, policy), means in found.items()]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
