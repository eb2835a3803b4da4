"""What others do to the blocks of a job, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.training.training import Training
from slurm_ones.slurm.model import Job, JobState, Task
from tests.faults.injector import FaultInjector
from tests.faults.kinds import FaultKind

KILLED = 137
HELD_S = (30.0, 1800.0)


class BlockFaults:
    """Strikes at the blocks of jobs, and remembers which of their ends are nobody's fault."""

    def __init__(self, cluster: Callable[[], SimulatedCluster], injector: FaultInjector) -> None:
        self._find = cluster
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
                return training.switching and self._kill(job_id, training, rng.choice(blocks))
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
            # What was let go and is held again between two looks looks as if it had never been let go.
            (self.held_in_change if self.busy(job_id) or task in self.let_go else self.held).add(task)
            self._cluster.hold(task)
            self._cluster.timeline.after(rng.uniform(*HELD_S), lambda: self.release(task))
        else:
            self.note_let_go([task])
            self._cluster.release(task)
        return True

    def note_let_go(self, tasks: Iterable[Task]) -> None:
        """Their owner lets them go, out of whoever's hold."""
        tasks = {*tasks}
        self.let_go |= tasks
        self.held -= tasks
        self.held_in_change -= tasks

    def note_looked_at(self, jobs: Iterable[Job]) -> None:
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
        return self._cluster.get(Task(job_id, task))
