"""The door to Slurm, with everything that can go wrong at it."""

from __future__ import annotations

from collections.abc import Callable

from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.slurm.client import NotResizable, Refused, Unreachable
from slurm_ones.slurm.model import Job, Shape, Snapshot
from tests.faults.chance import READS, Chance
from tests.faults.kinds import Kind
from tests.faults.watch import Watch

DOWN_S = (30.0, 900.0)
"""How long a controller is down that is restarted."""

_REFUSED = {
    "requeuehold": Kind.REQUEUE_REFUSED,
    "release": Kind.RELEASE_REFUSED,
    "uhold": Kind.HOLD_REFUSED,
    "StartTime": Kind.DEFER_REFUSED,
}


class Controller:
    """Whether slurmctld answers: the same for all companions."""

    def __init__(self, chance: Chance, clock: Callable[[], float]) -> None:
        self._chance = chance
        self._clock = clock
        self.down_until = 0.0

    @property
    def down(self) -> bool:
        return self._clock() < self.down_until

    def reach(self, what: str, share: float) -> None:
        """Raise `Unreachable` where it is down, goes down now, or the question is lost."""
        if self._chance.strikes(Kind.DOWN, share):
            self.down_until = self._clock() + self._chance.random.uniform(*DOWN_S)
        if self.down:
            raise Unreachable(f"{what}: Unable to contact slurm controller (connect failure)")
        if self._chance.strikes(Kind.TIMEOUT, share):
            raise Unreachable(f"{what}: Socket timed out on send/recv operation")


class FaultyClient(SimulatedClient):
    """One companion's client."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        controller: Controller,
        chance: Chance,
        watch: Watch,
        clock: Callable[[], float],
        *,
        user: str,
    ) -> None:
        """`clock` is that of the companion's host."""
        super().__init__(cluster, user=user)
        self._clock = clock
        self._controller = controller
        self._chance = chance
        self._watch = watch

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        for job in seen.jobs.values():
            self._watch.looked(job)
        return seen

    def job(self, job_id: int) -> Job:
        seen = super().job(job_id)
        self._watch.looked(seen)
        return seen

    def requeue_hold(self, job_id: int) -> None:
        self._watch.requeues(job_id)
        super().requeue_hold(job_id)

    def hold(self, job_id: int) -> None:
        self._watch.holds(job_id)
        super().hold(job_id)

    def reshape(self, job_id: int, shape: Shape) -> None:
        self._watch.reshapes(job_id, shape)
        super().reshape(job_id, shape)

    def defer(self, job_id: int, until: float) -> None:
        # As the real clients: what is past by the host's clock is `now`, which Slurm takes by its own.
        until = until if until > self._clock() else 0.0
        self._watch.defers(job_id, until)
        super().defer(job_id, until)

    def release(self, job_id: int, *, start_now: bool = True) -> None:
        self._watch.releases(job_id)
        super().release(job_id, start_now=start_now)

    # -- inside --------------------------------------------------------------------------------------------------

    def _update_shape(self, job: Job, shape: Shape) -> None:
        job_id = job.job_id
        self._chance.step(f"before update {job_id} {shape}", job_id)
        if self._chance.strikes(Kind.UPDATE_REFUSED):
            raise NotResizable(f"job {job_id}: Requested node configuration is not available")
        in_part = self._chance.strikes(Kind.UPDATE_IN_PART)
        if self._watch.is_new(job_id, shape) and self._chance.strikes(Kind.UPDATE_LATER_BAD):
            self._cluster.forbid_shape(job_id, shape)

        def change() -> None:
            self._cluster.reshape(job_id, shape, nodes_alone=in_part)

        self._change(f"update {job_id} {shape}", change)
        if in_part:
            raise NotResizable(f"job {job_id}: Requested node configuration is not available")

    def _change(self, what: str, change: Callable[[], None]) -> None:
        word, _, rest = what.partition(" ")
        job_id = int(rest.removeprefix("of ").split()[0])
        self._chance.step(f"before {what}", job_id)
        self._controller.reach(what, 1.0)
        kind = _REFUSED.get(word)
        if kind is not None and self._chance.strikes(kind):
            raise Refused(f"{what}: Requested operation is presently disabled")
        if word == "requeuehold":
            self._watch.requeued(job_id)
        change()
        if self._chance.strikes(Kind.TIMEOUT_DONE):
            raise Unreachable(f"{what}: Socket timed out on send/recv operation")
        self._chance.step(f"after {what}", job_id)

    def _check_reachable(self, what: str) -> None:
        self._chance.step(what, reads=True)
        self._controller.reach(what, READS)
