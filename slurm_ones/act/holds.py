"""Ownership of holds: which tasks and jobs the companion holds, and which somebody else holds.

Slurm does not show whether the owner or the companion set a user hold. So each hold is first stored with the resize
that needs it (`ResizeRecord.held`), and only stored holds are released. Once a task is seen without its hold
(`ResizeRecord.let_go`), a later hold is somebody else's.

slurmctld saves its state a few seconds late. After a crash it may show an older state, in which a job that the
companion has released is still held. Only the companion would release it again. A hold counts as such a stale hold in
three cases:

- Slurm marks it as the hold of a requeue (an owner's `scontrol requeuehold` looks the same).
- The block waits with a restart count with which it has already trained: the companion set the hold before that start.
- slurmctld restarted shortly after the companion released the job, and has not considered starting the job since.

A hold that this companion saw before the restart is somebody else's. So is a hold on a block that was seen pending
without a hold since then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

from ones_db import MembershipRecord, ResizeRecord, Store
from slurm_ones.act.transitions import State
from slurm_ones.rules.blocks import BLOCKS, ever_held_by_us, held_by_us, task_of
from slurm_ones.slurm.client import Refused, SlurmClient, UnknownJob
from slurm_ones.slurm.model import JobKey, SlurmJob, Snapshot
from slurm_ones.slurm.parse import started_at

log = logging.getLogger(__name__)

FORGOTTEN_S = 300.0
"""Longest time, in seconds, between an event and a crash of slurmctld that loses it. (It saves its state every few
seconds.)"""

DOWN_S = 3600.0
"""Value in place of `FORGOTTEN_S` if the companion started after slurmctld restarted: when it crashed is unknown."""


class HeldTasks:
    """Tasks of jobs of blocks that the companion holds, derived from the stored resizes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[int, tuple[ResizeRecord, frozenset[int]]] = {}
        """Newest resize and held tasks, as of the last call of `of`, by job id."""

    def of(self, job_id: int) -> frozenset[int]:
        """Return the job's tasks that the companion holds. On a running task the hold is for its next start."""
        if not (known := self._by_blocks(job_id)):
            return frozenset()
        if job_id not in self._held or self._held[job_id][0] is not known[-1]:
            self._held[job_id] = known[-1], held_by_us(known)
        return self._held[job_id][1]

    def ever(self, job_id: int) -> frozenset[int]:
        """Return the tasks that the companion has ever held; empty for a job without a resize by blocks."""
        return ever_held_by_us(self._by_blocks(job_id))

    def look(self, job_id: int, tasks: Iterable[SlurmJob]) -> None:
        """Store which tasks have been released: held tasks that Slurm now shows without a hold, and tasks that wait
        without a hold because Slurm forgot their start. `tasks` are the job's tasks as Slurm shows them.

        Tasks in an open resize are skipped, unless Slurm forgot their start.
        """
        known = self._by_blocks(job_id)
        if not known or known[-1].state == State.PREPARING.value:
            return
        newest, ours = known[-1], self.of(job_id)
        if newest.ended is None:
            ours -= {*newest.dropped, *dict(newest.added)}
        # A record may stand for several tasks, and a task may also have a record of an earlier end.
        seen = [(task, job.completing or (job.held and not job.ended)) for job in tasks for task in job.array_tasks]
        gone = ours.intersection(task for task, _ in seen) - {task for task, held in seen if held}
        waiting = (job for job in tasks if job.pending and not (job.completing or job.held))
        new = (job for job in waiting if task_of(job) not in newest.let_go)
        gone |= {task_of(job) for job in new if _has_trained(self._store, job_id, job)}
        if gone - {*newest.let_go}:
            self._store.note_let_go(newest.id, sorted({*newest.let_go} | gone))

    def take(self, job_id: int, tasks: Iterable[int]) -> bool:
        """Store that the companion is about to hold these tasks outside a resize. Return False, and store nothing, if
        the job never had a resize by blocks."""
        if not (known := self._by_blocks(job_id)):
            return False
        newest, taken = known[-1], {*tasks}
        put_back, let_go = sorted({*newest.preempted} | taken), sorted({*newest.let_go} - taken)
        self._store.note_preempted(newest.id, put_back, let_go)
        return True

    def take_back(self, job_id: int, job: SlurmJob) -> bool:
        """Store that the companion holds a task again because Slurm forgot its start. Return False, with nothing
        stored, if Slurm did not forget it, or the task was never held or was released since."""
        task = task_of(job)
        of_task = [one for one in self._by_blocks(job_id) if task in one.let_go or task in ever_held_by_us([one])]
        if not of_task or task in of_task[-1].let_go or not forgot_start(self._store, job_id, job):
            return False
        return self.take(job_id, [task])

    def forget(self, alive: Collection[int]) -> None:
        """Forget all jobs except those in `alive`."""
        self._held = {job_id: held for job_id, held in self._held.items() if job_id in alive}

    def _by_blocks(self, job_id: int) -> list[ResizeRecord]:
        return [resize for resize in self._store.resizes_of(job_id).values() if resize.mechanism == BLOCKS]


