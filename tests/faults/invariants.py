"""What must hold once all faults are over: beyond `safety.py`, which checks each change when it is made."""

from __future__ import annotations

from collections.abc import Iterator

from ones_db import Store
from slurm_ones.simulate.engines.invariants import busy_nodes, order_of_samples, record_differs
from slurm_ones.slurm.model import JobState
from tests.faults.faulty_world import FaultyWorld
from tests.faults.files import FaultyFiles


def left_behind(world: FaultyWorld, store: Store, slack_s: float) -> Iterator[str]:
    """What a companion that stopped has left of its doings. `slack_s` is how far ahead a deferral may lie whose record
    a death has lost: a lease, and what clocks were off by."""
    now = world.timeline.now
    for job_id, job in world.cluster.jobs.items():
        if job.ended:
            continue
        if job.held_by and job_id not in world.held:
            yield f"job {job_id} is left held by {job.held_by}"
        if job.pending and job.never_starts:
            yield f"job {job_id} is left at {job.nodes}x{job.gpus_per_node}, at which Slurm never starts it"
        if job.pending and job_id not in world.begin_set and job.begin > now + slack_s:
            yield f"job {job_id} is left to start in {job.begin - now:.0f} s"
    for resize in store.open_resizes():
        yield f"job {resize.job_id}: its resize is still {resize.state}"
    for job_id in store.deferrals():
        yield f"job {job_id} is still kept from starting in the database"


def disagreements(world: FaultyWorld, store: Store) -> Iterator[str]:
    """Where the database and the cluster tell different stories, after a tick in which nothing happened."""
    records = store.jobs()
    for job_id, job in world.cluster.jobs.items():
        record = records.get(job_id)
        if record is None:
            if job_id in world.observed_elastic and not job.ended:
                yield f"job {job_id} is not in the database"
            continue
        if job_id not in world.commented:
            yield f"job {job_id} never opted in and is in the database"
        unknown = record.state == JobState.UNKNOWN.value and job.ended
        if unknown or max(job.start_time, job.end_time) > world.observed_at:
            continue
        yield from record_differs(world, job_id, record, store)


def batches(world: FaultyWorld, store: Store) -> Iterator[str]:
    """Whether the batch in force of each job that reports honestly is the one on record."""
    running = [id_ for id_, job in world.cluster.jobs.items() if job.running and not job.ending]
    histories = store.histories(running)
    for job_id in running:
        training = world.trainings[job_id]
        files, history = training.files, histories.get(job_id)
        if (
            not isinstance(files, FaultyFiles)
            or not files.honest
            or history is None
            or job_id not in world.observed_elastic
        ):
            continue
        if files.reported_at > world.observed_at:
            continue
        if files.reported_batch is not None and history.batch != files.reported_batch:
            yield f"job {job_id} trains with batch {files.reported_batch}, on record is {history.batch}"


def lost(world: FaultyWorld) -> Iterator[str]:
    """Jobs that did not come to their end once they were left alone, though nobody ended them."""
    for job_id, job in world.cluster.jobs.items():
        allowed = world.allowed_ends.get(job_id)
        if not job.ended:
            held = f", held by {job.held_by}" if job.held_by else ""
            yield f"job {job_id} is {job.state.value} at the end{held}"
        elif job.state is JobState.COMPLETED:
            if not world.trainings[job_id].finished:
                yield f"job {job_id} is COMPLETED and has not trained to its end"
        elif job.state is not allowed and not (job.state is JobState.TIMEOUT and job.limit_s):
            yield f"job {job_id} ended {job.state.value}"
    yield from busy_nodes(world)


def samples(world: FaultyWorld) -> Iterator[str]:
    """Samples skipped, or repeated without need, by what the jobs truly did."""
    for job_id, training in world.trainings.items():
        files = training.files
        if isinstance(files, FaultyFiles):
            faults = order_of_samples(training.curve.dataset, [run for _, run in sorted(files.truth.items())])
            yield from (f"job {job_id}: {fault}" for fault in faults)
