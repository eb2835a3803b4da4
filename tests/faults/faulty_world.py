"""The cluster and the jobs of a plan, and all that others than the companion do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PreemptMode
from slurm_ones.simulate.slurm.simulated_job import Program, Request, SimulatedJob
from slurm_ones.simulate.slurm.timeline import EPOCH, ClusterSettings
from slurm_ones.simulate.spec import asked_shape
from slurm_ones.simulate.training.application import Application, Requeue, Submission
from slurm_ones.simulate.training.training import Phase, Training
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World
from slurm_ones.slurm.client import UnknownJob
from slurm_ones.slurm.model import JobKey, JobState, SlurmJob, Task
from tests.faults.files import FaultyFiles
from tests.faults.harm import GuestTally, is_guest, is_ours
from tests.faults.injector import FaultInjector
from tests.faults.kinds import BY_PREEMPTION, TO_BLOCKS, FaultKind
from tests.faults.plan import EXIT, GUEST, LICENSE, OTHER, FaultPlan, JobPlan, applications
from tests.faults.safety import opts_in
from tests.simulate.harness import Sleep

KILLED = 137
HELD_S = (30.0, 1800.0)
OFTEN = 10
"""So often one block is preempted."""


class BlockFaults:
    """Strikes at the blocks of jobs, and remembers which of their ends are nobody's fault."""

    def __init__(self, cluster: Callable[[], SimulatedCluster], injector: FaultInjector, tally: GuestTally) -> None:
        self._find = cluster
        self._tally = tally
        self._injector = injector
        self.allowed_ends: dict[int, set[JobState]] = {}
        """Of records of tasks that somebody else ended, or let end."""
        self.busy: Callable[[int], bool] = lambda job_id: False
        """Whether a resize of the job is under way: a hold of one of its tasks then passes for the companion's own."""
        self.held: set[Task] = set()
        """Tasks that their owner holds."""
        self.held_in_change: set[Task] = set()
        """The same where a resize was under way: nobody can tell whose hold it is, and the owner gives it back too."""

        self.let_go: set[Task] = set()
        """Tasks that their owner let go, out of whoever's hold, and that no tick has seen out of it since."""

    @property
    def _cluster(self) -> SimulatedCluster:
        return self._find()

    def watch(self, training: Training, job_id: int) -> None:
        """Let blocks be lost in the middle of a switch."""

        def switching(pause_s: float) -> None:
            rng = self._injector.random
            if self._injector.injects(FaultKind.LOST_IN_SWITCH):
                task = rng.choice(sorted(training.blocks))
                self._cluster.timeline.after(rng.uniform(0.0, pause_s), lambda: self._kill(job_id, training, task))

        training.on_switch = switching

    def strike(self, kind: FaultKind, job_id: int, training: Training) -> bool:
        """Whether it could be done to that job."""
        rng = self._injector.random
        members, blocks = training.members, sorted(training.blocks)
        new = [task for task in blocks if task not in members]
        match kind:
            case FaultKind.NEWCOMER_DIED:
                return bool(new) and self._kill(job_id, training, rng.choice(new))
            case FaultKind.LEADER_DIED:
                return bool(members) and self._kill(job_id, training, members[0])
            case FaultKind.BLOCK_DIED:
                return bool(blocks) and self._kill(job_id, training, rng.choice(blocks))
            case FaultKind.LOST_IN_SWITCH:
                return training.phase is Phase.SWITCHING and self._kill(job_id, training, rng.choice(blocks))
            case FaultKind.STORE_OF_JOB_LOST:
                if not members:
                    return False
                training.lose_store()
            case FaultKind.BLOCK_REQUEUED:
                if not blocks or not self._record(job_id, blocks[0]).request.requeue:
                    return False
                self._cluster.preempt(Task(job_id, rng.choice(blocks)))
            case FaultKind.BLOCK_CANCELLED:
                if not blocks:
                    return False
                task = rng.choice(blocks)
                self._allow(job_id, task, JobState.CANCELLED)
                self._cluster.cancel(Task(job_id, task))
            case FaultKind.BLOCK_HELD | FaultKind.BLOCK_RELEASED:
                return self._hold_or_release(kind, job_id)
        return True

    def preempt(self, kind: FaultKind, job_id: int, training: Training) -> bool:
        """Whether blocks of that job could be preempted: guests if there are any, else all but one."""
        rng, members = self._injector.random, training.members
        count = 2 if kind is FaultKind.PREEMPTED_TWO else 1
        blocks = sorted(training.blocks)
        guests = [task for task in blocks if is_guest(self._record(job_id, task))]
        may = guests or (blocks if len(blocks) > count else [])
        match kind:
            case FaultKind.PREEMPTED_LEADER:
                may = [task for task in may if members[:1] == (task,)]
            case FaultKind.PREEMPTED_NEWCOMER:
                may = [task for task in may if task not in members]
            case FaultKind.PREEMPTED_LEAVING:
                may = may if training.phase is Phase.SWITCHING else []
        if len(may) < count:
            return False
        mode = rng.choice(MODES)
        for task in rng.sample(may, count):
            match kind:
                case FaultKind.PREEMPTED_OFTEN:
                    self._preempt_often(Task(job_id, task), OFTEN)
                case FaultKind.PREEMPTED_EXIT:
                    if rng.random() < 0.5:  # its owner; Slurm takes the hold over, and an operator gives it back
                        self._hold(Task(job_id, task))
                    self._allow(job_id, task, JobState.FAILED)
                    record = self._record(job_id, task)
                    self._cluster.kill(Task(job_id, task), EXIT)
                    self._tally.exited(record)
                case _:
                    self._preempt(Task(job_id, task), kind, mode)
        return True

    def _preempt(self, task: Task, kind: FaultKind, mode: PreemptMode) -> None:
        record = self._record(*task)
        if kind is FaultKind.PREEMPTED_ENDED:
            mode, record.request = "requeue", replace(record.request, requeue=False)
        self._allow(*task, JobState.PREEMPTED)
        self._cluster.preempt(task, mode, killed=kind is FaultKind.PREEMPTED_KILLED)
        if kind is FaultKind.PREEMPTED_AGAIN:
            self._cluster.requeue_completing(task)

    def _preempt_often(self, task: Task, times: int) -> None:
        """Preempt it whenever it runs."""
        try:
            running = self._record(*task).running
        except UnknownJob:
            return
        if running:
            self._cluster.preempt(task)
            times -= 1
        if times and self._injector.enabled:
            wait_s = self._injector.random.uniform(10.0, 60.0)
            self._cluster.timeline.after(wait_s, lambda: self._preempt_often(task, times))

    def _hold_or_release(self, kind: FaultKind, job_id: int) -> bool:
        rng = self._injector.random
        # A hold of what stands in ours already is seen by nobody, and changes nothing.
        wanted = "" if kind is FaultKind.BLOCK_HELD else "user"
        waiting = [job for job in self._cluster.records.known_of(job_id) if job.pending and job.held_by == wanted]
        tasks = [task for job in waiting for task in job.array_tasks]
        if not tasks:
            return False
        task = Task(job_id, rng.choice(tasks))
        if kind is FaultKind.BLOCK_HELD:
            self._hold(task)
            self._cluster.timeline.after(rng.uniform(*HELD_S), lambda: self.release(task))
        else:
            self.note_let_go([task])
            self._cluster.release(task)
        return True

    def _hold(self, task: Task) -> None:
        # What was let go and is held again between two looks looks as if it had never been let go.
        (self.held_in_change if self.busy(task.array) or task in self.let_go else self.held).add(task)
        self._cluster.hold(task)

    def note_let_go(self, tasks: Iterable[Task]) -> None:
        """Their owner lets them go, out of whoever's hold."""
        tasks = {*tasks}
        self.let_go |= tasks
        self.held -= tasks
        self.held_in_change -= tasks

    def note_looked_at(self, jobs: Iterable[SlurmJob]) -> None:
        """A tick saw these tasks, and no change of their jobs was under way."""
        out = (job for job in jobs if not (job.completing or (job.pending and job.held)))
        self.let_go -= {Task(job.array_id, task) for job in out for task in job.array_tasks}

    def release(self, task: Task) -> None:
        """Its owner lets it go again; it was theirs to hold."""
        if task in self.held | self.held_in_change:
            self.held.discard(task)
            self.held_in_change.discard(task)
            if any(task.task in job.array_tasks for job in self._cluster.records.known_of(task.array)):
                self._cluster.release(task)

    def _kill(self, job_id: int, training: Training, task: int) -> bool:
        if task not in training.blocks:
            return False
        self._allow(job_id, task, JobState.FAILED)
        self._cluster.kill(Task(job_id, task), KILLED)
        return True

    def _allow(self, job_id: int, task: int, state: JobState) -> None:
        self.allowed_ends.setdefault(self._record(job_id, task).job_id, set()).add(state)

    def _record(self, job_id: int, task: int) -> SimulatedJob:
        return self._cluster.records.get(Task(job_id, task))


