"""A site with two users, of whose jobs every table has rows."""

from __future__ import annotations

from dataclasses import replace

from ones_db import ActionRecord, AlternativeRecord, BlockRecord, NodeRecord, PromiseRecord, Store
from ones_db.leader import LeaderLock
from ones_db.reasons import Reason
from ones_db.shape import PARKED, Shape
from ones_db.tables import METADATA
from ones_wrapper.protocol import Batch, Checkpoint, Membership
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from tests.db.make import SPEC, change, decision, end_run, job, line, report, resized_job, throughput

JOBS = {"alice": 7, "bob": 8}
"""The Slurm job id of each user's job."""
OPEN = ("clusters", "decisions", "leaders", "nodes", "node_changes", "other_gpus")
"""Tables that are about no single job."""
OWNED = sorted(set(METADATA.tables) - {*OPEN, "actions", "health"})
"""Tables that belong to jobs."""


def fill(url: str) -> None:
    """Both users' jobs, with all that hangs on them; nodes, what an operator did, and a companion that led."""
    with Store.open(url, "gres") as store:
        for user, number in JOBS.items():
            resized_job(store, number, user)
            report(
                store,
                number,
                1,
                spec=replace(SPEC, limits=StrategyLimits("ring", (SizeLimits(4, 1),))),
                throughput=[throughput(8, time=3020.0, samples=256, batch=256, gpu_use=0.5)],
                checkpoints=[line(5, Checkpoint("step-22", 2, 0, 22, 1000, 1.25), 3011.5)],
                batches=[line(6, Batch(23, 128, 2.0), 3012.0)],
                members=[line(7, Membership(1, (0,), (0,), 1, 4, 4, 23, 128, 0.25), 3013.0)],
                offset=90,
                number=8,
            )
            store.record_blocks([BlockRecord(number, 0, 0, number, Shape(1, 4), ("n1",), "COMPLETED", 3000.0, 3600.0)])
            store.record_promises([PromiseRecord(number, 4000.0, 2400.0, True, Reason("why"))])
            end_run(store, number, 1, 3600.0, "COMPLETED")
            ended = job(number, user=user, restart=1, submit_time=2901.0, state="COMPLETED", end_time=3600.0)
            store.record_jobs([replace(ended, requested_shape=Shape(1, 1))])
        made = decision(2400.0, *JOBS.values())
        weighed = (AlternativeRecord(Shape(1, 4), 256, 3.5), AlternativeRecord(PARKED, 0, 0.0))
        store.add_decision(replace(made, jobs=tuple(replace(given, alternatives=weighed) for given in made.jobs)))
        store.record_nodes(1.0, [NodeRecord("n1", "UP", True, 4, "gpu")])
        store.record_other_gpus(1.0, 2)
        store.add_action(ActionRecord(1.0, "ops", "run --act", "policy ones"))
    with LeaderLock(url, "gres") as lock:
        lock.take(1.0)
    change(url, "INSERT INTO accounting (job_id, time_limit_s, import_time) SELECT id, 60.0, 1.0 FROM jobs")
    change(url, "INSERT INTO rollups (run_id, stretch_s, number) SELECT id, 60.0, 6 FROM runs")
