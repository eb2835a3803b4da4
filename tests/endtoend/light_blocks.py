"""A block of a job of blocks that trains nothing, as `light.py` is a job that trains nothing.

Towards the companion it is a job of blocks as `ones_wrapper` has them: it takes orders that name tasks, reports each
membership, and goes on in another term when its leader leaves or dies. Blocks find each other by files in `hot/`, all
on one machine: who lives holds a lock on a file of its own, who leads one more. By files in the job's directory a test
controls it: while there is `UNREADY` no block that comes can join, and once there is `END` the job is over.
LIGHT_PATIENCE_S in the environment is another `PATIENCE_S`, and with LIGHT_GUESTS it sees to guests as `ones-run` does.
With LIGHT_LEAVES it leaves at SIGTERM where LIGHT_AGAIN has it run in a child; with LIGHT_TERMS it says that each
change begins a term.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ones_wrapper.files.job_io import OrderReader, ReportWriter, write_spec
from ones_wrapper.launch import guests
from ones_wrapper.process import block as process_block
from ones_wrapper.process.log import log
from ones_wrapper.protocol import HOT, MANIFEST, Batch, Bye, Checkpoint, Hello, Membership, Order, directory_name
from tests.cluster import linux
from tests.endtoend.light import SPEC, STEPS, Light, again_and_again

UNREADY, END = "unready", "end"
POLL_S = 0.05
READY_S = 0.2
"""How long a block prepares before it can join."""
PATIENCE_S = 3.0
"""From the first block that is ready to a plan without those that are not."""
SAVE_EVERY = 40
"""Steps between checkpoints."""


@dataclass(frozen=True)
class Block:
    """A start of a task. A slurmctld that was killed and forgot it starts another by the same name, perhaps of another
    size."""

    task: int
    restart: int
    nodes: int = field(compare=False)
    gpus: int = field(compare=False)

    @property
    def name(self) -> str:
        return f"block-{self.task}-{self.restart}"


def _taken(path: Path) -> bool:
    """Whether somebody alive holds this lock."""
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _replace(path: Path, value: object) -> None:
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(json.dumps(value))
    half.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


class LightBlock(Light):
    """One block, from its start to its end."""

    def __init__(self, attempt: int = 0) -> None:
        env = os.environ
        super().__init__(attempt)
        if env.get("LIGHT_AGAIN"):
            linux.die_with_parent(signal.SIGKILL)
        self.array = int(env["SLURM_ARRAY_JOB_ID"])
        self.me = Block(int(env["SLURM_ARRAY_TASK_ID"]), self.restart, self.nodes, self.gpus)
        self.hot = self.directory / HOT
        self.hot.mkdir(mode=0o700, exist_ok=True)
        self.lead_lock: Any = None
        self.members: list[Block] = []
        self.generation = self.term = -1
        self.patience_s = float(env.get("LIGHT_PATIENCE_S") or PATIENCE_S)
        self.leaving = False
        self.first_ready = 0.0
        self.seen_at: dict[int, float] = {}
        """When an order was seen first, by its number."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "leaving", True))

    def job_directory(self) -> Path:
        return Path.cwd() / directory_name(int(os.environ["SLURM_ARRAY_JOB_ID"]))

    # -- a block's life ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Join or found; train until it is over, or this block is not wanted any more."""
        if (self.hot / "over").exists():
            self._exit("the job is over")
        # Its end unlocks it, whatever ends it.
        self._alive = (self.hot / f"{self.me.name}.lock").open("a")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        _replace(self.hot / f"{self.me.name}.json", [self.me.task, self.me.restart, self.me.nodes, self.me.gpus])
        ready_at = time.monotonic() + READY_S
        joined = False
        while True:
            if (self.hot / "over").exists():
                self._exit("the job is over")
            plan = _read(self.hot / "plan.json")
            planned = plan is not None and [self.me.task, self.me.restart] in [b[:2] for b in plan["blocks"]]
            if self._led():
                if self.leaving and not joined:
                    self._exit("told to stop before it joined")
                if self.leaving:
                    (self.hot / f"{self.me.name}.leaving").touch()
                if joined and not planned:
                    self._exit(f"left in generation {plan['generation']}")
                joined = joined or planned
                if not joined and not self._wanted():
                    self._exit("not wanted")
                if not joined and time.monotonic() >= ready_at and not (self.directory / UNREADY).exists():
                    (self.hot / f"{self.me.name}.ready").touch()
            elif self._is_next(plan) and self._take_the_lead():
                self._lead(plan if planned else None)
            time.sleep(POLL_S)

    def _exit(self, why: str, code: int = 0) -> None:
        log(f"block {self.me.task}.{self.me.restart}: {why}")
        with suppress(FileNotFoundError):
            (self.hot / f"{self.me.name}.ready").unlink()
        sys.exit(code)

    def _wanted(self) -> bool:
        order = self._inbox(1 << 40).poll()
        return order is not None and order.blocks is not None and self.me.task in order.blocks

    def _inbox(self, term: int) -> OrderReader:
        spool = Path(os.environ["ONES_SPOOL"]) if os.environ.get("ONES_SPOOL") else None
        return OrderReader(self.directory, term, spool, self.array)

    # -- who leads -----------------------------------------------------------------------------------------------

    def _led(self) -> bool:
        return _taken(self.hot / "lead.lock")

    def _is_next(self, plan: dict[str, Any] | None) -> bool:
        """Whether this block is to lead, since nobody does: the one that was named, or the first that lives of those
        that trained; another one where none of them does."""
        living = [block for block in _blocks(plan) if block == self.me or self._lives(block)]
        named = [block for block in living if plan is not None and block.task == plan["leader"]]
        return not living or self.me == (named or living)[0]

    def _take_the_lead(self) -> bool:
        lock = (self.hot / "lead.lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self.lead_lock = lock
        return True

    def _lead(self, plan: dict[str, Any] | None) -> None:
        """Lead a new term: from where the last leader handed it over, else from the last checkpoint."""
        terms = [int(found[1]) for path in self.hot.iterdir() if (found := re.match(r"leader-(\d+)\.json$", path.name))]
        self.term = max(terms, default=-1) + 1
        with (self.hot / f"leader-{self.term}.json").open("x") as file:
            json.dump({"task": self.me.task, "restart": self.me.restart}, file)
        last = _read(self.hot / "plan.json")
        handed = plan is not None and plan["leader"] == self.me.task
        found = sorted(self.checkpoints.glob("step-*"))
        state = plan if handed else json.loads((found[-1] / MANIFEST).read_text()) if found else None
        if state is not None:
            self.step, self.batch = state["step"], state["batch"]
        members = [self.me] + [b for b in _blocks(plan) if b != self.me and self._lives(b)]
        self.inbox, self.outbox = self._inbox(self.term), ReportWriter(self.directory, self.term)
        spec = replace(SPEC, epochs=self.epochs, term=self.term, hot=not os.environ.get("LIGHT_TERMS"))
        write_spec(self.directory, spec)
        # That of a plan which was handed over is still to be entered.
        self.generation = last["generation"] - int(handed) if last else 0
        checkpoint = found[-1].name if found and not handed else ""
        self._hello(members, checkpoint)
        if os.environ.get("LIGHT_GUESTS"):
            LightKeeper(self).start()
        why = "first" if last is None else plan["why"] if handed and plan else "lost"
        self._commit(members, why, plan["order"] if handed and plan else None)
        while True:
            self.one_step()
            self._look_around()

    def _hello(self, members: list[Block], checkpoint: str) -> None:
        nodes, per_node = _shape(members)
        world = sum(b.nodes * b.gpus for b in members)
        epoch, cursor = divmod(self.step, STEPS)
        self.outbox.send(
            Hello(
                *(nodes, per_node, world, self.batch, 1.0),
                *(SPEC.base_batch, SPEC.max_batch, SPEC.dataset, self.epochs),
                *(epoch, cursor * SPEC.base_batch, self.step, checkpoint),
                attempt=self.attempt,
            )
        )

    def save(self) -> str:
        name = super().save()
        epoch, cursor = divmod(self.step, STEPS)
        self.outbox.send(Checkpoint(name, epoch, cursor * SPEC.base_batch, self.step, 1, 0.0))
        return name

    # -- what the leader does at each boundary -------------------------------------------------------------------

    def look(self, first: bool = False) -> None:
        """A batch holds from the moment at which the blocks train that were ordered with it."""
        order = self.inbox.poll()
        if order is not None and order.blocks in (None, tuple(sorted(b.task for b in self.members))):
            self._take_batch(order)

    def _take_batch(self, order: Order) -> None:
        if order.number > self.obeyed and order.batch and order.batch != self.batch:
            self.batch = order.batch
            self.outbox.send(Batch(self.step, self.batch, 1.0, order.number))
        self.obeyed = max(self.obeyed, order.number)

    def _look_around(self) -> None:
        if (self.directory / END).exists():
            self._finish()
        if self.step % SAVE_EVERY == 0:
            self.save()
        order = self.inbox.order
        if order is not None:
            self.seen_at.setdefault(order.number, time.monotonic())
        living = [b for b in self.members if b == self.me or self._lives(b)]
        stay = [b for b in living if not self._leaves(b)]
        if not stay and self.leaving:
            self.save()
            self.outbox.send(Bye("signal", self.step))
            self._exit("told to stop, alone", 143)
        stay = stay or living
        if stay != self.members:
            self._commit(stay, "lost" if living != self.members else "leaving", None)
            return
        if order is None or order.blocks is None:
            return
        tasks = {b.task for b in self.members}
        if tasks == set(order.blocks):
            return
        missing = set(order.blocks) - tasks
        ready = [b for b in self._ready() if b.task in missing]
        if missing - {b.task for b in ready}:
            if ready and not self.first_ready:
                self.first_ready = time.monotonic()
            if not ready or time.monotonic() < self.first_ready + self.patience_s:
                return
        self.first_ready = 0.0
        members = [b for b in self.members if b.task in order.blocks] + ready
        if self.me not in members:
            members.sort(key=lambda b: order.blocks.index(b.task))
        took = time.monotonic() - self.seen_at[order.number] if ready else 0.0
        self.batch = order.batch or self.batch
        self.obeyed = order.number
        self._commit(members, "order", order.number, took)

    def _ready(self) -> list[Block]:
        blocks = []
        for path in sorted(self.hot.glob("block-*.ready")):
            values = _read(path.with_suffix(".json"))
            if values and self._lives(Block(*values)):
                blocks.append(Block(*values))
        return blocks

    def _lives(self, block: Block) -> bool:
        return _taken(self.hot / f"{block.name}.lock")

    def _leaves(self, block: Block) -> bool:
        return self.leaving if block == self.me else (self.hot / f"{block.name}.leaving").exists()

    def _commit(self, members: list[Block], why: str, order: int | None, ready_s: float = 0.0) -> None:
        """These train together from now on. A leader that is not among them hands over, and is gone."""
        moved = self.me not in members
        self.generation += 0 if moved else 1
        plan = {
            "generation": self.generation + int(moved),
            "leader": members[0].task if moved else None,
            "blocks": [[b.task, b.restart, b.nodes, b.gpus] for b in members],
            "step": self.step,
            "batch": self.batch,
            "why": why,
            "order": order,
        }
        _replace(self.hot / "plan.json", plan)
        if moved:
            self.outbox.send(Bye("moved", self.step))
            self._exit("hands the lead over")
        new = any(b not in self.members for b in members) and why == "order"
        self.members = members
        nodes, per_node = _shape(members)
        world = sum(b.nodes * b.gpus for b in members)
        self.step_s = self.step_on(world)
        self.told, self.told_at = self.step, time.monotonic()
        self.outbox.send(
            Membership(
                self.generation,
                tuple(b.task for b in members),
                tuple(b.restart for b in members),
                *(nodes, per_node, world),
                *(self.step, self.batch, 0.01),
                *((1000, 0.005) if new else (0, 0.0)),
                ready_s,
                order,
                why,
            )
        )

    def _finish(self) -> None:
        self.save()
        self.outbox.send(Bye("finished", self.step))
        (self.hot / "over").touch()
        subprocess.run(["scancel", "--state=PENDING", str(self.array)], check=False, timeout=30)
        self._exit("done")


class LightKeeper(guests.GuestKeeper):
    """Of the block that leads, until it ends."""

    def __init__(self, block: LightBlock) -> None:
        guests.LOOK_S = 1.0
        me = block.me
        start = process_block.Block(block.array, me.task, me.restart)
        super().__init__(start, block.directory, None, (me.nodes, me.gpus))

    def _leads(self) -> bool:
        return True


def _blocks(plan: dict[str, Any] | None) -> list[Block]:
    return [Block(*values) for values in plan["blocks"]] if plan else []


def _shape(members: list[Block]) -> tuple[int, int]:
    gpus = {b.gpus for b in members}
    return sum(b.nodes for b in members), gpus.pop() if len(gpus) == 1 else 0


if __name__ == "__main__":
    if os.environ.get("LIGHT_LEAVES"):
        # Of the parent; each child has its own.
        signal.signal(signal.SIGTERM, lambda *_: None)
    again_and_again(LightBlock) if os.environ.get("LIGHT_AGAIN") else LightBlock().run()
