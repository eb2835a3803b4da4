"""What a bound on the price of growth costs in completion times, and what the limits' rules cost a tick.

    OMP_NUM_THREADS=1 python benchmarks/growth_cost.py --json growth_cost.json

Generated workloads run in simulations of the whole companion, by requeue and by blocks: as everybody asked, with growth
that is charged within each factor, and with free growth. Then the rules of a tick are timed at `--queue` jobs that all
run, half with growth ahead of them, next to a decision about the same jobs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decision import views
from ones_db import JobHistory, JobRecord, ThroughputPoint
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import OptIn
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, Observation, WholeJob
from slurm_ones.policies import make_policy
from slurm_ones.policy.contract import ClusterView, JobView
from slurm_ones.rules.cost import cost_caps
from slurm_ones.rules.gate import Round
from slurm_ones.rules.quotas import QuotaReading
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot, Mechanism, Requeue
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.slurm.model import JobState, Node, Partition, Quota, Quotas, Reservation, SlurmJob, Snapshot

MECHANISMS: dict[str, Mechanism] = {"requeue": Requeue(), "blocks": Hot()}
UNBOUNDED = 1e6


def simulated(workload: Workload, nodes: int, factor: float, mechanism: Mechanism) -> dict[str, float]:
    """Mean JCT and GPU-hours of one run; a factor of 0 leaves all jobs at what they asked for."""
    if not factor:
        workload = replace(workload, submissions=tuple(replace(one, elastic=False) for one in workload.submissions))
    settings = {"limits.growth_cost": max(factor, 1.0)}
    cluster = ClusterSpec(nodes, 4, charged=True)
    done = run("ones", {}, workload, cluster, mechanism=mechanism, settings=settings)
    return {
        "mean_jct_s": float(np.mean([job.jct_s for job in done.jobs])),
        "gpu_h": sum(job.gpu_s for job in done.jobs) / 3600.0,
    }


def of_views(cluster: ClusterView, jobs: Sequence[JobView]) -> tuple[Observation, dict[int, JobHistory]]:
    """The same jobs as Slurm and the database show them, in 20 accounts of 10 users each."""
    elastic, histories = {}, {}
    names = tuple(node.name for node in cluster.nodes)
    for view in jobs:
        shape = view.shape or Shape(1, 1)
        job = SlurmJob(
            job_id=view.job_id,
            name="train",
            user=f"user{view.job_id % 200}",
            uid=1000 + view.job_id % 200,
            account=f"lab{view.job_id % 20}",
            partitions=("gpu",),
            state=JobState.RUNNING if view.shape else JobState.PENDING,
            flags=frozenset(),
            reason="",
            held=False,
            admin_held=False,
            restart=0,
            requeue=True,
            nodes=shape.nodes,
            max_nodes=0,
            gpus_per_node=shape.gpus_per_node,
            gpus_total=shape.gpus if view.shape else 0,
            tasks=shape.nodes,
            task_counts=False,
            node_list=tuple(view.nodes),
            submit_time=view.submitted,
            start_time=1.0,
            end_time=0.0,
            time_limit_s=86400.0,
            work_dir="/",
            comment="ones: gpus=1-64",
            qos="normal",
            cpus=4 * shape.gpus,
        )
        elastic[view.job_id] = Elastic(WholeJob.of(job), OptIn((1, 64), None, None), 4, False)
        record = JobRecord(view.job_id, "train", job.user, view.submitted, Shape(1, max(view.requested, 1)))
        measured = (ThroughputPoint(shape, view.batch, 100.0, 1.0),)
        histories[view.job_id] = JobHistory(
            record, None, (), measured, view.samples, view.batch, 0.0, 1.0, 0, None, 0, None, ran=((shape, 600.0),)
        )
    nodes = {name: Node(name, "", True, 4, 4, ("gpu",), False) for name in names}
    tomorrow = Reservation("maint", names[:8], 2e5, 3e5)
    partitions = {"gpu": Partition("gpu", True, names, 0.0, 0, False)}
    queue = {one.job.job_id: one.job.first for one in elastic.values()}
    return Observation(Snapshot(0.0, queue, nodes, partitions, (tomorrow,)), elastic), histories


def seconds_of(call: Callable[[], Any], times: int = 5) -> float:
    """Processor time of a call, the median of some."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return statistics.median(found)


def timed(queue: int) -> dict[str, float]:
    """Seconds of a tick's rules, with and without limits, and of the decision next to them."""
    cluster, jobs = views(2 * queue // 4 * 4, queue, 0)
    seen, histories = of_views(cluster, jobs)
    users = [Quota("gres/gpu", 64, 8, qos="normal", user=f"user{number}") for number in range(200)]
    labs = [Quota("gres/gpu", 512, 80, account=f"lab{number}") for number in range(20)]
    reading = QuotaReading.of(Quotas((*users, *labs), {f"lab{number}": "root" for number in range(20)}), seen)
    settings = Settings()
    plain = Round(replace(seen, snapshot=replace(seen.snapshot, reservations=())), histories, settings, {}, 100.0)
    limited = replace(plain, seen=seen, quotas=reading.now(seen))
    rules = limited.partition("gpu")
    policy, rng = make_policy("ones"), np.random.default_rng(0)
    cold = seconds_of(lambda: policy.decide(cluster, jobs, 100.0, rng), 1)
    return {
        "decision_s": cold,
        "quiet_decision_s": seconds_of(lambda: policy.decide(cluster, jobs, 101.0, rng), 3),
        "rules_before_s": seconds_of(lambda: plain.partition("gpu")),
        "rules_s": seconds_of(lambda: limited.partition("gpu")),
        "quotas_now_s": seconds_of(lambda: reading.now(seen)),
        "cost_s": seconds_of(lambda: cost_caps(cluster, jobs, rules.jobs, settings, {})),
    }


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["philly", "helios"])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.0, 1.1, 1.5, UNBOUNDED])
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=["requeue"])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--queue", type=int, default=2500)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"simulated": [], "tick": timed(given.queue) if given.queue else {}}
    print(json.dumps(found["tick"], indent=1))
    for name in given.workloads:
        workload = generate(name, jobs=given.jobs, seed=0, gpus=4 * given.nodes, gpus_per_node=4)
        for mechanism in given.mechanisms:
            for factor in given.factors:
                row = {"workload": name, "mechanism": mechanism, "factor": factor}
                row |= simulated(workload, given.nodes, factor, MECHANISMS[mechanism])
                found["simulated"].append(row)
                print(json.dumps(row), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
