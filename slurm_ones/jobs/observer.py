"""Observation in each tick: reads Slurm's snapshot and the elastic jobs' reports, and stores both."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from ones_db import ActionRecord, JobRecord, MembershipRecord, NodeRecord, RunRecord, RunReports, Store
from ones_db.reasons import NO_REASON, reason
from ones_wrapper.protocol import Membership, Spec
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import (
    Elastic,
    Observation,
    WholeJob,
    as_one,
    elastic_job,
    guests_of,
    says_blocks,
    whole_job,
)
from slurm_ones.jobs.gpu_use import GpuUses
from slurm_ones.jobs.other_companion import OtherCompanion, login_of
from slurm_ones.jobs.reports import (
    JobDirectories,
    Measured,
    Notes,
    checkpoint_stands,
    confirmed,
    last_measured,
    lines_per_job,
    read_reports,
)
from slurm_ones.jobs.terms import Terms
from slurm_ones.slurm.client import SlurmClient, SlurmError
from slurm_ones.slurm.model import JobState, Node, Queue, SlurmJob, Snapshot, kind_of
from slurm_ones.slurm.parse import usable
from slurm_ones.text import plain
from slurm_ones.untrusted_files import NoAnswer

log = logging.getLogger(__name__)


AT_ONCE = 1000
"""Largest number of arrays whose task throttle is read from Slurm in one tick."""


class Observer:
    """Reader of Slurm and of the jobs' reports. It stores both, and how far it has read each report file."""

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
        self._other_gpus: int | None = None
        self._counted: dict[int, bool] = {}
        """True for each job that was submitted with a task count, by job id, for jobs whose details were read."""
        self._specs: dict[tuple[int, int], Spec] = {}
        """Spec of each run as last stored, by job id and restart."""
        self._measured: dict[tuple[int, int], Measured] = {}
        """Last Hello or Throughput report of each run, by job id and restart, since the companion started."""
        self._terms = Terms(store, self._own_uid, guests_of(settings))
        self._files = JobDirectories(settings.spool)
        self._uses = GpuUses(client, settings.limits)
        self._throttled: dict[int, int] = {}
        """Task throttle of each waiting array (0 for none), as far as it was read, by array id."""
        self._silent: dict[int, str] = {}
        """Error of the file system for each job whose files could not be read last time, by job id."""
        self.other = OtherCompanion(self._own_uid, self._files.hello, clock)
        self._asked: dict[int, Sequence[SlurmJob]] | None = None
        """Tasks that this call of `collect` has read from Slurm, by array id; None if it must not query Slurm."""

    def observe(self) -> Observation:
        """Return the observation of one tick. Raises `Unreachable`."""
        snapshot = self._client.snapshot()
        jobs = self._terms.jobs(snapshot)
        if throttles := self._throttles(jobs, snapshot):
            shown = {
                id_: replace(job, throttle=throttles[job.array_id]) if job.array_id in throttles else job
                for id_, job in snapshot.jobs.items()
            }
            snapshot = replace(snapshot, jobs=shown)
            jobs = self._terms.jobs(snapshot)
        elastic_jobs: dict[int, Elastic] = {}
        left: dict[int, Elastic] = {}
        for job in jobs.values():
            elastic = elastic_job(job, snapshot, self._settings.whole_node_gpus, self._own_uid)
            if elastic is not None and (job.job_id, job.restart) not in self._finished:
                elastic_jobs[job.job_id] = elastic
            if elastic is not None and job.ended and any(block.pending for block in job.blocks):
                left[job.job_id] = elastic
        tasks_alone: dict[int, list[SlurmJob]] = defaultdict(list)
        for elastic in elastic_jobs.values():
            if not elastic.job.by_blocks and (array := elastic.job.first.array_id):
                tasks_alone[array].append(elastic.job.first)
        no_more = self._terms.no_more(tasks_alone)
        for array in no_more:
            for job_ in tasks_alone[array]:
                del elastic_jobs[job_.job_id]
        seen = self._within_reach(self._with_details(elastic_jobs, jobs.keys()))
        kinds = {name: node.kind for name, node in snapshot.nodes.items()}
        self._store_jobs(seen, kinds, snapshot.time)
        self._terms.store_blocks(seen, snapshot)
        self._store_nodes(snapshot, seen)
        self._uses.look(seen, snapshot.time)
        self._close_lost(snapshot, jobs, seen.keys(), no_more)
        mine = [elastic.job for elastic in seen.values() if self._own_uid in (None, elastic.job.uid)]
        self.collect(mine, now=snapshot.time)
        seen = {id_: self._refused_if_silent(elastic) for id_, elastic in seen.items()}
        self._specs = {key: spec for key, spec in self._specs.items() if key[0] in seen}
        self._measured = {key: last for key, last in self._measured.items() if key[0] in seen}
        self._notes.forget(jobs)
        ended = {(id_, e.job.restart) for id_, e in seen.items() if e.job.ended}
        self._finished = {key for key in self._finished if key[0] in jobs} | ended
        here = {id_: e for id_, e in seen.items() if not e.job.ended}
        return Observation(snapshot, here, left, self._uses.idle)

    def _throttles(self, jobs: Mapping[int, WholeJob], snapshot: Snapshot) -> dict[int, int]:
        """Return the task throttles (largest number of tasks that run at once) that the snapshot lacks, by array id.

        Throttles of arrays of blocks are read in each tick. Throttles of other waiting arrays are read once, while an
        elastic job runs.
        """
        asked = {
            next(block.job_id for block in one.blocks if not block.ended): array
            for array, one in jobs.items()
            if one.refusal is not None and one.refusal.code == "blocks_unthrottled"
        }
        waits = (job for job in snapshot.jobs.values() if job.pending and job.job_id == job.array_id)
        others = {job.job_id for job in waits if not (job.held or job.throttle or jobs[job.job_id].by_blocks)}
        self._throttled = {array: most for array, most in self._throttled.items() if array in others}
        if any(one.running and "ones:" in one.home.comment.lower() for one in jobs.values()):
            asked |= {array: array for array in sorted(others - self._throttled.keys())[:AT_ONCE]}
        details = self._client.details(list(asked)) if asked else {}
        found = {asked[id_]: job.throttle for id_, job in details.items() if id_ in asked}
        self._throttled |= {array: found.get(array, 0) for array in others & {*asked}}
        return {array: most for array, most in (self._throttled | found).items() if most}

    def _with_details(self, seen: dict[int, Elastic], known: Set[int]) -> dict[int, Elastic]:
        """Return all jobs, with a refusal for jobs that were submitted with a task count. Slurm is asked once for each
        job."""
        new = [id_ for id_, e in seen.items() if not e.refusal and not e.job.ended and id_ not in self._counted]
        # Tasks of an array were submitted together, so one of them is read for all.
        asked = {next(block.job_id for block in seen[id_].job.blocks if not block.ended): id_ for id_ in new}
        details = self._client.details(list(asked)) if asked else {}
        self._counted = {id_: counted for id_, counted in self._counted.items() if id_ in known}
        self._counted.update({asked[id_]: job.task_counts for id_, job in details.items() if id_ in asked})
        refused = {id_ for id_, elastic in seen.items() if self._counted.get(id_) and not elastic.refusal}
        return seen | {id_: replace(seen[id_], refusal=reason("task_counts")) for id_ in refused}

    def _within_reach(self, seen: dict[int, Elastic]) -> dict[int, Elastic]:
        """Return all jobs, with a refusal for each job that orders cannot reach, or that another companion resizes."""
        self._files.forget(seen)
        self._silent = {id_: problem for id_, problem in self._silent.items() if id_ in seen}
        read = {job_id for job_id, _ in self._specs}

        def judged(elastic: Elastic) -> Elastic:
            job = elastic.job
            elastic = self._refused_if_silent(elastic)
            if elastic.refusal or job.ended:
                return elastic
            refusal = self._files.refusal(job, read=job.job_id in read) or self.other.refusal(job)
            return elastic if refusal is None else replace(elastic, refusal=refusal)

        return {id_: judged(elastic) for id_, elastic in seen.items()}

    def _refused_if_silent(self, elastic: Elastic) -> Elastic:
        problem = self._silent.get(elastic.job.job_id)
        if problem is None or elastic.refusal or elastic.job.ended:
            return elastic
        return replace(elastic, refusal=reason("files_silent", problem=problem))

    def _store_jobs(self, seen: Mapping[int, Elastic], kinds: Mapping[str, str], now: float) -> None:
        """Store the jobs and runs that changed since the last tick. `kinds` has the GPU type of each node."""
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

    def _store_nodes(self, snapshot: Snapshot, seen: Mapping[int, Elastic]) -> None:
        """Store the nodes that changed, and the number of GPUs of jobs that did not opt in."""
        nodes = {name: node_record(node) for name, node in snapshot.nodes.items()}
        if nodes != self._nodes:
            self._store.record_nodes(snapshot.time, nodes.values())
            self._nodes = nodes
        own = {block.job_id for elastic in seen.values() for block in elastic.job.blocks}
        gpus = sum(job.gpus for job_id, job in snapshot.jobs.items() if job.running and job_id not in own)
        if gpus != self._other_gpus:
            self._store.record_other_gpus(snapshot.time, gpus)
            self._other_gpus = gpus

    def _close_lost(self, snapshot: Snapshot, jobs: Mapping[int, WholeJob], seen: Set[int], no_more: Set[int]) -> None:
        """Close the records of jobs that Slurm no longer knows, or whose owners opted out. In `no_more` are jobs whose
        owners removed only the word `array=blocks` from the comment."""
        lost = self._store.live_jobs() - seen
        if not lost:
            return
        records = []
        for job_id, record in self._store.jobs(list(lost)).items():
            # One task has the array's own id. It is not the job, since its other tasks may still train.
            tasks: list[SlurmJob] = []
            if says_blocks(record.comment):
                tasks = [job for job in snapshot.jobs.values() if job.array_id == job_id and job.array_tasks]
            job = whole_job(job_id, tasks, record, record.restart) if tasks else jobs.get(job_id)
            if job is None:
                note = "it ended while no companion ran, and Slurm no longer knows how"
                unknown = JobState.UNKNOWN.value
                records.append(replace(record, state=unknown, end_time=snapshot.time, report_note=note))
            else:
                why = reason("blocks_no_more" if job_id in no_more else "opted_out")
                end = job.end_time if job.ended else None
                now = replace(record, state=job.first.state.value, restart=job.restart, end_time=end)
                records.append(replace(now, elastic=False, refusal=why))
        self._store.record_jobs(records)

    def collect(self, jobs: Sequence[WholeJob], *, now: float, ask: bool = False) -> None:
        """Store the new reports of these jobs' newest runs, in one transaction. With `ask`, read the tasks of unknown
        blocks from Slurm."""
        self._asked = {} if ask else None
        of_blocks = [job.job_id for job in jobs if job.by_blocks]
        places = self._store.report_positions([job.job_id for job in jobs])
        reported = self._store.reported(of_blocks) if of_blocks else {}
        most = lines_per_job(len(jobs))
        new = []
        for job in jobs:
            job, restarts = self._terms.follow(job, now)
            for restart in restarts:
                offset, number = places[job.job_id].get(restart, (0, 0))
                others = reported.get(job.job_id, 0) - number if job.by_blocks else 0
                found = self._read(job, restart, offset, number, now, most, others)
                if found is not None:
                    new.append(found)
                    reported[job.job_id] = others + max(found.number or 0, number)
        if new:
            self._store.add_reports(new)
            self._specs.update({(r.job_id, r.restart): r.spec for r in new if r.spec is not None})
            measured = ((r.job_id, r.restart, last_measured(r)) for r in new)
            self._measured.update({(job_id, restart): last for job_id, restart, last in measured if last is not None})

    def _read(
        self, job: WholeJob, restart: int, offset: int, number: int, now: float, most: int, others: int
    ) -> RunReports | None:
        """Return the new reports of a run, with Slurm's number of nodes in memberships; None if there are none."""
        try:
            found, problem = read_reports(job, restart, offset, number, now=now, most=most, others=others)
        except NoAnswer as error:
            self._silent[job.job_id] = str(error)
            self._notes.add(job.job_id, str(error), now)
            return None
        self._silent.pop(job.job_id, None)
        found, doubt = confirmed(found, self._measured.get((job.job_id, restart)))
        problem = "; ".join(filter(None, (problem, doubt, self._terms.problems.get(job.job_id))))
        self._notes.add(job.job_id, problem, now)
        spec = found.spec if restart == job.restart else None
        if spec is not None and self._specs.get((job.job_id, restart)) == spec:
            spec = None
        if found.offset == offset and spec is None:
            return None
        lines = [
            replace(line, report=self._terms.as_slurm_has_it(job.job_id, line.report, self._tasks))
            if isinstance(line.report, Membership)
            else line
            for line in self._uses.read(job.job_id, found.lines, now)
        ]
        return replace(found, spec=spec, lines=lines)

    def _tasks(self, array: int) -> Sequence[SlurmJob]:
        """Return an array's tasks, read at most once in a call of `collect`; empty if it must not query Slurm."""
        if self._asked is None:
            return ()
        if array not in self._asked:
            try:
                self._asked[array] = self._client.tasks(array)
            except SlurmError:
                self._asked[array] = ()
        return self._asked[array]

    def may_resize(self, job: WholeJob) -> bool:
        """Tell whether the job's owner still opts in and no stop file exists."""
        if self._settings.stopped:
            return False
        try:
            optin = parse_comment(job.first.comment)
        except BadComment:
            return False
        return optin is not None and optin.resize and (optin.blocks or not job.by_blocks)


