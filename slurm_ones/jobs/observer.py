"""One observation a tick: Slurm's snapshot and what the elastic jobs reported, both stored."""

from __future__ import annotations

import logging
import os
import pwd
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from ones_db import ActionRecord, JobRecord, MembershipRecord, NodeRecord, ReportLine, RunRecord, RunReports, Store
from ones_db.reasons import reason
from ones_wrapper import protocol
from ones_wrapper.protocol import Membership, Spec
from slurm_ones.config import Settings
from slurm_ones.jobs.blocks import BlockJob, block_job, fold, is_whole, says_blocks, with_throttles
from slurm_ones.jobs.eligibility import Elastic, Observation, elastic_job
from slurm_ones.jobs.notes import Notes
from slurm_ones.jobs.optin import BadComment, parse_comment
from slurm_ones.jobs.places import JobDirectories
from slurm_ones.jobs.records import job_record, node_record, run_record
from slurm_ones.jobs.report_reader import lines_per_job, read_reports
from slurm_ones.jobs.rivals import Rivals
from slurm_ones.jobs.terms import POSITIONS, Terms
from slurm_ones.slurm.client import SlurmClient, SlurmError
from slurm_ones.slurm.model import Job, JobState, Snapshot
from slurm_ones.untrusted_files import NotBelieved, directory_of, job_directory, read_from

log = logging.getLogger(__name__)


