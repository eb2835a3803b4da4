"""What must hold once all faults are over: beyond `safety.py`, which checks each change when it is made."""

from __future__ import annotations

from collections.abc import Iterator

from ones_db import Store
from slurm_ones.simulate.invariants import busy_nodes, misplaced, order_of_samples, record_differs
from slurm_ones.simulate.training.training import Training
from slurm_ones.slurm.model import JobState
from tests.faults.faulty_world import FaultyWorld
from tests.faults.files import FaultyFiles
from tests.faults.safety import opts_in


def left_behind(world: FaultyWorld, store: Store, slack_s: float) -> Iterator[str]:
    """What a companion that stopped has left of its doings. `slack_s` is how far ahead a deferral may lie whose record
    a death has lost: a lease, and what clocks were off by."""
    now = world.timeline.now
    for job_id, training in world.trainings.items():
        if training.hot is not None:
            yield from _blocks_left(world, job_id, training)
            continue
        job = world.cluster.jobs[job_id]
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


def outside_limits(world: FaultyWorld) -> Iterator[str]:
    """Jobs that started at a size which their strategy cannot use, and which their owner did not give them."""
    yield from misplaced(world, world.trainings.keys() - world.reshaped_by_owner)


def _blocks_left(world: FaultyWorld, job_id: int, training: Training) -> Iterator[str]:
    """Of a job of blocks: while it trains its tasks may stand in holds; it may not stand still for them, nor they
    outlive it."""
    records = [job for job in world.cluster.records.of(job_id) if not job.ended]
    if not records or training.blocks or job_id in world.held or job_id not in world.observed_elastic:
        return
    free = [job for job in records if not job.held_by]
    for job in free:
        if job.never_starts:
            yield f"task {job.to_model().key} is left at a shape at which Slurm never starts it"
    if not free:
        tasks = [task for job in records for task in job.array_tasks]
        yield f"job {job_id}: no block runs, and its tasks {tasks} are left held"


def disagreements(world: FaultyWorld, store: Store, clocks_trusted: bool) -> Iterator[str]:
    """Where the database and the cluster tell different stories, after a tick in which nothing happened. Of a job of
    blocks only its reports tell who trains, and a clock far behind takes them for ones from the future: then nobody
    could know, unless `clocks_trusted`."""
    records = store.jobs()
    for job_id, training in world.trainings.items():
        known = world.cluster.records.of(job_id)
        record = records.get(job_id)
        if record is None:
            if job_id in world.observed_elastic and not all(job.ended for job in known):
                yield f"job {job_id} is not in the database"
            continue
        if job_id not in world.commented:
            yield f"job {job_id} never opted in and is in the database"
        unknown = record.state == JobState.UNKNOWN.value and all(job.ended for job in known)
        if unknown or max(max(job.start_time, job.end_time) for job in known) > world.observed_at:
            continue
        if training.hot is not None and not (clocks_trusted and _terms_known(world, job_id)):
            continue
        yield from record_differs(world, job_id, record, store)


def _terms_known(world: FaultyWorld, job_id: int) -> bool:
    """Whether the companion knows the present term of a job of blocks, of which only the job can tell it. One whose
    comment is not understood is not known to be one of blocks."""
    files = world.trainings[job_id].files
    honest = isinstance(files, FaultyFiles) and files.honest and files.reported_at <= world.observed_at
    comment = world.cluster.jobs[job_id].request.comment
    return honest and job_id in world.observed_elastic and opts_in(comment)


def batches(world: FaultyWorld, store: Store) -> Iterator[str]:
    """Whether the batch in force of each job that reports honestly is the one on record."""
    running = [
        id_ for id_ in world.trainings if any(job.running and not job.ending for job in world.cluster.records.of(id_))
    ]
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
    for job_id, training in world.trainings.items():
        if training.hot is not None:
            yield from _blocks_lost(world, job_id, training)
            continue
        job, allowed = world.cluster.jobs[job_id], world.allowed_ends.get(job_id)
        if not job.ended:
            held = f", held by {job.held_by}" if job.held_by else ""
            yield f"job {job_id} is {job.state.value} at the end{held}"
        elif job.state is JobState.COMPLETED:
            if not training.finished:
                yield f"job {job_id} is COMPLETED and has not trained to its end"
        elif job.state is not allowed and not (job.state is JobState.TIMEOUT and job.limit_s):
            yield f"job {job_id} ended {job.state.value}"
    yield from busy_nodes(world)


def _blocks_lost(world: FaultyWorld, job_id: int, training: Training) -> Iterator[str]:
    """The same of a job of blocks: where its last block was ended by others, or by its time limit, it is over."""
    explained = training.finished or job_id in world.cancelled
    for job in world.cluster.records.of(job_id):
        ended = world.block_faults.allowed_ends.get(job.job_id, set()) | {world.allowed_ends.get(job.job_id)}
        timeout = job.state is JobState.TIMEOUT and bool(job.limit_s)
        explained = explained or (job.ended and (job.state in ended or timeout))
        if job.state in (JobState.FAILED, JobState.NODE_FAIL, JobState.TIMEOUT) and not (job.state in ended or timeout):
            yield f"task {job.to_model().key} ended {job.state.value}"
        if not job.ended and training.finished:
            yield f"task {job.to_model().key} is {job.state.value} after the end of its job"
    if not explained:
        yield f"job {job_id} has not trained to its end"


def samples(world: FaultyWorld) -> Iterator[str]:
    """Samples skipped, or repeated without need, by what the jobs truly did."""
    for job_id, training in world.trainings.items():
        files = training.files
        if isinstance(files, FaultyFiles):
            runs = [run for _, run in sorted(files.truth.items())]
            blocks = training.hot is not None
            faults = order_of_samples(training.curve.dataset, runs, blocks=blocks)
            yield from (f"job {job_id}: {fault}" for fault in faults)
