"""The door to Slurm, with everything that can go wrong at it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ones_db.shape import Shape
from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.slurm.client import NotResizable, Refused, Unreachable
from slurm_ones.slurm.model import JobKey, Queue, SlurmJob, Snapshot, Task
from tests.faults.injector import READS, FaultInjector
from tests.faults.kinds import FaultKind
from tests.faults.safety import BlockSafety, SafetyChecker

_REFUSED = {
    "requeuehold": FaultKind.REQUEUE_REFUSED,
    "release": FaultKind.RELEASE_REFUSED,
    "uhold": FaultKind.HOLD_REFUSED,
    "StartTime": FaultKind.DEFER_REFUSED,
    "throttle": FaultKind.THROTTLE_REFUSED,
    "reuse": FaultKind.REUSE_REFUSED,
    "cancel": FaultKind.CANCEL_REFUSED,
}


class Controller:
    """Whether slurmctld answers: the same for all companions."""

    def __init__(self, injector: FaultInjector, clock: Callable[[], float], down_s: tuple[float, float]) -> None:
        """It is down for so long, at least and at most, once it was killed."""
        self._injector = injector
        self._clock = clock
        self._down_s = down_s
        self.down_until = 0.0

    @property
    def down(self) -> bool:
        return self._clock() < self.down_until

    def kill(self) -> None:
        """It is started again later."""
        self.down_until = self._clock() + self._injector.random.uniform(*self._down_s)

    def reach(self, what: str, share: float) -> None:
        """Raise `Unreachable` where it is down, goes down now, or the question is lost."""
        if self._injector.injects(FaultKind.DOWN, share):
            self.kill()
        if self.down:
            raise Unreachable(f"{what}: Unable to contact slurm controller (connect failure)")
        if self._injector.injects(FaultKind.TIMEOUT, share):
            raise Unreachable(f"{what}: Socket timed out on send/recv operation")


class ClientFaults(Faults):
    """What goes wrong at one companion's client."""

    def __init__(
        self, cluster: SimulatedCluster, controller: Controller, injector: FaultInjector, checker: SafetyChecker
    ) -> None:
        self._cluster = cluster
        self._controller = controller
        self._injector = injector
        self._checker = checker

    def ask(self, what: str) -> None:
        self._injector.step(what, reads=True)
        self._controller.reach(what, READS)

    def reshape(self, job: SlurmJob, shape: Shape, make: Callable[[bool], None]) -> None:
        job_id, key = job.array_id or job.job_id, job.key
        self._injector.step(f"before update {key} {shape}", job_id)
        refusal = NotResizable(f"job {key}: Requested node configuration is not available")
        if self._injector.injects(FaultKind.UPDATE_REFUSED):
            raise refusal
        in_part = self._injector.injects(FaultKind.UPDATE_IN_PART)
        if self._checker.is_new(job_id, shape) and self._injector.injects(FaultKind.UPDATE_LATER_BAD):
            self._cluster.forbid_shape(key, shape)
        self.change("update", key, lambda: make(in_part))
        if in_part:
            raise refusal

    def change(self, what: str, job_id: JobKey, make: Callable[[], None]) -> None:
        main_id, named = job_id.array if isinstance(job_id, Task) else job_id, f"{what} {job_id}"
        self._injector.step(f"before {named}", main_id)
        self._controller.reach(named, 1.0)
        kind = _REFUSED.get(what)
        if kind is not None and self._injector.injects(kind):
            raise Refused(f"{named}: Requested operation is presently disabled")
        if what == "requeuehold" and job_id == main_id:
            self._checker.check_requeued(main_id)
        make()
        if self._injector.injects(FaultKind.TIMEOUT_DONE):
            raise Unreachable(f"{named}: Socket timed out on send/recv operation")
        self._injector.step(f"after {named}", main_id)


class FaultyClient(SimulatedClient):
    """One companion's client. What the companion asks is checked before it is carried out."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        controller: Controller,
        injector: FaultInjector,
        checker: SafetyChecker,
        blocks: BlockSafety,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is that of the companion's host."""
        super().__init__(cluster, faults=ClientFaults(cluster, controller, injector, checker))
        self._clock = clock
        self._checker = checker
        self._blocks = blocks

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        for job in seen.jobs.values():
            self._looks_at(job)
        return seen

    def job(self, job_id: JobKey) -> SlurmJob:
        seen = super().job(job_id)
        self._looks_at(seen)
        return seen

    def tasks(self, array_id: int) -> tuple[SlurmJob, ...]:
        seen = super().tasks(array_id)
        for job in seen:
            self._looks_at(job)
        return seen

    def requeue_hold(self, job_id: JobKey) -> None:
        if isinstance(job_id, Task):
            self._blocks.requeue(job_id)
        else:
            self._checker.check_requeue(job_id)
        super().requeue_hold(job_id)

    def hold(self, job_id: JobKey) -> None:
        if isinstance(job_id, Task):
            self._blocks.hold(job_id)
        else:
            self._checker.check_hold(job_id)
        super().hold(job_id)

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        self._checker.check_wanted(array_id, "hold what waits of")
        super().hold_waiting(array_id, tasks)

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None, queue: Queue = Queue()) -> None:
        if isinstance(job_id, Task):
            self._blocks.reshape(job_id, shape)
        else:
            self._checker.check_reshape(job_id, shape)
        super().reshape(job_id, shape, kind=kind, queue=queue)

    def defer(self, job_id: JobKey, until: float) -> None:
        # As the real clients: what is past by the host's clock is `now`, which Slurm takes by its own.
        until = until if until > self._clock() else 0.0
        self._checker.check_defer(job_id.array if isinstance(job_id, Task) else job_id, until)
        super().defer(job_id, until)

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        if isinstance(job_id, Task):
            self._blocks.release(job_id)
        else:
            self._checker.check_release(job_id)
            self._blocks.release_array(job_id)
        super().release(job_id, start_now=start_now)

    def reuse(self, task: Task) -> None:
        self._blocks.reuse(task)
        super().reuse(task)

    def throttle(self, array_id: int, most: int) -> None:
        self._blocks.throttle(array_id)
        super().throttle(array_id, most)

    def cancel_waiting(self, array_id: int) -> None:
        self._blocks.cancel_waiting(array_id)
        super().cancel_waiting(array_id)

    def _looks_at(self, job: SlurmJob) -> None:
        self._checker.observed(job)
        self._blocks.observed(job)
