"""A resize on the simulated Slurm: the real machine over the real store, and ways to interrupt it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import slurm_ones.act.orders as orders_module
from ones_db import JobRecord, MembershipRecord, ResizeRecord, ResizeStepRecord, Store
from ones_db.engine import backend_of
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol import Order, Spec
from ones_wrapper.protocol.optin import parse_comment
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.orders import OrderWriter, write_order
from slurm_ones.act.resize import ResizeMachine
from slurm_ones.act.transitions import Stage, State, first_state
from slurm_ones.config import ResizeSettings
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.rules.blocks import REQUEUE
from slurm_ones.slurm.client import Unreachable
from tests.act.plain_job import PlainJob, PlainReports, Slurm

OLD, NEW = Shape(1, 1), Shape(2, 4)
OLD_BATCH, NEW_BATCH = 32, 128
LEASE_S = 900.0
LONGEST_S = 3000
"""Virtual seconds after which a resize counts as stuck."""

_databases = itertools.count(1)


CLUSTER, ONLY = "simulated", 1
"""The only cluster of the databases, and its key."""


def open_copy(empty: Path, folder: Path) -> Store:
    """A database of its own for a world: `Store.open` without what was looked at when `empty` was made."""
    url = f"sqlite:///{shutil.copy(empty, folder / 'ones.sqlite')}"
    return Store(backend_of(url).engine("write"), CLUSTER, ONLY, False, None)


W = TypeVar("W", bound="Interrupted")


class Crash(BaseException):
    """Stands for SIGKILL: no handler of the code under test catches it."""


class _Halt(BaseException):
    pass


class Interrupted:
    """One resize of one job, and one companion that may crash, or be cut off, between any two events."""

    store: Store
    job_id: int
    machine: ResizeMachine
    resize: ResizeRecord
    """As the store has it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        """Every journal write, order write and client call so far, `before` and `after` it."""
        self.interrupt: Callable[[int, str], None] = lambda number, event: None
        """Called with the number (from 0) and name of each event; may raise."""

    def __enter__(self: W) -> W:
        self._patch = mock.patch.object(orders_module, "write_order", self._order)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def companion(self) -> ResizeMachine:
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        raise NotImplementedError

    @property
    def states(self) -> list[str]:
        """The states that the resize went through."""
        return [step.stage for step in self.store.resize_steps(self.resize.id)]

    def advance(self) -> None:
        """What the companion does once a second; one that is killed is started again, and reads what is stored."""
        if self.resize.ended is not None:
            return
        try:
            self.machine.advance(self.resize)
        except Unreachable:
            pass
        except Crash:
            self.machine = self.companion()
            opened = (resize for resize in self.store.open_resizes() if resize.job_id == self.job_id)
            self.resize = next(opened, self.resize)

    def tick(self, seconds: float = 1.0) -> None:
        """A second passes, and the companion looks."""
        self.pass_time(seconds)
        self.advance()

    def until(self, *states: State | Stage) -> None:
        """Go on until the resize is in one of these states, on the way there if none is said; fails when it ends in
        another or hangs."""
        stages = {str(Stage(one) if isinstance(one, State) else one) for one in states}
        for _ in range(LONGEST_S):
            if self.resize.stage in stages:
                return
            assert self.resize.ended is None, f"{self.states}: {self.resize.outcome!s}"
            self.tick()
        raise AssertionError(f"stuck in {self.resize.stage}")

    def at(self, event: str, act: Callable[[], object]) -> None:
        """Have that happen at each event of this name."""
        self.interrupt = lambda number, name: act() if name == event else None  # type: ignore[func-returns-value]

    def fail(self, faults: Mapping[int, type[BaseException]]) -> None:
        """Be killed or cut off at the events of these numbers. What is written here does not need Slurm."""

        def interrupt(number: int, event: str) -> None:
            error = faults.get(number)
            if error is not None and (error is Crash or event.split()[1] not in ("journal", "order")):
                raise error(event)

        self.interrupt = interrupt

    def halt(self, stage: str) -> None:
        """Go on until that stage is written down, and no further; nothing interrupts what follows."""
        before = self.interrupt

        def stop(number: int, event: str) -> None:
            before(number, event)
            if event == f"after journal {stage}":
                raise _Halt

        self.interrupt = stop
        with suppress(_Halt):
            for _ in range(500):
                if self.resize.stage == stage:
                    break
                self.tick()
        self.interrupt = lambda number, event: None
        assert self.resize.stage == stage, self.states

    def _event(self, event: str) -> None:
        number = len(self.events)
        self.events.append(event)
        self.interrupt(number, event)

    def _order(self, job: WholeJob, order: Order, spool: Path | None) -> None:
        """`write_order`, between two events."""
        self._event("before order")
        write_order(job, order, spool)
        self._event("after order")


