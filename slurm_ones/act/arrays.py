"""Upkeep of jobs of blocks: cancels held tasks of ended jobs, orders blocks that train apart to end, and holds guests.

A job that ends cancels its own waiting tasks if it can (`ones-run`). This module cancels the tasks that remain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ones_db import JobHistory, MembershipRecord, ResizeRecord, Store
from ones_wrapper.protocol import Order
from slurm_ones.act.holds import HeldTasks, forgot_end, forgotten, may_be_ours
from slurm_ones.act.orders import OrderError, OrderWriter
from slurm_ones.act.transitions import HOLDS_JOB, State
from slurm_ones.jobs.elastic import NO_GUESTS, Elastic, Guests, WholeJob, newest, whole_job
from slurm_ones.rules.blocks import BLOCKS, has_left, task_of, train_together
from slurm_ones.slurm.client import Refused, SlurmClient, UnknownJob
from slurm_ones.slurm.model import JobState, Partition, SlurmJob, Task
from slurm_ones.slurm.parse import setting

log = logging.getLogger(__name__)

SURE_S = 10.0
"""Seconds after the end of a job's last block before the job counts as over: until then Slurm may requeue the block."""
ENDS = frozenset({"finished", "stopped", "error"})
"""Reasons in a job's last report (`protocol.Bye`) after which the job is over."""
NO_TASKS: Mapping[int, Collection[int]] = {}
APART_S = 300.0
"""Seconds after which a running block that trains apart from its job's other blocks is ordered to end."""


def is_alive(job: SlurmJob) -> bool:
    """Tell whether the block runs, is ending, or is pending and not held."""
    return job.completing or not (job.ended or (job.pending and job.held))


def look_at(client: SlurmClient, job_id: int, term: int = 0, guests: Guests = NO_GUESTS) -> WholeJob:
    """Return the job of blocks, read from Slurm now; raises `UnknownJob`."""
    tasks = client.tasks(job_id)
    if not tasks:
        raise UnknownJob(f"job {job_id}: Slurm knows none of its tasks")
    return whole_job(job_id, tasks, term=term, guests=guests)


def job_of(client: SlurmClient, resize: ResizeRecord) -> WholeJob:
    """Return a job that is resized by requeue, read from Slurm now; raises `UnknownJob`. If only one block of a waiting
    job is resized, return that block."""
    if resize.added:
        return WholeJob.of(client.job(Task(resize.job_id, resize.added[0][0])), resize.job_id)
    job = client.job(resize.job_id)
    array = job.array_id if job.array_id == job.job_id else 0
    if resize.restart >= 0 or not array:
        return WholeJob.of(job)
    # One block may run already because its owner released it. The others are then still held by the companion.
    whole = look_at(client, array)
    first = min(whole.blocks, key=lambda block: (not block.running, block.ended))
    ours = any(map(may_be_ours, whole.blocks)) and State(resize.state) in HOLDS_JOB
    return replace(whole, key=array, first=replace(first, held=first.held or ours))


def moving_tasks(resizes: Iterable[ResizeRecord]) -> dict[int, set[int]]:
    """Return, for each job id, the tasks that its open resize by blocks adds or drops."""
    by_blocks = (resize for resize in resizes if resize.mechanism == BLOCKS)
    return {resize.job_id: {*dict(resize.added), *resize.dropped} for resize in by_blocks}


def arrays_of(jobs: Iterable[SlurmJob]) -> dict[int, list[SlurmJob]]:
    """Return the tasks of each job array, by the array's id. Arrays whose owner has opted out are included."""
    found: dict[int, list[SlurmJob]] = {}
    for job in jobs:
        if job.array_id:
            found.setdefault(job.array_id, []).append(job)
    return found


def waiting_arrays(arrays: Mapping[int, list[SlurmJob]]) -> dict[int, list[SlurmJob]]:
    """Return the arrays with a held task."""
    return {id_: jobs for id_, jobs in arrays.items() if any(job.pending and job.held for job in jobs)}


