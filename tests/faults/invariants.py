"""What must hold once all faults are over: beyond `watch.py`, which sees at once what it can."""

from __future__ import annotations

from collections.abc import Iterator

from ones_db import Store
from slurm_ones.simulate.engines.invariants import order_of_samples
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.slurm.model import JobState
from tests.faults.files import FaultyFiles
from tests.faults.stage import Stage


def left_behind(stage: Stage, store: Store, slack_s: float) -> Iterator[str]:
    """What a companion that stopped has left of its doings. `slack_s` is how far ahead a deferral may lie whose record
    a death has lost: a lease, and what clocks were off by."""
    now = stage.timeline.now
    for job_id, job in stage.cluster.jobs.items():
        if job.ended:
            continue
        if job.held_by and job_id not in stage.held:
            yield f"job {job_id} is left held by {job.held_by}"
        if job.pending and job.never_starts:
            yield f"job {job_id} is left at {job.nodes}x{job.gpus_per_node}, at which Slurm never starts it"
        if job.pending and job_id not in stage.asked and job.begin > now + slack_s:
            yield f"job {job_id} is left to start in {job.begin - now:.0f} s"
    for resize in store.open_resizes():
        yield f"job {resize.job_id}: its resize is still {resize.state}"
    for job_id in store.deferrals():
        yield f"job {job_id} is still kept from starting in the database"


def disagreements(stage: Stage, store: Store) -> Iterator[str]:
    """Where the database and the cluster tell different stories, after a tick in which nothing happened."""
    records = store.jobs()
    for job_id, job in stage.cluster.jobs.items():
        record = records.get(job_id)
        if record is None:
            if job_id in stage.seen_elastic and not job.ended:
                yield f"job {job_id} is not in the database"
            continue
        if job_id not in stage.named:
            yield f"job {job_id} never opted in and is in the database"
        known = (record.state, record.restart)
        forgotten = known[0] == JobState.UNKNOWN.value and job.ended
        if forgotten or max(job.start_time, job.end_time) > stage.seen_at:
            continue
        if known != (job.state.value, job.restart):
            yield f"job {job_id} is {known[0]} after {known[1]} restarts in the database, not " + (
                f"{job.state.value} after {job.restart}"
            )
        yield from _runs(job, store)


def _runs(job: SimulatedJob, store: Store) -> Iterator[str]:
    known = {run.start_time: (run.nodes, run.nodes * run.gpus_per_node) for run in store.runs(job.job_id)}
    for held in job.allocations:
        shape = (len(held.gpus), sum(held.gpus.values()))
        if held.start in known and known[held.start] != shape:
            yield f"job {job.job_id}: a run on {known[held.start]} nodes and GPUs in the database, {shape} in Slurm"


def batches(stage: Stage, store: Store) -> Iterator[str]:
    """Whether the batch in force of each job that reports honestly is the one on record."""
    running = [id_ for id_, job in stage.cluster.jobs.items() if job.running and not job.ending]
    histories = store.histories(running)
    for job_id in running:
        training = stage.trainings[job_id]
        files, history = training.files, histories.get(job_id)
        if (
            not isinstance(files, FaultyFiles)
            or not files.honest
            or history is None
            or job_id not in stage.seen_elastic
        ):
            continue
        if files.told_at > stage.seen_at:
            continue
        if files.told_batch is not None and history.batch != files.told_batch:
            yield f"job {job_id} trains with batch {files.told_batch}, on record is {history.batch}"


def lost(stage: Stage) -> Iterator[str]:
    """Jobs that did not come to their end once they were left alone, though nobody ended them."""
    for job_id, job in stage.cluster.jobs.items():
        excuse = stage.excused.get(job_id)
        if not job.ended:
            held = f", held by {job.held_by}" if job.held_by else ""
            yield f"job {job_id} is {job.state.value} at the end{held}"
        elif job.state is JobState.COMPLETED:
            if not stage.trainings[job_id].finished:
                yield f"job {job_id} is COMPLETED and has not trained to its end"
        elif job.state is not excuse and not (job.state is JobState.TIMEOUT and job.limit_s):
            yield f"job {job_id} ended {job.state.value}"
    for node in stage.cluster.nodes.to_model().values():
        if not node.idle:
            yield f"node {node.name} is {node.state} at the end"


def samples(stage: Stage) -> Iterator[str]:
    """Samples skipped, or repeated without need, by what the jobs truly did."""
    for job_id, training in stage.trainings.items():
        files = training.files
        if isinstance(files, FaultyFiles):
            faults = order_of_samples(training.curve.dataset, [run for _, run in sorted(files.truth.items())])
            yield from (f"job {job_id}: {fault}" for fault in faults)
