"""Terms and blocks of jobs of blocks, followed from tick to tick.

A term is the time for which one block leads the training; it counts as a run. The job reports its term in its spec. The
term is believed unless it rises faster than a job can change its leader, so a job cannot fill the database with terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ones_db import BlockRecord, JobRecord, Store
from ones_wrapper.protocol import Membership
from slurm_ones.jobs.elastic import NO_GUESTS, Elastic, Guests, WholeJob, arrays, says_blocks, whole_job
from slurm_ones.jobs.reports import read_spec
from slurm_ones.slurm.model import JobState, SlurmJob, Snapshot
from slurm_ones.untrusted_files import NoAnswer

LAST_TERMS = 3
"""Number of recent terms whose reports are read in each tick."""
AT_ONCE = 16
"""Largest number of terms by which a job may advance in one tick."""
BURST = 64
PER_S = 0.1
"""Terms per second since its submission that a job may have, beyond `BURST`."""


def next_term(before: int, said: int, submit_time: float, now: float) -> tuple[int, str]:
    """Return the term to store for a job, and what is wrong with the reported term `said` ("" for nothing). `before` is
    the stored term."""
    if said < before:
        return before, f"spec.json: term {said} is below {before}, the last one"
    highest = BURST + int(PER_S * max(now - submit_time, 0.0))
    if said > highest:
        return before, f"spec.json: term {said} is above what a job of this age can reach ({highest})"
    return min(said, before + AT_ONCE), ""


class Terms:
    """Terms and blocks of all jobs of blocks, in memory; restored from the database after a restart."""

    def __init__(self, store: Store, own_uid: int | None, guests: Guests = NO_GUESTS) -> None:
        self._store = store
        self._guests = guests
        self._own_uid = own_uid
        self._known: dict[int, JobRecord | None] = {}
        """Record of each job of blocks as last stored; None for a new job."""
        self._spans: dict[int, range] = {}
        """Terms of each job of blocks whose reports were last read, by array id."""
        self._ahead: set[int] = set()
        """Jobs whose terms are known in this tick, but whose reports are not read yet."""
        self._blocks: dict[tuple[int, int, int], BlockRecord] | None = None
        """Block records of the last tick, by job, task and restart."""
        self._no_more: dict[int, bool] = {}
        """True for each array that was one job of blocks, although its tasks now opt in separately, by array id."""
        self.problems: dict[int, str] = {}
        """Problem with each job's reported term ("" for none), by job id."""

    def jobs(self, snapshot: Snapshot) -> dict[int, WholeJob]:
        """Return all jobs of a snapshot by id, jobs of blocks in their present term."""
        found = arrays(snapshot.jobs.values())
        self._remember(found)
        self._spans = {array: span for array, span in self._spans.items() if array in found}
        self.problems = {array: problem for array, problem in self.problems.items() if array in found}
        jobs = {id_: WholeJob.of(job) for id_, job in snapshot.jobs.items() if job.array_id not in found}
        for array, records in found.items():
            one = whole_job(array, records, self._known[array], self._term(array), self._guests)
            jobs[array] = replace(one, restart=self._follow(one, snapshot.time)[-1])
        self._ahead = {*found}
        return jobs

    def _remember(self, found: Mapping[int, Sequence[SlurmJob]]) -> None:
        new = [array for array in found if array not in self._known]
        stored = self._store.jobs(new) if new else {}
        self._known = {array: known for array, known in self._known.items() if array in found}
        for array in new:
            record = stored.get(array)
            self._known[array] = record if record is not None and _same(record, found[array]) else None
            if self._known[array] is None:
                self._spans.pop(array, None)

    def no_more(self, tasks: Mapping[int, Sequence[SlurmJob]]) -> set[int]:
        """Return the arrays that were a job of blocks, but whose comments no longer say so."""
        new = [array for array in tasks if array not in self._no_more]
        stored = self._store.jobs(new) if new else {}
        self._no_more = {array: was for array, was in self._no_more.items() if array in tasks}
        for array in new:
            record = stored.get(array)
            self._no_more[array] = record is not None and says_blocks(record.comment) and _same(record, tasks[array])
        return {array for array, was in self._no_more.items() if was}

    def stored(self, records: Mapping[int, JobRecord]) -> None:
        for array, record in records.items():
            if array in self._known:
                self._known[array] = record

    def _term(self, array: int) -> int:
        if array in self._spans:
            return self._spans[array][-1]
        known = self._known.get(array)
        return known.restart if known is not None else 0

    def follow(self, job: WholeJob, now: float) -> tuple[WholeJob, range]:
        """Return the job in its present run, and the runs whose reports to read now, the present run last. The job gets
        its first submission time, since a requeue changes it in Slurm."""
        if not job.by_blocks:
            # The last run may have written reports after its requeue was observed.
            return job, range(max(0, job.restart - 1), job.restart + 1)
        known = self._known.get(job.job_id)
        if job.job_id not in self._known:
            known = self._store.jobs([job.job_id]).get(job.job_id)
            if known is not None and job.job_id not in self._spans:
                self._spans[job.job_id] = range(known.restart, known.restart + 1)
        if known is not None:
            # A task that was requeued has a later submission time.
            job = replace(job, submit_time=min(job.submit_time, known.submit_time))
        span = self._spans[job.job_id] if job.job_id in self._ahead else self._follow(job, now)
        self._ahead.discard(job.job_id)
        return replace(job, restart=span[-1]), span

    def _follow(self, job: WholeJob, now: float) -> range:
        before = term = max(self._term(job.job_id), 0)
        if self._own_uid in (None, job.uid):
            try:
                spec, _ = read_spec(job)
            except NoAnswer:
                spec = None
            if spec is not None:
                term, problem = next_term(before, spec.term, job.submit_time, now)
                self.problems[job.job_id] = problem
        span = range(max(0, before - LAST_TERMS + 1), term + 1)
        self._spans[job.job_id] = span
        return span

    def store_blocks(self, seen: Mapping[int, Elastic], snapshot: Snapshot) -> None:
        """Store the blocks that have started or ended since the last tick."""
        if self._blocks is None:
            self._blocks = {_key(record): record for record in self._store.open_blocks()}
        before = self._blocks
        now = {
            _key(record): record
            for array, elastic in seen.items()
            if elastic.job.by_blocks
            for job in elastic.job.blocks
            if job.start_time and not job.pending
            for record in (_block_record(array, elastic, job),)
        }
        for key, record in before.items():
            if key not in now and record.end_time is None:
                now[key] = _gone(record, snapshot)
        if changed := [record for key, record in now.items() if before.get(key) != record]:
            self._store.record_blocks(changed)
        self._blocks = now

    def as_slurm_has_it(self, job_id: int, report: Membership, ask: Callable[[int], Iterable[SlurmJob]]) -> Membership:
        """Return the membership with the number of nodes from Slurm, unless Slurm shows another number of GPUs. `ask`
        reads an array's tasks."""
        keys = list(zip(report.blocks, report.restarts, strict=False))
        blocks = self._blocks or {}
        held = {key: blocks.get((job_id, *key)) for key in keys}
        places = {key: (one.node_list, one.shape.gpus_per_node) for key, one in held.items() if one is not None}
        if len(places) < len(keys):
            asked = (job for job in ask(job_id) if len(job.array_tasks) == 1)
            places |= {(job.array_tasks[0], job.restart): (job.node_list, job.gpus_per_node) for job in asked}
        gpus: dict[str, int] = defaultdict(int)
        for key in keys:
            nodes, each = places.get(key, ((), 0))
            for node in nodes:
                gpus[node] += each
        if sum(gpus.values()) != report.world:
            return report
        unequal = len(set(gpus.values())) > 1
        return replace(report, nodes=len(gpus), gpus_per_node=0 if unequal else report.world // len(gpus))


def _same(record: JobRecord, records: Sequence[SlurmJob]) -> bool:
    """Tell by submission times whether the record is of this array, not of an earlier one with the same id."""
    submitted = min(job.submit_time for job in records)
    return submitted <= record.submit_time or any(job.restart for job in records)


def _key(record: BlockRecord) -> tuple[int, int, int]:
    return record.job_id, record.task, record.restart


def _block_record(array: int, elastic: Elastic, job: SlurmJob) -> BlockRecord:
    return BlockRecord(
        job_id=array,
        task=job.array_tasks[0],
        restart=job.restart,
        slurm_id=job.job_id,
        shape=elastic.shape_of(job),
        node_list=job.node_list,
        state=job.state.value,
        start_time=job.start_time,
        end_time=job.end_time if job.ended else None,
        guest=elastic.job.is_guest(job),
    )


def _gone(record: BlockRecord, snapshot: Snapshot) -> BlockRecord:
    """Return the record with its end, for a block that Slurm requeued or forgot, or whose job is no longer observed."""
    job = snapshot.jobs.get(record.slurm_id)
    if job is not None and job.restart == record.restart and not job.pending:
        return replace(record, state=job.state.value, end_time=job.end_time if job.ended else None)
    # A guest that waits without a hold was requeued by Slurm, since the companion holds the tasks that it requeues.
    taken = record.guest and job is not None and job.pending and not job.held
    state = JobState.PREEMPTED if taken else JobState.UNKNOWN
    return replace(record, state=state.value, end_time=snapshot.time)