def job_record(elastic: Elastic, note: str) -> JobRecord:
    """Return the job's record, with the user's texts made printable. While base blocks and guests run, the requested
    shape in it is the base blocks' shape."""
    job, home = elastic.job, elastic.job.home
    base = [elastic.shape_of(block) for block in job.running_blocks if not job.is_guest(block)]
    return JobRecord(
        job_id=job.job_id,
        name=plain(home.name),
        user=plain(home.user),
        submit_time=job.submit_time,
        requested_shape=as_one(base) if 0 < len(base) < len(job.running_blocks) else elastic.shape,
        account=plain(home.account),
        partition=plain(",".join(home.partitions)),
        qos=plain(home.qos),
        licenses=plain(Queue.of(home).licenses),
        comment=plain(home.comment, 1000),
        work_dir=plain(home.work_dir, 4096),
        restart=job.restart,
        elastic=not elastic.refusal,
        refusal=elastic.refusal or NO_REASON,
        state=job.first.state.value,
        end_time=job.end_time if job.ended else None,
        exit_code=job.first.exit_code if job.ended else None,
        report_note=note,
    )


def node_record(node: Node) -> NodeRecord:
    """Return the node's record, without anything that changes with the jobs on the node."""
    # A reserved node may become idle or busy while it is reserved.
    state = "UP" if node.usable else "RESERVED" if usable(node.state) else node.state
    return NodeRecord(node.name, state, node.usable, node.gpus, ",".join(node.partitions))