MODES: tuple[PreemptMode, ...] = ("cancel", "cancel", "requeue")
"""What becomes of a preempted block."""
_COMMENTS = {"off": "ones: gpus=1-8 resize=off", "bad": "ones: gpus=many", "rigid": ""}
_BLOCKS = " array=blocks"
SETTINGS = ClusterSettings(report_s=30.0, first_report_s=20.0, checkpoint_s=300.0)


class FaultyWorld(World):
    """Everything that the companion does not see."""

    def __init__(self, plan: FaultPlan, directory: Path, injector: FaultInjector) -> None:
        self._plans = {job.name: job for job in plan.jobs}
        self._injector = injector
        self._others = plan.others
        self._interference = plan.interference
        self.stop_file = directory / "stop"
        self.held: set[int] = set()
        """Jobs that their owner or an operator holds."""
        self.allowed_ends: dict[int, JobState] = {}
        """Jobs that somebody else ended, and how."""
        self.observed_elastic: set[int] = set()
        """Jobs that the last tick looked after."""
        self.observed_at = 0.0
        """When that was."""
        self.opted_in: set[int] = set()
        """Jobs that opted in at some time."""
        self.reshaped_by_owner: set[int] = set()
        """Jobs whose shape their owner changed."""
        self.commented: set[int] = set()
        """Jobs whose comment named slurm-ones at some time."""
        self.begin_set: set[int] = set()
        """Jobs whose earliest start their owner set."""
        self.others_jobs: set[int] = set()
        """Jobs that are no trainings."""
        self.cancelled: set[int] = set()
        """Jobs of blocks that their owner cancelled as a whole."""
        workload = Workload("faults", tuple(_submission(job) for job in plan.jobs), applications())
        self.tally = GuestTally()
        self.block_faults = BlockFaults(lambda: self.cluster, injector, self.tally)
        super().__init__(
            workload,
            plan.spec,
            directory,
            SETTINGS,
            mechanism=Requeue(plan.resize_s),
            seed=plan.seed,
            others=plan.beside,
            conf=plan.conf,
            faults=self.tally,
        )

    # -- how jobs come in ----------------------------------------------------------------------------------------

    def _request(self, submission: Submission, app: Application) -> Request:
        plan = self._plans[submission.name]
        request = super()._request(submission, app)
        return replace(
            request,
            comment=self._comment(plan, _COMMENTS.get(plan.opt_in, request.comment)),
            time_limit_s=plan.limit_s,
            begin=EPOCH + plan.begin_s if plan.begin_s else 0.0,
            hold=plan.hold,
            requeue=plan.requeue,
        )

    @staticmethod
    def _comment(plan: JobPlan, text: str) -> str:
        return text + _BLOCKS if plan.blocks and _BLOCKS not in text and text.startswith("ones:") else text

    def _of_blocks(self, submission: Submission) -> bool:
        return self._plans[submission.name].blocks

    def _files(self, submission: Submission, job_id: int) -> FaultyFiles:
        flaws = self._plans[submission.name].flaws
        return FaultyFiles(self.directory, job_id, self._injector, flaws, self.timeline)

    def _submit(self, submission: Submission) -> None:
        super()._submit(submission)
        plan, job_id = self._plans[submission.name], self.job_ids[submission.name]
        self._read(job_id)
        if plan.hold:
            self.held.add(job_id)
        if plan.begin_s:
            self.begin_set.add(job_id)
        training = self.trainings[job_id]
        if training.hot is not None:
            self.block_faults.watch(training, job_id)

    def _read(self, job_id: int) -> None:
        comment = self.cluster.jobs[job_id].request.comment
        if opts_in(comment):
            self.opted_in.add(job_id)
        if comment.startswith("ones:"):
            self.commented.add(job_id)

    def lies(self, job_id: int) -> bool:
        """Whether it reports checkpoints that it never made."""
        files = self.trainings[job_id].files
        return isinstance(files, FaultyFiles) and files.lies

    def submit_rigid(self) -> None:
        """A rigid job wants GPUs now."""
        rng = self._injector.random
        name = f"rigid-{len(self._plans)}"
        gpus = rng.randint(1, self.spec.gpus)
        plan = JobPlan(name, self.seconds, "cnn", gpus, rng.uniform(0.03, 0.3), "rigid")
        self._plans[name] = plan
        self._upcoming.append(self.seconds)
        self._submit(_submission(plan))

    def submit_other(self) -> None:
        """A rigid job of another partition over the same nodes, of CPUs alone, or one that wants a license or node."""
        rng, spec = self._injector.random, self.spec
        gpus, per_node = rng.randint(0, spec.gpus_per_node), spec.cpus_per_gpu * spec.gpus_per_node
        guest, by_partition = rng.random() < 0.15, GUEST in self.cluster.nodes.partitions
        wanted, nodes = rng.random(), rng.randint(1, spec.nodes)
        request = Request(
            nodes=nodes,
            gpus_per_node=gpus,
            cpus_per_node=rng.randint(1, per_node) if not gpus else spec.cpus_per_gpu * gpus,
            partition=GUEST if guest and by_partition else rng.choice((OTHER, OTHER, "")),
            licenses=((LICENSE, 1),) if rng.random() < 0.2 else (),
            node_names=tuple(rng.sample(spec.names, 1)) if wanted < 0.15 else (),
            excluded=tuple(rng.sample(spec.names, 1)) if 0.15 < wanted < 0.25 and nodes < spec.nodes else (),
            exclusive=0.25 < wanted < 0.35,
            qos=GUEST if guest and not by_partition else "",
            time_limit_s=rng.choice((0.0, 3600.0)),
            user="somebody",
        )
        seconds = rng.uniform(20.0, 200.0)

        def program(job_id: JobKey) -> Program:
            return Sleep(lambda code: self.cluster.exited(job_id, code), self.timeline, seconds, 1.0)

        self.others_jobs.add(self.cluster.submit(request, program))

    # -- what others do ------------------------------------------------------------------------------------------

    def interfere(self, job_id: int | None) -> None:
        """Perhaps somebody acts at this very moment."""
        if self._interference and self._injector.random.random() < self._interference:
            self.apply(self._injector.random.choice(self._others), job_id)

    def apply(self, kind: FaultKind, job_id: int | None = None) -> bool:
        """It happens, to that job or to one at random; False if it cannot."""
        rng = self._injector.random
        alive = [job for id_, job in self.cluster.jobs.items() if not (job.ended or id_ in self.others_jobs)]
        if kind is FaultKind.RIGID:
            self.submit_rigid()
        elif kind is FaultKind.OTHER_JOB:
            self.submit_other()
        elif kind is FaultKind.STOP_FILE:
            if self.stop_file.exists():
                return False
            self.stop_file.touch()
            self.timeline.after(rng.uniform(30.0, 600.0), lambda: self.stop_file.unlink(missing_ok=True))
        elif kind in (FaultKind.NODE_FAILED, FaultKind.NODE_DRAINED):
            self._node(kind, rng.choice(self.cluster.nodes.names()), rng.uniform(60.0, 1200.0))
        elif kind in (*TO_BLOCKS, *BY_PREEMPTION):
            if not self._to_blocks(kind, job_id):
                return False
        elif alive:
            job = self.cluster.jobs[job_id] if job_id is not None else rng.choice(alive)
            if job.ended or not self._to_job(kind, job):
                return False
            job_id = job.main_id
        else:
            return False
        self._injector.count(kind, job_id or "")
        return True

    def guests_run(self) -> bool:
        """Tell whether a job of blocks has a guest that runs."""
        return any(job.running and is_ours(job) for job in self.cluster.records.known.values())

    def _to_blocks(self, kind: FaultKind, job_id: int | None) -> bool:
        found = [
            (id_, training)
            for id_, training in self.trainings.items()
            if training.hot is not None and not training.finished and job_id in (None, id_)
        ]
        strike = self.block_faults.preempt if kind in BY_PREEMPTION else self.block_faults.strike
        return bool(found) and strike(kind, *self._injector.random.choice(found))

    def _node(self, kind: FaultKind, name: str, seconds: float) -> None:
        if kind is FaultKind.NODE_DRAINED:
            self.cluster.drain(name)
        else:
            running = [job_id for job_id in self.cluster.nodes[name].held if self.cluster.jobs[job_id].running]
            self.allowed_ends.update((id_, JobState.NODE_FAIL) for id_ in running)
            self.cluster.fail(name)
        self.timeline.after(seconds, lambda: self.cluster.resume(name))

    def _to_job(self, kind: FaultKind, job: SimulatedJob) -> bool:
        """Whether it could be done. `job` may be a record of a job of blocks: owners name the array, Slurm the task."""
        cluster, job_id, key = self.cluster, job.main_id, job.to_model().key
        rng, of_blocks = self._injector.random, job.array is not None
        words = _BLOCKS if of_blocks else ""
        match kind:
            case FaultKind.CANCELLED:
                if of_blocks:
                    self.cancelled.add(job_id)
                else:
                    self.allowed_ends[job_id] = JobState.CANCELLED
                cluster.cancel(job_id)
            case FaultKind.FAILED:
                if not job.running:
                    return False
                self.allowed_ends[job.job_id] = JobState.FAILED
                cluster.kill(key, 1)
            case FaultKind.RELEASED:
                if not job.held_by:
                    return False
                # Who held all of it lets all of it go.
                released = job_id if job_id in self.held else key
                if of_blocks:
                    self._note_let_go(job_id, released)
                cluster.release(released)
                self.held.discard(job_id)
            case FaultKind.HELD | FaultKind.ADMIN_HOLD:
                self.held.add(job_id)
                cluster.hold(job_id, "admin" if kind is FaultKind.ADMIN_HOLD else "user")
                self.timeline.after(rng.uniform(30.0, 1800.0), lambda: self._release_again(job_id))
            case FaultKind.REQUEUED | FaultKind.PREEMPTED:
                if not job.running or not job.request.requeue:
                    return False
                cluster.preempt(key)
            case FaultKind.RESHAPED:
                if not job.pending or len(job.array_tasks) > 1:
                    return False
                shape = asked_shape(rng.randint(1, self.spec.gpus), self.spec)
                job.forbidden_shapes -= {shape}
                self.reshaped_by_owner.add(job_id)
                cluster.reshape(key, shape)
            case FaultKind.OPTED_OUT:
                cluster.set_comment(job_id, rng.choice(("", "my job")))
            case FaultKind.RESIZE_OFF:
                cluster.set_comment(job_id, f"ones: gpus=1-8 resize=off{words}")
            case FaultKind.BAD_COMMENT:
                cluster.set_comment(job_id, f"ones: gpus=0-8 colour=red{words}")
            case FaultKind.BEGIN:
                if not job.pending or of_blocks:
                    return False
                self.begin_set.add(job_id)
                cluster.set_begin(job_id, self.timeline.now + rng.uniform(10.0, 900.0))
        self._read(job_id)
        return True

    def _note_let_go(self, job_id: int, released: JobKey) -> None:
        # Slurm's own hold as well: it may have taken the owner's over, as a block ended with an exit code.
        held = [one for one in self.cluster.records.known_of(job_id) if one.pending and one.held_by]
        tasks = {Task(job_id, task) for one in held for task in one.array_tasks}
        self.block_faults.note_let_go(tasks & {released} if isinstance(released, Task) else tasks)

    def _release_again(self, job_id: int) -> None:
        known = self.cluster.records.known_of(job_id) or job_id in self.cluster.snapshot().jobs
        if job_id in self.held and known:
            self.cluster.release(job_id)
        self.held.discard(job_id)

    def block_just_ended(self, seconds: float) -> bool:
        """Whether a job's last block ended so short a time ago: what waits of it may still have to be cancelled."""
        for job_id, training in self.trainings.items():
            if training.hot is not None and not training.blocks:
                records = self.cluster.records.of(job_id)
                if max(job.end_time for job in records) > self.timeline.now - seconds:
                    return True
        return False

    def guests_alone(self) -> bool:
        """Whether a job trains on guests only: its next base block is still to come."""
        for job_id, training in self.trainings.items():
            blocks = [self.cluster.records.get(Task(job_id, task)) for task in training.blocks if training.hot]
            if blocks and all(map(is_guest, blocks)):
                return True
        return False

    def recover(self) -> None:
        """Everybody gives back what they took: nodes, holds, the stop file."""
        for name in self.cluster.nodes.names():
            self.cluster.resume(name)
        for job_id in sorted(self.held):
            self._release_again(job_id)
        for task in sorted(self.block_faults.held | self.block_faults.held_in_change):
            self.block_faults.release(task)
        self.stop_file.unlink(missing_ok=True)


def _submission(job: JobPlan) -> Submission:
    app = applications()[job.application]
    return Submission(
        job.name, job.time, job.application, job.gpus, app.base_batch, elastic=job.opt_in != "rigid", epochs=job.epochs
    )
