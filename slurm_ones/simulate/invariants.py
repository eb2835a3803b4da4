"""Checks at the end of a simulation: no job was lost, no sample skipped, and the database agrees with the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ones_db import JobRecord, Store
from ones_wrapper.protocol import Bye, Checkpoint, Epoch, Hello, Report, Throughput, decode_report, reports_name
from slurm_ones.simulate.training.training import Training
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import JobState


class InvariantViolated(Exception):
    """Error: a check at the end of a simulation failed. For example a job was lost, or its record in the database is
    wrong."""


EXPECTED_ENDS = frozenset({JobState.COMPLETED, JobState.TIMEOUT, JobState.NODE_FAIL})
"""End states that are no violation. A time limit or a failed node is not the companion's fault."""
EXPECTED_ENDS_OF_BLOCKS = EXPECTED_ENDS | {JobState.CANCELLED, JobState.PREEMPTED}
"""End states of a block (a task of a job array) that are no violation. A block may also be cancelled while it waits, or
preempted."""


def violations(world: World, store: Store) -> list[str]:
    """Return a description of each failed check.

    A job that ends by its time limit or by a node's failure is no violation.
    """
    return [*_lost(world), *misplaced(world, world.trainings), *_disagreements(world, store), *_skipped(world)]


def _lost(world: World) -> Iterator[str]:
    for job_id, training in world.trainings.items():
        records = world.cluster.records.of(job_id)
        for job in records:
            name = job.to_model().key
            if not job.ended:
                held = f", held by {job.held_by}" if job.held_by else ""
                yield f"job {name} is {job.state.value} at the end{held}"
            elif job.state not in (EXPECTED_ENDS if job.array is None else EXPECTED_ENDS_OF_BLOCKS):
                yield f"job {name} ended {job.state.value}"
        if any(job.state is JobState.COMPLETED for job in records) and not training.finished:
            yield f"job {job_id} is COMPLETED and has not trained to its end"
    yield from busy_nodes(world)


def misplaced(world: World, job_ids: Iterable[int]) -> Iterator[str]:
    """Describe each run of these jobs on a number of GPUs that the job's strategy cannot use."""
    for job_id in job_ids:
        for where in world.trainings[job_id].misplaced:
            yield f"job {job_id} ran at a size that its strategy cannot use: {where}"


def busy_nodes(world: World) -> Iterator[str]:
    """Describe each node that still has jobs at the end of the simulation."""
    for node in world.cluster.nodes.to_model().values():
        if not node.idle:
            yield f"node {node.name} is {node.state} at the end"


def _disagreements(world: World, store: Store) -> Iterator[str]:
    records = store.jobs()
    for job_id, training in world.trainings.items():
        if not training.submission.elastic:
            if job_id in records:
                yield f"job {job_id} never opted in and is in the database"
            continue
        record = records.get(job_id)
        if record is None:
            yield f"job {job_id} is not in the database"
        else:
            yield from record_differs(world, job_id, record, store)
    for resize in store.open_resizes():
        yield f"job {resize.job_id}: its resize is still {resize.stage}"
    for job_id in store.deferrals():
        yield f"job {job_id} is still kept from starting"


def record_differs(world: World, job_id: int, record: JobRecord, store: Store) -> Iterator[str]:
    """Describe each difference between a job's record in the database and the job in the simulated cluster."""
    training, records = world.trainings[job_id], world.cluster.records.of(job_id)
    if training.hot is not None:
        yield from blocks_differ(training, record, store)
        return
    (job,) = records
    if (record.state, record.restart) != (job.state.value, job.restart):
        yield f"job {job_id} is {record.state} after {record.restart} restarts in the database, not " + (
            f"{job.state.value} after {job.restart}"
        )
    known = {run.start_time: (run.shape.nodes, run.shape.gpus) for run in store.runs(job_id)}
    for held in job.allocations:
        shape = (len(held.gpus), sum(held.gpus.values()))
        if held.start in known and known[held.start] != shape:
            yield f"job {job_id}: a run on {known[held.start]} nodes and GPUs in the database, {shape} in Slurm"


def blocks_differ(training: Training, record: JobRecord, store: Store) -> Iterator[str]:
    """Describe each difference between a job of blocks and its record in the database. The record has a run for each
    term."""
    job_id = record.job_id
    if training.finished and record.state != JobState.COMPLETED.value:
        yield f"job {job_id} is {record.state} in the database, and has trained to its end"
    if training.term >= 0 and record.restart != training.term:
        yield f"job {job_id} is in term {record.restart} in the database, not {training.term}"
    known = store.membership(job_id)
    if training.generation and (known is None or known.report.generation != training.generation):
        generation = known.report.generation if known is not None else "none"
        yield f"job {job_id}: the newest membership in the database is {generation}, not {training.generation}"


def _skipped(world: World) -> Iterator[str]:
    for job_id, training in world.trainings.items():
        if training.files is not None:
            blocks = training.hot is not None
            last = training.term if blocks else world.cluster.jobs[job_id].restart
            runs = [tuple(_reports(training, restart)) for restart in range(last + 1)]
            faults = order_of_samples(training.curve.dataset, runs, blocks=blocks)
            yield from (f"job {job_id}: {fault}" for fault in faults)


def order_of_samples(dataset: int, runs: Iterable[Iterable[Report]], *, blocks: bool = False) -> Iterator[str]:
    """Check that the reports of a job's runs use every sample of an epoch once and in order, and describe each
    violation.

    A run must start where the newest checkpoint ends. If a run ended without a checkpoint, the next run repeats its
    samples. A drained run must end with a checkpoint. In a job of `blocks`, a new term starts at the old leader's
    position. If that leader was lost, the samples that it had not reported may be missing.
    """
    newest, durable, left = (0, 0), (0, 0), False
    for restart, reports in enumerate(runs):
        at, measured, moves = newest, newest, False
        for report in reports:
            if isinstance(report, Hello):
                here = (report.epoch, report.cursor)
                if here < durable if blocks and not left else here != newest:
                    yield f"run {restart} goes on at {here}, the newest checkpoint has {newest}"
                at = measured = newest = here
                durable = here if report.checkpoint else durable
            elif isinstance(report, Epoch):
                if (report.epoch, report.samples) != (at[0], dataset):
                    yield f"run {restart} ends pass {report.epoch} after {report.samples} samples, being at {at}"
                at = (report.epoch + 1, 0)
            elif isinstance(report, Throughput):
                before, at = at, (report.epoch, report.cursor)
                used = (at[0] - measured[0]) * dataset + at[1] - measured[1]
                if at[0] != before[0] or at < before or report.samples != used:
                    yield f"run {restart} reports {report.samples} samples from {measured} to {at}"
                measured = at
            elif isinstance(report, Checkpoint):
                durable = newest = at = (report.epoch, report.cursor)
            elif isinstance(report, Bye) and report.reason == "drained" and at != newest:
                yield f"run {restart} was drained at {at}, its checkpoint has {newest}"
            elif isinstance(report, Bye) and report.reason == "moved":
                newest, moves = at, True
        left = moves


def _reports(training: Training, restart: int) -> Iterator[Report]:
    assert training.files is not None
    path = training.files.directory / reports_name(restart)
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield decode_report(line)[2]