def in_our_hold(job: SlurmJob, resize: ResizeRecord) -> bool:
    """Tell by restart count and pending reason whether the job waits in the hold into which this resize requeued it."""
    return job.pending and not job.completing and job.requeue_held and job.restart == resize.restart + 1 > 0


def may_be_ours(job: SlurmJob) -> bool:
    """Tell whether the job waits in a hold that neither an operator nor Slurm itself set."""
    return job.pending and not job.completing and job.held and not job.admin_held and not job.never_starts


def forgot_start(store: Store, job_id: int, job: SlurmJob) -> bool:
    """Tell whether Slurm forgot that a block started: it waits in a hold with a restart count with which it has already
    trained. The hold is the companion's, unless the task was released since (`ResizeRecord.let_go`)."""
    return may_be_ours(job) and _has_trained(store, job_id, job)


def forgot_end(client: SlurmClient, store: Store, job_id: int, job: SlurmJob) -> bool:
    """Tell whether Slurm may have forgotten the end of a block that it shows as running: the job reported a membership
    without the block, and slurmctld restarted shortly afterwards."""
    told = store.memberships(job_id)
    last = next((number for number, one in enumerate(told) if _trains(job, one)), 0)
    return last > 0 and forgotten(client, told[last - 1].time)


def _has_trained(store: Store, job_id: int, job: SlurmJob) -> bool:
    return any(_trains(job, one) for one in store.memberships(job_id))


def _trains(job: SlurmJob, told: MembershipRecord) -> bool:
    return (task_of(job), job.restart) in zip(told.report.blocks, told.report.restarts, strict=False)


def forgotten(client: SlurmClient, then: float, up: float = math.inf) -> bool:
    """Tell whether slurmctld restarted after the Unix time `then` and may have lost an event of that time.

    Events may be lost in the `FORGOTTEN_S` before slurmctld was last seen `up`, or if that is unknown, before its
    restart.
    """
    began = _began(client)
    return then < began and min(began, up) - then <= FORGOTTEN_S


def forgot_release(client: SlurmClient, then: float, job: SlurmJob, seen: Snapshot | None) -> bool:
    """Tell whether a restart of slurmctld may have lost a release of the job at the Unix time `then`. It has not if
    `seen`, a snapshot after the restart, shows the job waiting without a hold."""
    if seen is None:
        return forgotten(client, then)
    before = seen.jobs.get(job.job_id)
    waits = before is not None and before.pending and not before.held
    return forgotten(client, then, seen.time) and not (waits and seen.time >= _began(client))


def _began(client: SlurmClient) -> float:
    try:
        return started_at(client.config())
    except Refused:
        return 0.0


