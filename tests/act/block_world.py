"""A resize by blocks on the simulated cluster: the real machine, store and reports, and ways to interrupt it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ones_db import JobRecord, ResizeRecord
from ones_db.shape import Shape
from ones_wrapper.protocol import ORDERS, Order, decode_order, encode
from slurm_ones.act.arrays import GuestHolds, Leftovers, arrays_of, moving_tasks, waiting_arrays
from slurm_ones.act.deferrals import Deferrals
from slurm_ones.act.holds import HeldTasks
from slurm_ones.act.orders import OrderWriter
from slurm_ones.act.resize import ResizeMachine
from slurm_ones.act.transitions import State
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import WholeJob, guests_of
from slurm_ones.jobs.observer import DrainReports, Observer
from slurm_ones.rules.blocks import BLOCKS, task_of
from slurm_ones.simulate.slurm.nodes import PartitionSpec, PreemptMode, Qos, SlurmConf
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Hot, Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World as Simulated
from slurm_ones.slurm.model import Queue, SlurmJob, Task
from tests.act.world import Interrupted, ResizeStore, open_copy

WORK = Workload("one", (Submission("job", 0.0, "nlp", 1, 16, elastic=True),), {"nlp": build(KINDS["bert-glue"])})
CONF = SlurmConf(qos=(Qos(), Qos("guest")))
QUIET = ClusterSettings(speed_noise=0.0, gradient_noise=0.0)
RESIZE = {"blocks_wait_s": 40, "start_timeout_s": 60, "drain_timeout_s": 60, "dwell_s": 0}
CHANGES = {"hold", "hold_waiting", "throttle", "reuse", "reshape", "release", "cancel_waiting", "signal", "defer"}

LOOK_AGAIN_S = 5.0
"""Between two looks where nothing happened at the last: a second at most, in truth, and five times as many looks."""

_databases = itertools.count(1)


class BlockWorld(Interrupted):
    """One job of blocks, and one change of it."""

    def __init__(
        self,
        empty: Path,
        folder: Path,
        before: Mapping[int, Shape] | None = None,
        *,
        waits: bool = False,
        quick: bool = False,
        guests: Queue | None = None,
        conf: SlurmConf = CONF,
        preempt: PreemptMode = "",
    ) -> None:
        """`empty` is a database without rows. `before` are the blocks that train besides task 0 (1 GPU) when the change
        begins; a job that `waits` has none: its nodes are drained. If it is `quick`, a block takes 5 s until it is
        ready, and is waited for 12 s, rather than 30 and 40. `guests` is the queue of its partition's guests, whose
        partition, scavenge, is preempted by `preempt`."""
        super().__init__()
        self.folder = folder / f"world-{next(_databases)}"
        self.folder.mkdir()
        hot = Hot(launch_s=5.0 if quick else 30.0)
        elsewhere = PartitionSpec("elsewhere", ("e1",), 4, default=False)
        (own,) = ClusterSpec(4, 4).partitions()
        beside = [elsewhere, replace(own, name="scavenge", default=False, preempt=preempt)]
        self.simulated = Simulated(WORK, ClusterSpec(4, 4), self.folder, QUIET, mechanism=hot, others=beside, conf=conf)
        (self.job_id,) = self.simulated.job_ids.values()
        training = self.simulated.trainings[self.job_id]
        assert training.hot is not None
        self.training = training
        self.cluster, self.clock = self.simulated.cluster, self.simulated.timeline
        self.wait_s = 1.0
        """Until the companion looks again."""
        self.client = _Client(self)
        self.store = open_copy(empty, self.folder)
        self.stop_file = self.folder / "stop"
        resize = RESIZE | ({"blocks_wait_s": 12} if quick else {})
        given: dict[str, Any] = {"stop_file": str(self.stop_file), "resize": resize}
        if guests is not None:
            given["guests"] = {own.name: dict(zip(("partition", "qos", "account"), guests, strict=False))}
        self.settings = Settings.model_validate(given)
        self.machine = self.companion()
        self.prepared = bool(before)
        if waits:
            self.drain_all()
        self.simulated.pass_time(60)  # until it trains
        self.store.record_jobs([JobRecord(self.job_id, "job", "me", self.clock(), Shape(1, 1), elastic=True)])
        if before:
            self._train_with(before)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.store.close()

    def pass_time(self, seconds: float) -> None:
        self.simulated.pass_time(seconds)

    def companion(self) -> ResizeMachine:
        observer = Observer(self.client, self.store, self.settings)
        orders = OrderWriter(self.client, None, self.clock)
        self.held = HeldTasks(self.store)
        self.leftovers = Leftovers(self.client, self.store, self.held, orders, self.clock)
        self.guest_holds = GuestHolds(self.client, self.held, self.clock)
        self.observer = observer
        return ResizeMachine(
            client=self.client,
            store=ResizeStore(self),
            reports=DrainReports(observer, self.store, self.clock),
            settings=self.settings.resize,
            orders=orders,
            clock=self.clock,
            wanted=observer.may_resize,
            deferrals=Deferrals(self.client, self.store, 900.0, self.clock),
            guests=guests_of(self.settings),
        )

    def _train_with(self, blocks: Mapping[int, Shape]) -> None:
        client = self.simulated.client
        client.hold_waiting(self.job_id)
        client.throttle(self.job_id, 0)
        text = encode(Order(1, 0, blocks=tuple(sorted({0, *blocks}))))
        path = self.training.files.directory / ORDERS
        path.write_bytes(text)
        for task, shape in blocks.items():
            client.reshape(Task(self.job_id, task), shape)
            client.release(Task(self.job_id, task))
        self.simulated.pass_time(40)
        assert {*self.training.members} == {0, *blocks}

    def begin(
        self, added: Mapping[int, Shape], dropped: tuple[int, ...] = (), guests: tuple[int, ...] = ()
    ) -> ResizeRecord:
        """Write the change down, as the actor does."""
        # Those that train already were prepared by a change before this one, as it were.
        tasks = self.simulated.client.tasks(self.job_id)
        waiting = [task_of(job) for job in tasks if job.pending and (self.prepared or not job.held)]
        self.before = {*self.training.members}
        self.wanted = (self.before | {*added}) - {*dropped}
        self.resize = self.store.begin_resize(
            ResizeRecord(
                job_id=self.job_id,
                restart=self.training.term,
                old_shape=Shape(1, 1),
                old_batch=16,
                new_shape=Shape(1, 2),
                new_batch=32,
                state=State.PREPARING.value,
                started=self.clock(),
                order_number=round(self.clock() * 1000),
                deadline=self.clock() + self.settings.resize.drain_timeout_s,
                mechanism=BLOCKS,
                added=tuple(added.items()),
                dropped=dropped,
                guests=guests,
                held=tuple(waiting),
            )
        )
        return self.resize

    def begin_waiting(self, shape: Shape, added: Mapping[int, Shape] | None = None) -> ResizeRecord:
        """Write down that the job, which waits, is to have this shape, as the actor does; if it is of separate blocks,
        the one `added`."""
        self.resize = self.store.begin_resize(
            ResizeRecord(
                job_id=self.job_id,
                restart=-1,
                old_shape=Shape(1, 1),
                old_batch=None,
                new_shape=shape,
                new_batch=None,
                state=State.HOLDING.value,
                started=self.clock(),
                order_number=round(self.clock() * 1000),
                deadline=self.clock() + self.settings.resize.drain_timeout_s,
                added=tuple((added or {}).items()),
            )
        )
        self.machine.new.add(self.resize.id)
        return self.resize

    @property
    def tasks(self) -> dict[int, SlurmJob]:
        return {task_of(job): job for job in self.simulated.client.tasks(self.job_id)}

    @property
    def order(self) -> Order:
        return decode_order((self.training.files.directory / ORDERS).read_bytes())

    def drain_all(self) -> None:
        """No node takes a job from now on."""
        for name in list(self.cluster.nodes.names()):
            self.cluster.drain(name)

    def resume_all(self) -> None:
        """Every node takes jobs again."""
        for name in list(self.cluster.nodes.names()):
            self.cluster.resume(name)

    def preempt(self, *tasks: int) -> None:
        """Slurm takes these blocks, by cancelling them, and their processes end."""
        for task in tasks:
            self.cluster.preempt(Task(self.job_id, task), "cancel", grace_s=30)
        self.simulated.pass_time(40)

    def finish(self) -> ResizeRecord:
        """Go on until the resize is closed, then a little further."""
        for _ in range(400):
            if self.resize.ended is not None:
                self.tick(20)
                return self.resize
            before = len(self.events)
            self.tick(self.wait_s)
            self.wait_s = 1.0 if len(self.events) > before else LOOK_AGAIN_S
        raise AssertionError(f"stuck in {self.resize.stage}")

    def change(
        self, added: Mapping[int, Shape], dropped: tuple[int, ...] = (), guests: tuple[int, ...] = ()
    ) -> ResizeRecord:
        """Begin and finish."""
        self.begin(added, dropped, guests)
        return self.finish()

    def tidy(self) -> None:
        """What the companion does of jobs of blocks at a tick."""
        seen = self.observer.observe()
        arrays = arrays_of(seen.snapshot.jobs.values())
        blocks = {id_: list(one.job.blocks) for id_, one in seen.elastic.items()}
        for id_, tasks in (blocks | waiting_arrays(arrays)).items():
            self.held.look(id_, tasks)
        self.leftovers.cancel_waiting(waiting_arrays(arrays))
        moving = moving_tasks(self.store.open_resizes())
        self.leftovers.put_back(seen.elastic.values(), moving)
        kept = {} if self.stop_file.exists() else seen.elastic
        self.guest_holds.keep(arrays, kept, seen.snapshot.partitions, moving)
        known = self.store.histories(list(seen.elastic))
        self.leftovers.end_those_apart([(one, known[id_]) for id_, one in seen.elastic.items()])

    def machine_held(self) -> frozenset[int]:
        """Tasks that count as held by us, to a companion that starts now."""
        return HeldTasks(self.store).of(self.job_id)

    def check(self) -> None:
        """What must hold of every change that was closed, however it went."""
        assert self.store.open_resizes() == []
        for task, job in self.tasks.items():
            if job.running:
                assert task in self.training.members, f"{task} runs apart after {self.states}"
            elif job.pending:
                assert job.held, f"{task} waits and may start after {self.states}"
        if self.resize.state == State.DONE:
            assert {*self.training.members} == self.wanted, self.states
        elif self.resize.state == State.ROLLED_BACK:
            assert {*self.training.members} == self.before, self.states
        released = [number for number, event in enumerate(self.events) if event == "before release"]
        ordered = [number for number, event in enumerate(self.events) if event == "after order"]
        assert not released or (ordered and ordered[0] < released[0]), "released before it was ordered"

    def _order(self, job: WholeJob, order: Order, spool: Path | None) -> None:
        assert order.blocks, "an order to a job of blocks names its blocks"
        super()._order(job, order, spool)


class _Client:
    """The simulated client, between two events a change."""

    def __init__(self, world: BlockWorld) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._world.simulated.client, name)
        if name not in CHANGES:
            return call

        def changing(*args: Any, **named: Any) -> Any:
            self._world._event(f"before {name}")
            answer = call(*args, **named)
            self._world._event(f"after {name}")
            return answer

        return changing