def run_record(elastic: Elastic, before: RunRecord | None = None, kinds: Mapping[str, str] | None = None) -> RunRecord:
    """Return the record of the job's present run (for a job of blocks, of its term). `before` is the record of the last
    tick. The GPU kind is the requested kind, or else that of the nodes (`kinds`, by node)."""
    job, shape = elastic.job, elastic.shape
    same = before if before is not None and before.restart == job.restart else None
    kind, start = kind_of(job.node_list, kinds or {}), job.start_time or None
    if job.by_blocks:
        if same is not None and same.kind and "," not in same.kind:
            # The known kind is kept: blocks run before they join, and the reports of a new term may be read late.
            kind = same.kind
        first = min((block.start_time for block in job.blocks if block.start_time), default=start)
        start = (same.start_time if same is not None else None) or (None if job.restart else first)
    elif job.first.of_one_kind:
        kind = job.first.kind or kind
    return RunRecord(
        job_id=job.job_id,
        restart=job.restart,
        shape=shape,
        node_list=job.node_list,
        start_time=start,
        end_time=job.end_time if job.ended else None,
        kind=kind or None,
    )


class DrainReports:
    """Reader of a job's newest reports at any time, so that a resize need not wait for the next tick."""

    def __init__(self, observer: Observer, store: Store, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._store = store
        self._clock = clock

    def drained(self, job: WholeJob, restart: int, order: int) -> float | None:
        """Return the time at which the job reported the checkpoint for this drain order. Return None before that, or if
        the job has trained on since."""
        self._observer.collect([job], now=self._clock())
        found = self._store.checkpoint_for_order(job.job_id, restart, order)
        if found is None:
            return None
        number, time, checkpoint = found
        if not checkpoint_stands(job, checkpoint.name):
            return None
        # A drained job reports nothing more. If it has reported more, it trains on, whatever the clocks say.
        _, last = self._store.report_positions([job.job_id])[job.job_id].get(restart, (0, 0))
        if last > number:
            return None
        # The job's clock may be ahead of ours.
        return min(time, self._clock())

    def gone(self, job: WholeJob, restart: int) -> bool:
        """Tell whether the drained run has reported the end of its processes."""
        self._observer.collect([job], now=self._clock())
        runs = self._store.runs(job.job_id)
        return any(run.restart == restart and run.end_reason == "drained" for run in runs)

    def membership(self, job: WholeJob, order: int | None = None) -> MembershipRecord | None:
        self._observer.collect([job], now=self._clock(), ask=True)
        return self._store.membership(job.job_id, order)

    def restarted(self, job: WholeJob, after_restart: int) -> float | None:
        """Return the seconds from the last step before the drain to the new run's hello; None before this hello."""
        self._observer.collect([job], now=self._clock())
        return self._store.pause_after(job.job_id, after_restart)


class StopFile:
    """File that stops all resizes."""

    def __init__(self, path: Path, store: Store) -> None:
        self._path = path
        self._store = store
        self._there = False

    def check(self, now: float) -> None:
        """Record that the stop file was made (by its owner) or removed (by an unknown user) since the last check."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if self._there:
                self._store.add_action(ActionRecord(now, "", "stop file removed", str(self._path)))
            self._there = False
            return
        except OSError as error:
            log.error("%s: the stop file cannot be checked: %s; no resize begins", self._path, error.strerror)
            return
        if not self._there:
            made = ActionRecord(found.st_mtime, login_of(found.st_uid), "stop file made", str(self._path))
            self._store.add_action(made)
        self._there = True