@dataclass
class Leftovers:
    """Clean-up after jobs of blocks, once a tick: cancels held tasks of jobs that are over, requeues preempted blocks,
    and orders blocks that train apart to end."""

    client: SlurmClient
    store: Store
    held: HeldTasks
    orders: OrderWriter
    clock: Callable[[], float]
    _seen_over: dict[int, float] = field(default_factory=dict)
    """Time at which each job was first found to be over, by job id."""
    _gone_on: dict[int, int] = field(default_factory=dict)
    """Step in the job's last membership report when a held task was last released to train on, by job id."""
    _apart: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Time at which each running block was first found to train apart, by (job id, task, restart count)."""
    _told: set[tuple[int, int, int]] = field(default_factory=set)
    """Blocks that have been ordered to end, each as (job id, task, restart count)."""

    def cancel_waiting(self, arrays: Mapping[int, Sequence[SlurmJob]]) -> None:
        """Cancel the held tasks of jobs that are over; raises `Unreachable`. `arrays` has each job's tasks by job id.

        A job is not over while its owner holds a block that has trained, or a block that the companion never held.

        If all blocks left but the job reported no end, one held task is released instead, to train on from the last
        checkpoint. It is released again only if the job has made progress since.
        """
        before, self._seen_over = self._seen_over, {}
        for job_id, tasks in arrays.items():
            if job_id in before:
                self._seen_over[job_id] = before[job_id]
            if not self._over(job_id, tasks):
                continue
            try:
                tasks = newest(self.client.tasks(job_id))
                if not self._over(job_id, tasks):
                    continue
                if (members := self._left_alone(job_id, tasks)) is not None:
                    self._go_on(job_id, members, tasks)
                else:
                    log.info("job %d: it has ended; its waiting tasks are cancelled", job_id)
                    self.client.cancel_waiting(job_id)
            except UnknownJob:
                continue
            except Refused as error:
                log.error("job %d: its waiting tasks could not be cancelled: %s", job_id, error)

    def _over(self, job_id: int, tasks: Collection[SlurmJob]) -> bool:
        """Tell whether the job is over: no block runs or may start, and the companion holds all waiting tasks. If the
        job has reported its end, its owner may hold some of them."""
        waiting = {task for job in tasks if job.pending for task in job.array_tasks}
        if waiting and not any(map(is_alive, tasks)) and self._waits_for_us(job_id, waiting):
            return waiting.isdisjoint(self._kept_by_others(job_id)) and self._long_ago(job_id, tasks)
        self._seen_over.pop(job_id, None)
        return False

    def _waits_for_us(self, job_id: int, waiting: set[int]) -> bool:
        ours = waiting <= self.held.of(job_id)
        return ours or (waiting <= self.held.ever(job_id) and self._last_word(job_id) in ENDS)

    def _kept_by_others(self, job_id: int) -> set[int]:
        """Return the tasks of the last membership that no resize by blocks has held since: if they are held, then by
        somebody else."""
        members = self.store.membership(job_id)
        trained = {*members.report.blocks} if members is not None else {0}
        held: set[int] = set()
        # A hold without a resize is stored with the newest resize by blocks, and may be younger than a requeue's end.
        for one in (one for one in self.store.resizes_of(job_id).values() if one.mechanism == BLOCKS):
            held |= {*one.held}
            if one.state == State.DONE.value:
                held -= {task for task, _ in one.added}
            held |= {*one.preempted}
        return trained - held

    def _long_ago(self, job_id: int, tasks: Collection[SlurmJob]) -> bool:
        """Tell whether the last block ended more than `SURE_S` ago, by Slurm's clock or the companion's."""
        now = self.clock()
        seen = self._seen_over[job_id] = min(now, self._seen_over.get(job_id, now))
        return now - min(seen, max((job.end_time for job in tasks if not job.pending), default=0.0)) > SURE_S

    def _left_alone(self, job_id: int, tasks: Sequence[SlurmJob]) -> MembershipRecord | None:
        """Return the last membership if all its blocks left before the job reported its end, else None. Return None too
        if the job has made no progress since a held task was last released."""
        members = self.store.membership(job_id)
        if members is None or members.report.step <= self._gone_on.get(job_id, -1):
            return None
        ours = self.held.of(job_id)
        last = [job for job in tasks if task_of(job) in members.report.blocks]
        left = bool(last) and all(has_left(job) or (job.pending and task_of(job) in ours) for job in last)
        return members if left and self._last_word(job_id) not in ENDS else None

    def _last_word(self, job_id: int) -> str | None:
        runs = self.store.runs(job_id)
        return runs[-1].end_reason if runs else None

    def _go_on(self, job_id: int, members: MembershipRecord, tasks: Sequence[SlurmJob]) -> None:
        free = [job for job in tasks if job.pending and not job.admin_held]
        if not free:
            return
        first = min(free, key=task_of)
        log.warning("job %d: all its blocks left before it ended; task %s is released to train on", job_id, first.key)
        self.client.release(first.key, start_now=True)
        self._gone_on[job_id] = members.report.step

    def put_back(self, jobs: Iterable[Elastic], moving: Mapping[int, Collection[int]] = NO_TASKS) -> None:
        """Requeue preempted blocks into a hold of the companion, before Slurm forgets them. Raises `Unreachable`.

        Tasks `moving` in an open resize are skipped, and so are jobs without a live block.
        """
        for one in jobs:
            job_id = one.job.job_id
            blocks = one.job.blocks
            taken = [
                task_of(job)
                for job in blocks
                if job.state is JobState.PREEMPTED and not job.completing and task_of(job) not in moving.get(job_id, ())
            ]
            if not taken or one.refusal or not any(map(is_alive, blocks)) or not self.held.take(job_id, taken):
                continue
            for task in taken:
                try:
                    self.client.reuse(Task(job_id, task))
                except Refused as error:
                    log.info("job %d: preempted block %d could not be held for later use: %s", job_id, task, error)

    def end_those_apart(self, jobs: Iterable[tuple[Elastic, JobHistory | None]]) -> None:
        """Order running blocks to end that have not trained with their job's other blocks for `APART_S`. No job in
        `jobs` may have an open resize.

        A restart of slurmctld may have lost its newest state. A block whose end it lost is put back into a hold. If no
        block of the job trains, blocks whose start it lost are put back too.
        """
        now = self.clock()
        before, self._apart = self._apart, {}
        for elastic, history in jobs:
            members = history.membership if history is not None else None
            if members is None or elastic.refusal or not elastic.job.running:
                continue
            staying = train_together(elastic, history)
            apart, all_apart_s = set(), math.inf
            for block in (block for block in elastic.job.running_blocks if task_of(block) not in staying):
                key = (elastic.job.job_id, task_of(block), block.restart)
                since = self._apart[key] = min(now, before.get(key, now))
                # Slurm's clock and the job's may differ much from this one.
                apart_s = now - max(since, block.start_time, members.time)
                all_apart_s = min(all_apart_s, apart_s)
                if staying and apart_s > APART_S and not self._put_back_ended(key[0], block):
                    apart.add(key)
            if not staying and all_apart_s > SURE_S:
                self._put_back_trained(elastic.job, members)
            if not apart - self._told:
                continue
            job = replace(elastic.job, restart=members.term)
            try:
                self.orders.write(job, Order(self.orders.next_number(job), job.restart, blocks=tuple(staying)))
                self._told |= apart
            except OrderError as error:
                log.warning("job %d: blocks that train apart could not be ordered to end: %s", job.job_id, error)

    def _put_back_trained(self, job: WholeJob, members: MembershipRecord) -> None:
        """Requeue ended blocks whose last start slurmctld lost: their restart count is one less than in the last
        membership."""
        trained = dict(zip(members.report.blocks, members.report.restarts, strict=False))
        for task, block in job.tasks.items():
            if not has_left(block) or block.completing or block.restart + 1 != trained.get(task):
                continue
            log.warning("block %d_%d: Slurm lost its start; it starts again", job.job_id, task)
            try:
                self.client.reuse(Task(job.job_id, task))
            except Refused as error:
                log.error("block %d_%d: it could not be put back: %s", job.job_id, task, error)

    def _put_back_ended(self, job_id: int, block: SlurmJob) -> bool:
        """Requeue a block into a hold if slurmctld lost its end and still shows it as running; return whether it did.
        Such a block has no process, which Slurm may notice only after half an hour."""
        task = Task(job_id, task_of(block))
        if not (forgot_end(self.client, self.store, job_id, block) and self.held.take(job_id, [task.task])):
            return False
        log.warning("block %s: Slurm lost its end; it is put back into a hold", task)
        try:
            self.client.requeue_hold(task)
        except Refused as error:
            log.error("block %s: it could not be put back: %s", task, error)
        return True

    def forget(self, alive: Collection[int]) -> None:
        """Forget all jobs except those in `alive`."""
        self._gone_on = {id_: step for id_, step in self._gone_on.items() if id_ in alive}
        self._told = {key for key in self._told if key[0] in alive}


EXITS = ("RequeueExit", "RequeueExitHold")
NOT_SET = {"", "(null)", "n/a"}
ASK_S = 300.0
"""Seconds between two readings of Slurm's preemption settings."""