class StaleHolds:
    """Release of jobs that are still held after their resize, because Slurm forgot their release."""

    def __init__(self, client: SlurmClient, store: Store, clock: Callable[[], float]) -> None:
        self._client = client
        self._store = store
        self._tasks = HeldTasks(store)
        self._clock = clock
        self._known: set[JobKey] = set()
        """Jobs that were held at the last tick by somebody else."""
        self._last = 0.0
        """Time of the last tick; 0.0 before the first."""

    def release(self, jobs: Iterable[tuple[int, SlurmJob]], ours: Collection[JobKey]) -> None:
        """Release jobs that are still in the hold of a resize that is over; raises `Unreachable`.

        `jobs` are jobs without an open resize, each with the job id under which it is stored. `ours` are tasks that the
        companion holds for later use.
        """
        now = self._clock()
        held = {job.key: (id_, job) for id_, job in jobs if may_be_ours(job) and job.key not in ours}
        self._known &= held.keys()
        missed = False
        if fresh := held.keys() - self._known:
            began = _began(self._client)
            back = self._last < began
            for key in sorted(fresh, key=str):
                id_, job = held[key]
                stale = (job.requeue_held or back) and self._is_stale(id_, job, began if back else 0.0)
                if (job.array_id == id_ and self._tasks.take_back(id_, job)) or stale:
                    missed = not self._release(key, job) or missed
                else:
                    self._known.add(key)
        # A release that Slurm refused is due again.
        self._last = self._last if missed else now

    def _is_stale(self, id_: int, job: SlurmJob, began: float) -> bool:
        """Tell whether a resize of the job set the hold: it requeued the job into it, or slurmctld forgot the release
        when it restarted at `began` (0 if it did not)."""
        resizes = self._store.resizes_of(id_).values()
        if any(job.job_id == id_ and in_our_hold(job, resize) and self._requeued(resize) for resize in resizes):
            return True
        # A block may have waited again since: a companion that has not seen it goes by its restart count.
        released = [self._released(one, job) for one in resizes if self._last or one.mechanism != BLOCKS]
        up, most_s = (self._last, FORGOTTEN_S) if self._last else (began, DOWN_S)
        lost = [time for time in released if time < began and up - time <= most_s]
        return bool(lost) and not self._considered(job, max(lost))

    def _considered(self, job: SlurmJob, since: float) -> bool:
        """Tell whether Slurm has considered starting the job since then, so that it was not held; True if unknown."""
        try:
            seen = self._client.details([job.job_id]).get(job.job_id)
        except Refused:
            return True
        return seen is None or seen.considered >= since

    def _requeued(self, resize: ResizeRecord) -> bool:
        return any(step.state == State.REQUEUING for step in self._store.resize_steps(resize.id))

    def _released(self, resize: ResizeRecord, job: SlurmJob) -> float:
        """Return the Unix time at which this resize saw the job released; infinity if it never held or released it."""
        steps, added = self._store.resize_steps(resize.id), dict(resize.added)
        if added and (not job.array_id or task_of(job) not in added):
            return math.inf
        if resize.mechanism == BLOCKS:
            done = added and resize.state == State.DONE
            leaves = (step.time for step in steps if done and step.state == State.LEAVING and not step.back)
            return max(leaves, default=math.inf)
        if resize.outcome.code == "stands_held" or not any(step.state == State.HOLDING for step in steps):
            return math.inf
        released = (State.WAITING, State.STARTING)
        seen = (b.time for a, b in pairwise(steps) if a.state == State.RELEASING and b.state in released)
        return max(seen, default=math.inf)

    def _release(self, key: JobKey, seen: SlurmJob) -> bool:
        """Release the job, unless its hold has changed since it was `seen`; return False if Slurm refuses."""
        try:
            now = self._client.job(key)
            if may_be_ours(now) and now.requeue_held == seen.requeue_held:
                log.warning("job %s: stale hold: Slurm lost its release; it is released again", key)
                self._client.release(key)
        except UnknownJob:
            return True
        except Refused as error:
            log.error("job %s: it could not be released: %s", key, error)
            return False
        return True
