"""Slurm in virtual time: the queue, the nodes, and each job from submission to end.

Where Slurm's documentation is silent, this module behaves as real Slurms were seen to behave. Tests compare it with
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.policy.ledger import NOTHING, Resources
from slurm_ones.simulate.slurm.nodes import Nodes, PartitionSpec, PreemptMode, SlurmConf
from slurm_ones.simulate.slurm.scheduler import UNLIMITED_S, Association, QueuedJob, RunningJob, SchedulingPass
from slurm_ones.simulate.slurm.simulated_job import Idle, JobRecords, Program, Request, SimulatedJob, TaskArray
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.slurm.client import NotResizable, Refused, UnknownJob
from slurm_ones.slurm.fields import LICENCES
from slurm_ones.slurm.model import JobKey, JobState, Queue, Quota, Quotas, SlurmJob, Snapshot, Task

THROTTLED = "JobArrayTaskLimit"


class Faults:
    """Hooks by which tests inject faults into a simulated Slurm. This base class injects none.

    Subclasses may raise errors, act on the cluster, or carry out a requested change differently or not at all. They
    draw random numbers from a seed.
    """

    def begin(self, cluster: SimulatedCluster) -> None:
        """Called once, after the cluster is set up and before any job is submitted."""

    def started(self, job: SimulatedJob) -> None:
        """Called at the start of each run of a job."""

    def preempted(self, job: SimulatedJob, mode: PreemptMode, winner: int) -> None:
        """Called before a job is preempted. `winner` is the id of the job that needs its resources, or 0."""

    def ask(self, what: str) -> None:
        """Called before a client's query is answered. `what` names the query. If this raises an error, the client gets
        it in place of the answer."""

    def change(self, what: str, job_id: JobKey, make: Callable[[], None]) -> None:
        """Carry out a change of a job that a client requested, by calling `make`. `what` names the kind of change."""
        make()

    def reshape(self, job: SlurmJob, shape: Shape, make: Callable[[bool], None]) -> None:
        """Carry out a reshape that a client requested. `make(False)` does so; `make(True)` changes only the number of
        nodes."""
        self.change("update", job.key, lambda: make(False))


class SimulatedCluster:
    """A simulated Slurm cluster. Job ids start at 1. Permissions are checked by `SimulatedClient`, not here."""

    def __init__(
        self,
        partitions: Sequence[PartitionSpec],
        settings: ClusterSettings,
        timeline: Timeline,
        faults: Faults | None = None,
        conf: SlurmConf = SlurmConf(),
    ) -> None:
        self.settings = settings
        self.conf = conf
        self.timeline = timeline
        self.nodes = Nodes(partitions)
        self.records = JobRecords(lambda job: job.events.append(timeline.at(job.begin, lambda: self._wait(job, 0.0))))
        self.jobs = self.records.jobs
        """Records of all jobs ever submitted, by job id. An array has one or more records."""
        self.faults = faults or Faults()
        self._known = self.records.known
        self._due = False
        self._backfill_due = False
        self.faults.begin(self)

    # -- what is seen --------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return Slurm's present view of jobs, nodes, partitions, reservations and licences."""
        jobs = {job_id: job.to_model() for job_id, job in self._known.items()}
        partitions = {name: spec.to_model() for name, spec in self.nodes.partitions.items()}
        nodes = self.nodes.to_model(self._reserved(self.timeline.now))
        return Snapshot(self.timeline.now, jobs, nodes, partitions, self.conf.reservations, self._free_licenses())

    def _free_licenses(self) -> dict[str, int]:
        asking = [job for job in self._known.values() if job.licenses] if self.conf.licenses else []
        used = Counter(dict.fromkeys(self.conf.licenses, 0))
        for job in asking:
            used.update(dict(job.licenses) if job.gpus else {})
        return {name: most - used[name] for name, most in self.conf.licenses.items()} if asking else {}

    def quotas(self, users: Collection[str]) -> Quotas:
        """Return the GPU limits of all accounts, of all QOS, and of these users in each QOS."""
        used: Counter[tuple[str, str, str]] = Counter()
        for job in self._known.values():
            for whose in ((job.qos, "", ""), (job.qos, "", job.request.user), ("", job.account, "")):
                used[whose] += sum(job.gpus.values())
        most = {("", account, ""): gpus for account, gpus in self.conf.account_gpus.items()}
        for qos in self.conf.qos:
            most |= {(qos.name, "", ""): qos.gpus} | {(qos.name, "", user): qos.user_gpus for user in users}
        found = tuple(Quota("gres/gpu", gpus, used[whose], *whose) for whose, gpus in most.items() if gpus)
        modes = {qos.name: qos.mode for qos in self.conf.qos}
        return Quotas(found, modes=modes, usage_factors={qos.name: qos.usage_factor for qos in self.conf.qos})

    @property
    def live(self) -> int:
        """Number of jobs that have not ended; an array counts as one."""
        return len(self.records.live_ids())

    @property
    def empty(self) -> bool:
        """True if Slurm has no record of any job, not even of an ended one."""
        return not self._known

    # -- what users and operators do -----------------------------------------------------------------------------

    def submit(self, request: Request, program: Callable[[JobKey], Program]) -> int:
        """Submit a job and return its id. `program` returns the program of the job, or of each task of an array.

        Raises `NotResizable` for an unknown partition or QOS.
        """
        default = next(spec.name for spec in self.nodes.partitions.values() if spec.default)
        partitions = tuple((request.partition or default).split(","))
        self._check_known(partitions, request.qos)
        now, job_id = self.timeline.now, len(self.jobs) + 1
        array = TaskArray(job_id, program, request.throttle) if request.array_tasks else None
        job = SimulatedJob(
            job_id=job_id,
            request=request,
            program=Idle() if array is not None else program(job_id),
            partitions=partitions,
            qos=self.conf.qos_of(request.qos).name,
            account=request.account,
            licenses=request.licenses,
            nodes=request.nodes,
            max_nodes=max(request.max_nodes, request.nodes),
            gpus_per_node=request.gpus_per_node,
            submit_time=now,
            held_by="user" if request.hold else "",
            limit_s=request.time_limit_s or self.settings.time_limit_s,
            array=array,
            array_tasks=request.array_tasks,
        )
        self.records.add(job)
        self._wait(job, request.begin)
        return job_id

    def _check_known(self, partitions: Iterable[str], qos: str) -> None:
        for partition in partitions:
            if partition not in self.nodes.partitions:
                raise NotResizable(f"invalid partition specified: {partition}")
        if qos and qos not in {one.name for one in self.conf.qos}:
            raise NotResizable("Invalid qos specification")

    def cancel(self, job_id: JobKey) -> None:
        """Cancel a job or task, as `scancel` does."""
        for job in self.records.named(job_id):
            if not job.ended:
                self._end(job, JobState.CANCELLED, 0)

    def hold(self, job_id: JobKey, by: str = "user") -> None:
        """Hold a job: it cannot start. A running job continues, and cannot start again after a requeue."""
        for job in self.records.named(job_id):
            if not job.ended and job.held_by not in ("admin", "exit"):
                job.held_by = by

    def release(self, job_id: JobKey) -> None:
        """Release a held job, and put it at the end of the queue."""
        for job in self.records.named(job_id):
            if job.held_by:
                job.held_by, job.requeue_held = "", False
                if job.pending:
                    self._wait(job, job.begin)

    def set_begin(self, job_id: JobKey, time: float) -> None:
        """Set the earliest start of a pending job. Raises `NotResizable` for any other job."""
        for job in self.records.waiting(job_id):
            if time > self.timeline.now or job.begin:
                self._wait(job, time)

    def reshape(self, job_id: JobKey, shape: Shape, *, nodes_alone: bool = False) -> None:
        """Change nodes and GPUs per node of a pending job.

        With `nodes_alone`, or if the job has no GPUs per node, only the number of nodes changes.
        """
        for job in self.records.waiting(job_id):
            job.nodes = job.max_nodes = shape.nodes
            if job.gpus_per_node and not nodes_alone:
                job.gpus_per_node = shape.gpus_per_node
        self._schedule_soon()

    def forbid_shape(self, job_id: JobKey, shape: Shape) -> None:
        """Let Slurm accept this shape for the job, and then never start it at this shape. The scheduler holds it with
        the reason BadConstraints."""
        for job in self.records.named(job_id):
            job.forbidden_shapes |= {shape}

    def set_comment(self, job_id: JobKey, text: str) -> None:
        """Change a job's comment. Slurm allows this to the job's owner at any time."""
        for job in self.records.named(job_id):
            job.request = replace(job.request, comment=text)

    def move(self, job_id: JobKey, queue: Queue) -> None:
        """Move a pending job, or the waiting tasks of an array, to another partition, QOS, account, time limit or
        licences."""
        self._check_known([queue.partition] if queue.partition else [], queue.qos)
        for job in self.records.waiting(job_id):
            job.partitions = (queue.partition,) if queue.partition else job.partitions
            job.qos, job.account = queue.qos or job.qos, queue.account or job.account
            job.limit_s = 0.0 if math.isinf(queue.time_limit_s) else queue.time_limit_s or job.limit_s
            job.licenses = LICENCES.text(queue.licenses.removeprefix(NO_LICENSES)) if queue.licenses else job.licenses
        self._schedule_soon()

    def preempt(
        self,
        job_id: JobKey,
        mode: PreemptMode = "requeue",
        grace_s: float = math.inf,
        *,
        killed: bool = False,
        winner: int = 0,
    ) -> None:
        """Preempt a running job. `winner` is the id of the job that needs its resources, or 0.

        With mode "requeue" the job waits again, without a hold. In other modes, or if it may not be requeued, it ends.
        Its processes end within `grace_s` seconds. With `killed`, its program is not notified.
        """
        for job in self.records.named(job_id):
            if job.running:
                job.preempted_at = self.timeline.now
                self.faults.preempted(job, mode, winner)
                if mode == "requeue" and job.request.requeue:
                    self._requeue(job, hold=False, killed=killed, most_s=grace_s)
                else:
                    seconds = min(job.program.stop(killed=killed), grace_s)
                    self._end(job, JobState.PREEMPTED, 0, seconds=seconds)

    def requeue(self, job_id: JobKey, *, hold: bool) -> None:
        """Requeue a running job under its id. With `hold`, the job is held, also if it is waiting already. An ended job
        does not change."""
        for job in self.records.named(job_id):
            if job.running:
                self._requeue(job, hold=hold)
            elif job.pending and hold and not job.held_by:
                job.held_by, job.requeue_held = "user", True

    def requeue_completing(self, job_id: JobKey) -> None:
        """Requeue an ended job whose last processes still exist."""
        for job in self.records.named(job_id):
            if job.ended and job.ending:
                self._wait_again(job)

    def kill(self, job_id: JobKey, code: int) -> None:
        """End a running job with this exit code, as if a signal had killed its processes."""
        for job in self.records.named(job_id):
            if job.running:
                self._exit(job, code, job.program.stop(killed=True))

    def place(self, job_id: int, gpus: Mapping[str, int]) -> None:
        """Give a job these GPUs at once, without the scheduler. A pending job starts on them; a running job continues
        on them.

        Raises ValueError if they are not free.
        """
        job, now = self.jobs[job_id], self.timeline.now
        if job.pending:
            self._start(job, gpus)
        if job.gpus == gpus:
            return
        job.allocations = job.held(now)
        self.nodes.give_back(job_id, job.gpus)
        self.nodes.take(job_id, {name: Resources(count) for name, count in gpus.items()})
        job.gpus, job.since = dict(gpus), now

    # -- arrays --------------------------------------------------------------------------------------------------

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        """Hold an array's waiting tasks: all of them, or only those in `tasks`. Running tasks are not held."""
        for job in self.records.known_of(array_id):
            if not job.pending or job.held_by:
                continue
            named = [task for task in job.array_tasks if tasks is None or task in tasks]
            whole = len(named) == len(job.array_tasks)
            for record in [job] if whole else [self.records.set_apart(job, task) for task in named]:
                record.held_by = "user"

    def reuse(self, task: Task) -> None:
        """Requeue an ended task, with a hold. A waiting task does not change.

        Raises `Refused` for a task that runs, was cancelled, may not be requeued, or still has processes.
        """
        job = self.records.get(task)
        if job.pending and not job.ending:
            return
        if not job.ended or job.ending or job.state is JobState.CANCELLED:
            shown = job.state.value + ("+COMPLETING" if job.ending else "")
            raise Refused(f"task {task} is {shown}: only one that has ended by itself waits again")
        if not job.request.requeue:
            raise Refused(f"task {task}: Requested operation is presently disabled")
        job.held_by, job.requeue_held = "user", True
        self._wait_again(job)

    def _wait_again(self, job: SimulatedJob) -> None:
        if job.forgotten is not None:
            job.forgotten.cancel()
        job.state = JobState.PENDING
        self._renew(job)

    def throttle(self, array_id: int, most: int) -> None:
        """Set the number of an array's tasks that may run at the same time; 0 for no limit."""
        array = self.records.arrays.get(array_id)
        if array is None or not self.records.known_of(array_id):
            raise UnknownJob(f"job {array_id}: Invalid job id specified")
        array.throttle = most
        for record in array.records:
            record.array = array  # what Slurm last showed of it is stale
        self._schedule_soon()

    def cancel_waiting(self, array_id: int) -> None:
        """Cancel an array's waiting tasks, as `scancel --state=PENDING` does."""
        for job in self.records.known_of(array_id):
            if job.pending:
                self._end(job, JobState.CANCELLED, 0)

    # -- what happens to nodes -----------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """Drain a node: no job starts on it any more, and its running jobs continue."""
        self.nodes[name].drained = True

    def resume(self, name: str) -> None:
        """Let jobs start again on a node that was drained or has failed."""
        node = self.nodes[name]
        node.drained = node.down = False
        self._schedule_soon()

    def fail(self, name: str) -> None:
        """Let a node fail. Its jobs are requeued, or end if they may not be requeued."""
        self.nodes[name].down = True
        for job_id in list(self.nodes[name].held):
            job = self.jobs[job_id]
            if not job.running:
                continue
            if job.request.requeue:
                self._requeue(job, hold=False, killed=True)
            else:
                self._end(job, JobState.NODE_FAIL, 1, killed=True)

    # -- the life of a job ---------------------------------------------------------------------------------------

    def exited(self, job_id: JobKey, code: int) -> None:
        """End a job whose program has exited with this code."""
        job = self.records.get(job_id) if isinstance(job_id, Task) else self.jobs[job_id]
        if job.running:
            self._exit(job, code, self.settings.ending_s)

    def _exit(self, job: SimulatedJob, code: int, seconds: float) -> None:
        """End a run with this exit code. Its processes end `seconds` later."""
        if not (self.conf.requeues(code) and job.request.requeue):
            self._end(job, JobState.FAILED if code else JobState.COMPLETED, code, seconds=seconds)
            return
        # Held while it ran, it waits for its exit code, and only an operator may release it.
        job.held_by = "exit" if job.held_by == "user" else job.held_by
        self._wait_after(job, seconds)

    def _wait(self, job: SimulatedJob, begin: float) -> None:
        """Put a job at the end of the queue at time `begin`. Until then it cannot start."""
        now = self.timeline.now
        job.begin = begin if begin > now else 0.0
        job.waits_since = max(begin, now)
        job.reason = "BeginTime" if begin > now else "None"
        job.cancel_events()
        if begin > now:
            job.events.append(self.timeline.at(begin, lambda: self._wait(job, 0.0)))
        self._schedule_soon()

    def _start(
        self, job: SimulatedJob, gpus: Mapping[str, int], partition: str = "", need: Resources = NOTHING
    ) -> None:
        now = self.timeline.now
        if len(job.array_tasks) > 1:
            job = self.records.set_apart(job, job.array_tasks[0])
        job.cancel_events()
        job.gpus, job.resources, job.since, job.node_list = dict(gpus), need, now, tuple(gpus)
        job.partitions = (partition,) if partition else job.partitions
        self.nodes.take(job.job_id, job.holdings)
        job.state, job.start_time, job.considered, job.begin = JobState.RUNNING, now, now, 0.0
        job.nodes = job.max_nodes = len(gpus)
        if job.limit_s:
            job.events.append(self.timeline.after(job.limit_s, lambda: self._end(job, JobState.TIMEOUT, 0)))
        self.faults.started(job)
        self.timeline.changed = True
        job.program.start(job.restart, job.gpus)

    def _requeue(self, job: SimulatedJob, *, hold: bool, killed: bool = False, most_s: float = math.inf) -> None:
        if hold and not job.held_by:
            job.held_by, job.requeue_held = "user", True
        self._wait_after(job, min(job.program.stop(killed=killed), most_s))

    def _wait_after(self, job: SimulatedJob, seconds: float) -> None:
        job.cancel_events()
        job.state = JobState.PENDING
        self._end_processes(job, seconds)
        self._renew(job)

    def _renew(self, job: SimulatedJob) -> None:
        now = self.timeline.now
        job.restart += 1
        job.submit_time = now
        job.start_time, job.end_time, job.preempted_at, job.node_list = 0.0, 0.0, 0.0, ()
        self._wait(job, now + self.settings.requeue_delay_s)

    def _end(
        self, job: SimulatedJob, state: JobState, code: int, *, seconds: float | None = None, killed: bool = False
    ) -> None:
        job.cancel_events()
        was_running = job.running
        if was_running and seconds is None:
            seconds = job.program.stop(killed=killed)
        job.state, job.exit_code, job.end_time, job.held_by = state, code, self.timeline.now, ""
        if was_running:
            self._end_processes(job, seconds or 0.0)
        self.timeline.changed = True
        job.forgotten = self.timeline.after(self.settings.min_job_age_s, lambda: self._forget(job.job_id))

    def _forget(self, job_id: int) -> None:
        del self._known[job_id]

    def _end_processes(self, job: SimulatedJob, seconds: float) -> None:
        """Let a job's processes end after `seconds`. Until then the job holds its GPUs."""
        job.ending = True

        def gone() -> None:
            self.nodes.give_back(job.job_id, job.gpus)
            job.allocations = job.held(self.timeline.now)
            job.gpus, job.ending = {}, False
            self.timeline.changed = True
            self._schedule_soon()

        self.timeline.after(seconds, gone)

    # -- the scheduler -------------------------------------------------------------------------------------------

    def _schedule_soon(self) -> None:
        if not self._due:
            self._due = True
            self.timeline.after(self.settings.schedule_s, self._schedule)

    def _need(self, job: SimulatedJob, partition: str) -> Resources:
        """Return the resources that a job needs on each node of a partition.

        If the partition or the job takes whole nodes, they are all resources of a node. A total number of GPUs is
        divided by the number of nodes and rounded up.
        """
        spec, asked = self.nodes.partitions[partition], job.request
        if spec.whole_nodes or asked.exclusive:
            return spec.capacity
        gpus = job.gpus_per_node or math.ceil(asked.gpus_total / job.nodes)
        cpus = asked.cpus_on(gpus) if spec.cpus_per_node else 0
        return Resources(gpus, cpus, asked.memory_mb if spec.memory_mb else 0)

    def _entry(self, job: SimulatedJob, partition: str, most: int) -> QueuedJob:
        named, excluded = frozenset(job.request.node_names), frozenset(job.request.excluded)
        only = self.nodes.only(partition)
        if self.conf.reservations or named or excluded:
            seconds = job.limit_s or UNLIMITED_S
            only = frozenset(self.nodes.partitions[partition].nodes) - excluded
            only -= self._reserved(self.timeline.now, seconds, job.request.reservation)
            only -= {name for name in named if not self.nodes.usable(name)}
        return QueuedJob(
            job.job_id,
            partition,
            job.nodes,
            max(job.max_nodes, job.nodes),
            self._need(job, partition),
            job.limit_s,
            only,
            named,
            self._association(job),
            most,
        )

    def _association(self, job: SimulatedJob) -> Association:
        return Association(job.request.user, job.account, job.qos, job.licenses)

    def _reserved(self, now: float, seconds: float = 0.0, own: str = "") -> frozenset[str]:
        """Return the nodes that are reserved now or within `seconds`. The job's `own` reservations (names joined by
        commas) do not count."""
        found: set[str] = set()
        for one in self.conf.reservations:
            if one.start_time <= now + seconds and now < one.end_time and one.name not in own.split(","):
                found.update(one.node_names)
        return frozenset(found)

    def queue(self) -> list[QueuedJob]:
        """Return the jobs that may start, in the scheduler's order. A job that names several partitions has an entry
        for each."""
        jobs = [job for job in self._known.values() if job.startable and not job.never_starts]
        jobs.sort(key=lambda job: (-job.request.priority, job.waits_since, job.main_id, job.array_tasks))
        rooms = {array_id: array.room for array_id, array in self.records.arrays.items()} if self.records.arrays else {}
        queue: list[QueuedJob] = []
        for job in jobs:
            count = 1
            if job.array is not None:
                count = max(min(len(job.array_tasks), rooms[job.main_id]), 0)
                rooms[job.main_id] -= count
                if not count:
                    job.reason = THROTTLED
            for partition in job.partitions if count else ():
                queue += [self._entry(job, partition, count)] * count
        if len(self.nodes.partitions) > 1 or len(self.conf.qos) > 1:
            tiers = {name: spec.tier for name, spec in self.nodes.partitions.items()}
            worth = {qos.name: qos.priority for qos in self.conf.qos}
            queue.sort(key=lambda entry: (-tiers[entry.partition], -worth[entry.of.qos]))
        return queue

    def running(self) -> list[RunningJob]:
        """Return the jobs that hold GPUs, for the scheduler. Jobs whose processes are just ending are included."""
        return [
            RunningJob(
                job.start_time + (job.limit_s or UNLIMITED_S),
                job.holdings,
                job.job_id,
                job.partition,
                self._association(job),
                job.start_time,
                not job.running,
            )
            for job in self._known.values()
            if job.gpus
        ]

    def _pass(self) -> SchedulingPass:
        return SchedulingPass(self.nodes, self.conf, self.running(), self.timeline.now)

    def _carry_out(self, made: SchedulingPass) -> None:
        for entry, nodes in made.chosen:
            self._start(self.jobs[entry.job_id], dict.fromkeys(nodes, entry.need.gpus), entry.partition, entry.need)
        for job_id, winner in made.victims.items():
            self._preempt(self.jobs[job_id], winner)

    def _preempt(self, job: SimulatedJob, winner: int) -> None:
        qos, spec = self.conf.qos_of(job.qos), self.nodes.partitions[job.partition]
        mode, grace_s = (qos.mode, qos.grace_s) if qos.mode else (spec.preempt, spec.grace_s)
        self.preempt(job.to_model().key, mode, grace_s + self.conf.kill_wait_s, winner=winner)

    def _schedule(self) -> None:
        """Run a round of Slurm's main scheduler."""
        self._due = False
        for job in self._known.values():
            if job.forbidden_shapes and job.startable and job.never_starts:
                job.reason, job.held_by = "BadConstraints", "slurm"
        queue = self.queue()
        if not queue:
            return
        made = self._pass()
        made.main(queue)
        self._carry_out(made)
        self._show_throttled(entry.job_id for entry, _ in made.chosen)
        for job_id, reason in made.reasons.items():
            self.jobs[job_id].reason, self.jobs[job_id].considered = reason, self.timeline.now
        if made.crowded and not self._backfill_due:
            self._backfill_due = True
            every = self.settings.backfill_s
            self.timeline.at((self.timeline.now // every + 1) * every, self._backfill)

    def _show_throttled(self, job_ids: Iterable[int]) -> None:
        """Give the reason JobArrayTaskLimit to waiting tasks of these jobs' arrays, if the array is at its throttle."""
        for array in (self.jobs[job_id].array for job_id in job_ids):
            if array is not None and array.room <= 0:
                for record in array.records:
                    if record.startable:
                        record.reason = THROTTLED

    def _backfill(self) -> None:
        """Run a round of Slurm's backfill scheduler."""
        self._backfill_due = False
        made = self._pass()
        made.backfill(self.queue())
        self._carry_out(made)
        self._schedule_soon()