def comes_back(job: SlurmJob, config: Mapping[str, str], partition: Partition | None, modes: Mapping[str, str]) -> bool:
    """Tell whether Slurm requeues this job when it preempts it, and its owner could then release a hold on it. `modes`
    is the PreemptMode of each QOS."""
    if not job.requeue or not {setting(config, name) for name in EXITS} <= NOT_SET:
        return False
    by_qos = setting(config, "PreemptType").endswith("qos")
    mode = modes.get(job.qos, "") if by_qos else partition.preempt_mode if partition is not None else ""
    own = mode.lower() not in ("", "off", "cluster", "disabled")
    return "requeue" in (mode.lower() if own else setting(config, "PreemptMode"))


@dataclass
class GuestHolds:
    """Holds on running guests, at sites where Slurm requeues preempted jobs. Without a hold, Slurm would start a
    preempted guest again on GPUs that other jobs need.

    Each hold is stored before Slurm is asked for it (`HeldTasks.take`), and an owner may release it.

    Guests are not held if `RequeueExit` is set, since Slurm would turn the hold into one that owners cannot release.
    Guests of a job without a base block are not held either, since then all its blocks might be held.
    """

    client: SlurmClient
    held: HeldTasks
    clock: Callable[[], float]
    _site: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Slurm's settings, and the PreemptMode of each QOS."""
    _asked: float = -math.inf
    _put: dict[tuple[Task, int], float] = field(default_factory=dict)
    """Time at which each guest was held, by task and restart count; no guest is held twice."""

    def keep(
        self,
        arrays: Mapping[int, Iterable[SlurmJob]],
        jobs: Mapping[int, Elastic],
        partitions: Mapping[str, Partition],
        moving: Mapping[int, Collection[int]] = NO_TASKS,
    ) -> None:
        """Hold the running guests of `jobs`. Release all other running blocks of `arrays` that the companion holds.
        Raises `Unreachable`.

        `arrays` has the tasks of each array by its id. Tasks `moving` in an open resize are skipped.
        """
        for job_id, tasks in arrays.items():
            wanted = self._wanted(jobs[job_id], partitions) if job_id in jobs else ()
            still = moving.get(job_id, ())
            for job in (job for job in tasks if job.running and task_of(job) not in still):
                task = Task(job_id, task_of(job))
                if task.task in wanted:
                    self._hold(task, job)
                elif job.held and not job.admin_held and task.task in self.held.of(job_id):
                    self._lift(task, job)

    def _wanted(self, one: Elastic, partitions: Mapping[str, Partition]) -> set[int]:
        guests = [job for job in one.job.running_blocks if one.job.is_guest(job)]
        wanted = one.takes_guests and not one.refusal and 0 < len(guests) < len(one.job.running_blocks)
        if not (wanted and self._read_site()):
            return set()
        config, modes = self._site
        return {task_of(job) for job in guests if comes_back(job, config, partitions.get(job.partition), modes)}

    def _read_site(self) -> bool:
        if not 0.0 <= self.clock() - self._asked < ASK_S:
            try:
                self._site = self.client.config(), self.client.quotas(()).modes
            except Refused as error:
                log.warning("Slurm's preemption settings could not be read: %s", error)
                return False
            self._asked = self.clock()
        return True

    def _hold(self, task: Task, job: SlurmJob) -> None:
        put = self._put.get((task, job.restart))
        if job.held or (put is not None and not forgotten(self.client, put)):
            return
        if not self.held.take(task.array, [task.task]):
            return
        try:
            self.client.hold(task)
            self._put[task, job.restart] = self.clock()
        except Refused as error:
            log.info("block %s: it is not held for its next start: %s", task, error)

    def _lift(self, task: Task, job: SlurmJob) -> None:
        self._put.pop((task, job.restart), None)
        try:
            self.client.release(task, start_now=False)
        except Refused as error:
            log.error("block %s: its hold could not be lifted: %s", task, error)

    def forget(self, alive: Collection[int]) -> None:
        """Forget all jobs except those in `alive`."""
        self._put = {key: time for key, time in self._put.items() if key[0].array in alive}
