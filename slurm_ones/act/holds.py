"""Ownership of holds: which held tasks and jobs the companion holds, and which somebody else.

Slurm shows a hold by the owner and one by us alike. So each hold of ours is stored with the resize that needs it first
(`ResizeRecord.held`), and no other hold is ever released. Once a task is seen out of its hold (`ResizeRecord.let_go`),
a later hold is not ours. If an owner releases and holds a task again between two ticks, that hold passes for ours.

slurmctld saves its state a few seconds late; if it dies while saving, it restarts from an older state. A job that stood
in our hold at that time then stands in it again, and nobody else would release the job. Slurm names the hold of a
requeue (an owner's `scontrol requeuehold` of a waiting job looks the same). Any other hold looks like the owner's: it
is ours only if slurmctld restarted shortly after our release, and the job was not held when last seen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

from ones_db import ResizeRecord, Store
from slurm_ones.act.transitions import State
from slurm_ones.rules.blocks import BLOCKS, ever_held_by_us, held_by_us, task_of
from slurm_ones.slurm.client import Refused, SlurmClient, UnknownJob
from slurm_ones.slurm.model import JobKey, SlurmJob
from slurm_ones.slurm.parse import started_at

log = logging.getLogger(__name__)

FORGOTTEN_S = 300.0
"""Most seconds from a release to a restart of slurmctld that forgets it: slurmctld saves every few seconds."""


class HeldTasks:
    """Tasks of jobs of blocks that wait in our holds, derived from the stored resizes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[int, tuple[ResizeRecord, frozenset[int]]] = {}
        """Newest resize of each job, and the held tasks by all its resizes: only the newest record changes."""

    def of(self, job_id: int) -> frozenset[int]:
        """Return the job's tasks that the companion holds; a task of them that does not wait is in no hold."""
        if not (known := self._by_blocks(job_id)):
            return frozenset()
        if job_id not in self._held or self._held[job_id][0] is not known[-1]:
            self._held[job_id] = known[-1], held_by_us(known)
        return self._held[job_id][1]

    def ever(self, job_id: int) -> frozenset[int]:
        """Return the tasks that we held at any time; empty for a job without a resize by blocks."""
        return ever_held_by_us(self._by_blocks(job_id))

    def look(self, job_id: int, tasks: Iterable[SlurmJob]) -> None:
        """Store which of our held tasks have left their hold, by the job's `tasks` as Slurm shows them.

        Tasks that an open resize holds, adds or drops are left out.
        """
        if not (ours := self.of(job_id)):
            return
        newest = self._by_blocks(job_id)[-1]
        if newest.ended is None:
            if newest.state == State.PREPARING.value:
                return
            ours -= {*newest.dropped, *dict(newest.added)}
        # A record may stand for several tasks, and a task may have a second one of an earlier end.
        seen = [(task, job.completing or (job.held and not job.ended)) for job in tasks for task in job.array_tasks]
        if gone := ours.intersection(task for task, _ in seen) - {task for task, held in seen if held}:
            self._store.note_let_go(newest.id, sorted({*newest.let_go} | gone))

    def take(self, job_id: int, tasks: Iterable[int]) -> bool:
        """Store that we are about to hold these tasks outside of a resize. Return False, storing nothing, for a job
        without a resize by blocks."""
        if not (known := self._by_blocks(job_id)):
            return False
        newest, taken = known[-1], {*tasks}
        put_back, let_go = sorted({*newest.preempted} | taken), sorted({*newest.let_go} - taken)
        self._store.note_preempted(newest.id, put_back, let_go)
        return True

    def forget(self, alive: Collection[int]) -> None:
        """Drop the memory of jobs that are not in `alive`."""
        self._held = {job_id: held for job_id, held in self._held.items() if job_id in alive}

    def _by_blocks(self, job_id: int) -> list[ResizeRecord]:
        return [resize for resize in self._store.resizes_of(job_id).values() if resize.mechanism == BLOCKS]


def in_our_hold(job: SlurmJob, resize: ResizeRecord) -> bool:
    """Tell whether the job waits in the hold into which the resize requeued it. A second requeue would raise the
    restart count, and a later hold changes the pending reason."""
    return job.pending and not job.completing and job.requeue_held and job.restart == resize.restart + 1 > 0


def may_be_ours(job: SlurmJob) -> bool:
    """Tell whether the job waits in a hold that is neither an operator's nor Slurm's own."""
    return job.pending and not job.completing and job.held and not job.admin_held and not job.never_starts


def forgotten(client: SlurmClient, released: float) -> bool:
    """Tell whether slurmctld restarted within `FORGOTTEN_S` of the release, and so may have forgotten it."""
    return 0.0 < _began(client) - released <= FORGOTTEN_S


def _began(client: SlurmClient) -> float:
    try:
        return started_at(client.config())
    except Refused:
        return 0.0


class StaleHolds:
    """Releases jobs whose resize is over, but whose release Slurm forgot."""

    def __init__(self, client: SlurmClient, store: Store, clock: Callable[[], float]) -> None:
        self._client = client
        self._store = store
        self._clock = clock
        self._known: set[JobKey] = set()
        """Jobs seen held at the last tick whose hold is not stale."""
        self._last = 0.0
        """Time of the last tick."""

    def release(self, jobs: Iterable[tuple[int, SlurmJob]], ours: Collection[JobKey]) -> None:
        """Release jobs of a snapshot that still stand in the hold of a resize that is over; raises `Unreachable`.

        Each job comes with its record's id, and is in no open resize. `ours` are tasks that we hold for later use.
        Slurm is queried again only for jobs whose hold looks stale.
        """
        now = self._clock()
        held = {job.key: (id_, job) for id_, job in jobs if may_be_ours(job) and job.key not in ours}
        self._known &= held.keys()
        if fresh := held.keys() - self._known:
            began = _began(self._client)
            back = 0.0 < self._last < began  # a companion that started later may meet a hold of before: the owner's
            for key in sorted(fresh, key=str):
                id_, job = held[key]
                if (job.requeue_held or back) and self._is_stale(id_, job, began if back else 0.0):
                    self._release(key, job)
                else:
                    self._known.add(key)
        self._last = now

    def _is_stale(self, id_: int, job: SlurmJob, began: float) -> bool:
        """Tell whether the hold is ours: by a requeue, or by a release that slurmctld lost when it restarted at `began`
        (0: it did not).

        All resizes of the job count: the last one may have given up because it found this hold.
        """
        resizes = self._store.resizes_of(id_).values()
        requeued = any(job.job_id == id_ and in_our_hold(job, resize) and self._requeued(resize) for resize in resizes)
        return requeued or any(0.0 < began - self._released(resize, job) <= FORGOTTEN_S for resize in resizes)

    def _requeued(self, resize: ResizeRecord) -> bool:
        """Tell whether the resize requeued the job itself; otherwise another companion did."""
        return any(step.state == State.REQUEUING for step in self._store.resize_steps(resize.id))

    def _released(self, resize: ResizeRecord, job: SlurmJob) -> float:
        """Return when the job was last seen out of the resize's hold; infinity without a hold or a release."""
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

    def _release(self, key: JobKey, seen: SlurmJob) -> None:
        try:
            now = self._client.job(key)
            if may_be_ours(now) and now.requeue_held == seen.requeue_held:
                log.warning("job %s: stale hold: Slurm lost its release; it is released again", key)
                self._client.release(key)
        except UnknownJob:
            return
        except Refused as error:
            log.error("job %s: it could not be released: %s", key, error)