class Observer:
    """Reads Slurm and the jobs' reports, and stores what it found.

    It changes nothing outside the database. Positions in report files come from the database, so a new companion
    reads on where the last one stopped.
    """

    def __init__(
        self, client: SlurmClient, store: Store, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._store = store
        self._settings = settings
        self._own_uid = os.geteuid() if settings.scope == "own" else None
        self._finished: set[tuple[int, int]] = set()
        self._notes = Notes()
        self._jobs: dict[int, JobRecord] = {}
        self._runs: dict[int, RunRecord] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._counted: dict[int, bool] = {}
        """Whether jobs of the queue were submitted with task counts, of those whose details were read."""
        self._specs: dict[tuple[int, int], Spec] = {}
        """The spec of each run as it was stored last."""
        self._terms = Terms(store, self._own_uid)
        self._places = JobDirectories(settings.spool)
        self.rivals = Rivals(self._own_uid, self._places.hello, clock)
        self._asked: dict[int, Sequence[Job]] | None = None
        """Tasks of arrays that Slurm was asked for in this look; None where it is not asked."""
        self._block_jobs: Mapping[int, BlockJob] = {}
        """The jobs of blocks of this tick."""

    def observe(self) -> Observation:
        """One tick's observation. Raises `Unreachable`."""
        tasks = self._client.snapshot()
        self._block_jobs = self._terms.jobs(tasks)
        if throttles := self._throttles():
            tasks = with_throttles(tasks, throttles)
            self._block_jobs = self._terms.jobs(tasks)
        snapshot = fold(tasks, self._block_jobs)
        elastic_jobs: dict[int, Elastic] = {}
        left: dict[int, Elastic] = {}
        for job in snapshot.jobs.values():
            elastic = self._elastic(job, snapshot)
            if elastic is not None and (job.job_id, job.restart) not in self._finished:
                elastic_jobs[job.job_id] = elastic
            if elastic is not None and job.ended and any(b.pending for b in elastic.blocks):
                left[job.job_id] = elastic
        apart: dict[int, list[Job]] = defaultdict(list)
        for elastic in elastic_jobs.values():
            if elastic.job.array_id and not elastic.blocks:
                apart[elastic.job.array_id].append(elastic.job)
        no_more = self._terms.no_more(apart)
        elastic_jobs = {id_: e for id_, e in elastic_jobs.items() if e.blocks or e.job.array_id not in no_more}
        read = {job_id for job_id, _ in self._specs}
        seen = self._places.judged(self._with_details(elastic_jobs, snapshot), read, self._own_uid)
        seen = self.rivals.judged(seen)
        kinds = {name: node.kind for name, node in snapshot.nodes.items()}
        self._store_jobs(seen, kinds, snapshot.time)
        self._terms.store_blocks(seen, tasks)
        self._store_nodes(snapshot)
        self._close_lost(snapshot, seen.keys(), no_more)
        mine = [elastic.job for elastic in seen.values() if self._own_uid in (None, elastic.job.uid)]
        self.collect(mine, now=snapshot.time)
        self._specs = {key: spec for key, spec in self._specs.items() if key[0] in seen}
        self._notes.forget(snapshot.jobs)
        ended = {(id_, e.job.restart) for id_, e in seen.items() if e.job.ended}
        self._finished = {key for key in self._finished if key[0] in snapshot.jobs} | ended
        return Observation(snapshot, {id_: e for id_, e in seen.items() if not e.job.ended}, left)

    def _throttles(self) -> dict[int, int]:
        """Most tasks at once of the arrays of which the snapshot shows no limit, though they have one: not all clients
        show it. One call, and none for those that were looked at before and found good."""
        asked = {
            next(block.job_id for block in one.blocks if not block.ended): array
            for array, one in self._block_jobs.items()
            if one.refusal is not None and one.refusal.code == "blocks_unthrottled"
        }
        details = self._client.details(list(asked)) if asked else {}
        return {asked[id_]: job.throttle for id_, job in details.items() if id_ in asked and job.throttle}

    def _elastic(self, job: Job, snapshot: Snapshot) -> Elastic | None:
        blocks = self._block_jobs.get(job.job_id)
        return elastic_job(job, snapshot, self._settings.whole_node_gpus, self._own_uid, blocks)

    def _with_details(self, seen: dict[int, Elastic], snapshot: Snapshot) -> dict[int, Elastic]:
        """The same with what a snapshot does not show: the details of each job that would be resized are read once,
        those of all new ones in one call. How a job was submitted does not change."""
        new = [id_ for id_, e in seen.items() if not e.refusal and not e.job.ended and id_ not in self._counted]
        # One task stands for all of its array: they were submitted together.
        asked = {next((b.job_id for b in seen[id_].blocks if not b.ended), id_): id_ for id_ in new}
        details = self._client.details(list(asked)) if asked else {}
        self._counted = {id_: counted for id_, counted in self._counted.items() if id_ in snapshot.jobs}
        self._counted.update({asked[id_]: job.task_counts for id_, job in details.items() if id_ in asked})

        def with_task_counts(elastic: Elastic) -> Elastic | None:
            if elastic.refusal or not self._counted.get(elastic.job.job_id):
                return elastic
            return self._elastic(replace(elastic.job, task_counts=True), snapshot)

        return {id_: found for id_, elastic in seen.items() if (found := with_task_counts(elastic)) is not None}

    def _store_jobs(self, seen: Mapping[int, Elastic], kinds: Mapping[str, str], now: float) -> None:
        """Store the jobs and runs that have changed since the last tick; `kinds` are those of the nodes' GPUs."""
        jobs = {id_: job_record(elastic, self._notes.text(id_, now)) for id_, elastic in seen.items()}
        runs = {
            id_: run_record(e, self._runs.get(id_), kinds)
            for id_, e in seen.items()
            if e.job.start_time and not e.job.pending
        }
        if changed := [job for id_, job in jobs.items() if self._jobs.get(id_) != job]:
            self._store.record_jobs(changed)
        if begun := [run for id_, run in runs.items() if self._runs.get(id_) != run]:
            self._store.record_runs(begun)
        self._jobs, self._runs = jobs, runs
        self._terms.stored(jobs)

    def _store_nodes(self, snapshot: Snapshot) -> None:
        """Store the nodes where one has changed since the last tick."""
        nodes = {name: node_record(node) for name, node in snapshot.nodes.items()}
        if nodes != self._nodes:
            self._store.record_nodes(snapshot.time, nodes.values())
            self._nodes = nodes

    def _close_lost(self, snapshot: Snapshot, seen: Set[int], no_more: Set[int]) -> None:
        """Bring up to date the jobs that are open in the database and were not found in the queue.

        Slurm forgets a job MinJobAge after its end; and an owner may have taken the opt-in out of the comment, or the
        word for blocks alone: of `no_more`.
        """
        lost = self._store.live_jobs() - seen
        if not lost:
            return
        records = []
        for job_id, record in self._store.jobs(list(lost)).items():
            # A task has the array's own id: it is not the job, whose other tasks may train on.
            whole = self._array(job_id, record, snapshot) if says_blocks(record.comment) else None
            job = whole or snapshot.jobs.get(job_id)
            if job is None:
                note = "it ended while no companion ran, and Slurm no longer knows how"
                unknown = JobState.UNKNOWN.value
                records.append(replace(record, state=unknown, end_time=snapshot.time, report_note=note))
            else:
                why = reason("blocks_no_more" if job_id in no_more else "opted_out")
                end = job.end_time if job.ended else None
                now = replace(record, state=job.state.value, restart=job.restart, end_time=end)
                records.append(replace(now, elastic=False, refusal=why))
        self._store.record_jobs(records)

    @staticmethod
    def _array(job_id: int, record: JobRecord, snapshot: Snapshot) -> Job | None:
        """The job array of that id, whose comment no longer says that it is one of blocks."""
        tasks = [job for job in snapshot.jobs.values() if job.array_id == job_id and job.array_tasks]
        return block_job(job_id, tasks, record, record.restart).job if tasks else None

    def collect(self, jobs: Sequence[Job], *, now: float, ask: bool = False) -> None:
        """Store what the jobs' newest runs have reported since the last time, in one transaction. With `ask`, Slurm may
        be asked for blocks that have started since the last tick."""
        self._asked = {} if ask else None
        of_blocks = [job.job_id for job in jobs if is_whole(job)]
        positions = self._store.report_positions([job.job_id for job in jobs], POSITIONS if of_blocks else 2)
        reported = self._store.reported(of_blocks) if of_blocks else {}
        most = lines_per_job(len(jobs))
        new = []
        for job in jobs:
            # The run before may have written its last reports after its requeue was seen.
            restarts = range(max(0, job.restart - 1), job.restart + 1)
            if is_whole(job):
                job, restarts = self._terms.follow(job, now)
            for restart in restarts:
                offset, number = positions.get((job.job_id, restart), (0, 0))
                others = reported.get(job.job_id, 0) - number
                found = self._read(job, restart, offset, number, now, most, others)
                if found is not None:
                    new.append(found)
                    reported[job.job_id] = others + max(found.number or 0, number)
        if new:
            self._store.add_reports(new)
            self._specs.update({(r.job_id, r.restart): r.spec for r in new if r.spec is not None})

    def _read(
        self, job: Job, restart: int, offset: int, number: int, now: float, most: int, others: int
    ) -> RunReports | None:
        """What a run has reported since it was read last, as far as it is accepted; None where that is nothing new."""
        found = read_reports(job, restart, offset, number, now=now, most=most, others=others)
        problem = "; ".join(filter(None, (found.problem, self._terms.problems.get(job.job_id))))
        self._notes.looked(job.job_id, problem, now)
        spec = found.spec if restart == job.restart else None
        if spec is not None and self._specs.get((job.job_id, restart)) == spec:
            spec = None
        if found.offset == offset and spec is None:
            return None
        return RunReports(
            job.job_id, restart, found.offset, found.last, spec, [self._checked(job, x) for x in found.lines]
        )

    def _checked(self, job: Job, line: ReportLine) -> ReportLine:
        """The line; of a membership the nodes are as Slurm has them."""
        if not isinstance(line.report, Membership):
            return line
        return replace(line, report=self._terms.as_slurm_has_it(job.job_id, line.report, self._tasks))

    def _tasks(self, array: int) -> Sequence[Job]:
        """The tasks of an array as they are now, asked for once however many reports it has; a tick has just seen
        them."""
        if self._asked is None:
            return ()
        if array not in self._asked:
            try:
                self._asked[array] = self._client.tasks(array)
            except SlurmError:
                self._asked[array] = ()
        return self._asked[array]

    def may_resize(self, job: Job) -> bool:
        """Whether the job's owner still opts in and there is no stop file."""
        if self._settings.stop_file.exists():
            return False
        try:
            optin = parse_comment(job.comment)
        except BadComment:
            return False
        # What is resized by the id of an array is a job of blocks.
        return optin is not None and optin.resize and (optin.blocks or job.array_id != job.job_id)

    def checkpoint_stands(self, job: Job, name: str) -> bool:
        """Whether the checkpoint that a job reported is there and complete, as far as can be seen.

        A job that lies about its checkpoint loses its own work; this guards against files that went missing.
        """
        if not name or name.startswith(".") or "/" in name:
            return False
        try:
            path = job_directory(job) / protocol.CHECKPOINTS / name
            with directory_of(path, job.uid) as directory:
                text, size = read_from(directory, protocol.MANIFEST, job.uid, 0, 1)
                return bool(text) and size > 0
        except (FileNotFoundError, NotBelieved):
            return False


class DrainReports:
    """Reads a job's newest reports before it answers, so a resize need not wait for the next tick."""

    def __init__(self, observer: Observer, store: Store, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._store = store
        self._clock = clock

    def drained(self, job: Job, restart: int, order: int) -> float | None:
        """When the checkpoint that answers the order was reported, if it was, stands, and the job still waits."""
        self._observer.collect([job], now=self._clock())
        found = self._store.checkpoint_for_order(job.job_id, restart, order)
        if found is None:
            return None
        number, time, checkpoint = found
        if not self._observer.checkpoint_stands(job, checkpoint.name):
            return None
        # A drained job reports nothing more. One that does trains on, whatever the clocks say of its minute.
        _, last = self._store.report_positions([job.job_id]).get((job.job_id, restart), (0, 0))
        if last > number:
            return None
        # The job's clock may be ahead of ours.
        return min(time, self._clock())

    def membership(self, job: Job, order: int | None = None) -> MembershipRecord | None:
        """Which blocks of a job train together by its newest report of that; with an order's number, by the newest that
        names it. None while there is none."""
        self._observer.collect([job], now=self._clock(), ask=True)
        return self._store.membership(job.job_id, order)

    def restarted(self, job: Job, after_restart: int) -> float | None:
        """Seconds from the last step before the drain to the new run's hello."""
        self._observer.collect([job], now=self._clock())
        return self._store.pause_after(job.job_id, after_restart)


class StopFile:
    """The file that stops all resizes, and who made or removed it."""

    def __init__(self, path: Path, store: Store) -> None:
        self._path = path
        self._store = store
        self._there = False

    def check(self, now: float) -> None:
        """Record that somebody made the file, or that it is gone.

        Who removed it leaves no trace. A companion that starts again finds the same file, which is the same action.
        """
        try:
            found = self._path.stat()
        except OSError:
            if self._there:
                self._store.add_action(ActionRecord(now, "", "stop file removed", str(self._path)))
            self._there = False
            return
        if not self._there:
            made = ActionRecord(found.st_mtime, _login(found.st_uid), "stop file made", str(self._path))
            self._store.add_action(made)
        self._there = True


def _login(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