class World(Interrupted):
    """A resize by a requeue, or of a job that waits."""

    def __init__(
        self,
        empty: Path,
        folder: Path,
        *,
        running: bool = True,
        parks: bool = False,
        kinds: tuple[str, str] = ("", ""),
        settings: dict[str, Any] | None = None,
        **job: Any,
    ) -> None:
        """`empty` is a database without rows. `parks` takes the job to zero GPUs rather than to NEW; `kinds` are the
        types of GPU that it asks for before and after."""
        super().__init__()
        self.kinds = kinds
        self.slurm = Slurm()
        self.clock = self.slurm.clock
        folder = folder / f"world-{next(_databases)}"
        folder.mkdir()
        self.store = open_copy(empty, folder)
        self.settings = ResizeSettings(**({"max_wait_s": 30, "drain_timeout_s": 40} | (settings or {})))
        self.parks = parks
        self.deferrals = Deferrals(self.slurm, _DeferralStore(self), LEASE_S, self.clock)
        self.stopped = False
        """The stop file is there."""
        self.told: tuple[Spec | None, str] = (None, "")
        """What the job says that it can do, and what is wrong with that."""
        self.job = self.slurm.add(PlainJob(folder / "job", OLD, kind=kinds[0], **job), running=running)
        self.job_id = self.job.job_id
        self.store.record_jobs([JobRecord(self.job_id, "job", "me", self.clock(), OLD)])
        self.machine = self.companion()
        self.slurm.fault = lambda event: None if event in ("job", "snapshot") else self._event(event)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.store.close()

    def companion(self) -> ResizeMachine:
        return ResizeMachine(
            client=self.slurm,
            store=ResizeStore(self),
            reports=PlainReports(self.slurm),
            settings=self.settings,
            orders=OrderWriter(self.slurm, None, self.clock),
            clock=self.clock,
            wanted=self._wanted,
            deferrals=self.deferrals,
            read_spec=lambda job: self.told,
        )

    def pass_time(self, seconds: float) -> None:
        self.slurm.pass_time(seconds)

    def begin(self) -> ResizeRecord:
        """Write the resize down, as the actor does."""
        running = self.job.runs != []
        new = PARKED if self.parks else NEW
        self.resize = self.store.begin_resize(
            ResizeRecord(
                job_id=self.job_id,
                restart=self.job.restart if running else -1,
                old_shape=OLD,
                old_batch=OLD_BATCH,
                new_shape=new,
                new_batch=None if self.parks else NEW_BATCH,
                state=first_state(REQUEUE, running=running).value,
                started=self.clock(),
                order_number=round(self.clock() * 1000),
                deadline=self.clock() + self.settings.drain_timeout_s,
                old_kind=self.kinds[0],
                new_kind=self.kinds[1],
            )
        )
        return self.resize

    @property
    def calls(self) -> list[str]:
        """What was done to the job, in order."""
        return [name for name, _ in self.slurm.calls]

    def finish(self) -> ResizeRecord:
        """Go on until the resize is closed, then let the job go on for a while."""
        for _ in range(LONGEST_S):
            if self.resize.ended is not None:
                for _ in range(10):
                    self.tick(30)
                return self.resize
            self.tick()
        raise AssertionError(f"stuck in {self.resize.stage}, held by {self.job.held_by or 'nobody'}")

    def change(self) -> ResizeRecord:
        """Begin and finish."""
        self.begin()
        return self.finish()

    def _wanted(self, job: WholeJob) -> bool:
        optin = parse_comment(job.first.comment)
        return not self.stopped and optin is not None and optin.resize

    def check(self) -> None:
        """What must hold of every resize that was closed, however it went."""
        job, resize = self.job, self.resize
        assert self.store.open_resizes() == []
        assert self.store.resizes(self.job_id)[-1] == resize
        assert job.held_by != "us", f"left held after {self.states}"
        for restart, waited in job.requeues:
            assert restart == resize.restart
            assert waited, f"requeued without a durable checkpoint: {self.states}"
        assert len(job.requeues) <= 1
        if job.ended:
            return
        assert job.shape in (OLD, NEW)
        assert job.kind == self.kinds[job.shape == NEW], f"asks for {job.kind} after {self.states}"
        if resize.state == State.DONE:
            assert job.shape == (OLD if self.parks else NEW)
        elif resize.state in (State.ROLLED_BACK, State.ABANDONED):
            assert job.shape == OLD
            if job.run is not None and job.run.hello is not None:
                assert job.run.batch == OLD_BATCH, f"trains with the new batch after {self.states}"


class _DeferralStore:
    """The store, between two events a write."""

    def __init__(self, world: World) -> None:
        self._world = world

    def set_deferral(self, job_id: int, until: float | None) -> None:
        self._world._event("before journal deferral")
        self._world.store.set_deferral(job_id, until)
        self._world._event("after journal deferral")

    def deferrals(self) -> dict[int, float]:
        return self._world.store.deferrals()


class ResizeStore:
    """The store of such a world, between two events a write. The world's resize is as the store has it."""

    def __init__(self, world: Interrupted) -> None:
        self._world = world

    def step_resize(self, resize_id: int, state: str, *, back: bool, **other: Any) -> ResizeRecord:
        write = partial(self._world.store.step_resize, resize_id, state, back=back, **other)
        return self._between(str(Stage(State(state), back)), write)

    def end_resize(self, resize_id: int, state: str, *other: Any) -> ResizeRecord:
        return self._between(state, lambda: self._world.store.end_resize(resize_id, state, *other))

    def note_held(self, resize_id: int, tasks: Any) -> ResizeRecord:
        return self._between("held", lambda: self._world.store.note_held(resize_id, tasks))

    def note_let_go(self, resize_id: int, tasks: Any) -> ResizeRecord:
        return self._between("let go", lambda: self._world.store.note_let_go(resize_id, tasks))

    def jobs(self, job_ids: Collection[int]) -> dict[int, JobRecord]:
        return self._world.store.jobs(job_ids)

    def memberships(self, job_id: int) -> list[MembershipRecord]:
        return self._world.store.memberships(job_id)

    def resize_steps(self, resize_id: int) -> list[ResizeStepRecord]:
        return self._world.store.resize_steps(resize_id)

    def _between(self, what: str, write: Callable[[], ResizeRecord]) -> ResizeRecord:
        self._world._event(f"before journal {what}")
        self._world.resize = write()
        self._world._event(f"after journal {what}")
        return self._world.resize
