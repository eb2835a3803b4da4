"""Faults on a real Slurm, from a seed: at any moment and at the worst ones, each judged when all is quiet again.

A seed gives the same faults at the same gates; the processes between are real, and run as they run.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ones_db import StoreError
from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import Job
from tests.cluster import Cluster, ClusterError
from tests.db.server import NoServer, Server
from tests.endtoend.stage import Stage
from tests.endtoend.strikes import KINDS, WHERE
from tests.endtoend.verdict import judge

GATES = (
    *(State.DRAINING, State.REQUEUING, State.RESHAPING, State.RELEASING, State.WAITING, State.STARTING),
    *(State.PARKING, State.HOLDING, State.DONE),
    *("after requeue_hold", "after reshape", "after release", "after hold", "after defer"),
)
BACK = (State.HOLDING_BACK, State.RESHAPING_BACK, State.RELEASING_BACK, State.WAITING_BACK)
"""Gates on the way back, which resizes take when others have taken their GPUs."""
PARTS = ("sqlite own", "postgresql operator pair", "sqlite operator pair", "postgresql own")
"""Database, mode, and whether there are two companions, of which one stands by."""
GATE_S = 6.0
QUIET_S = 120.0
SETTLE_S = 0.25


@dataclass(frozen=True)
class Fault:
    """One fault, and what was found after it."""

    number: int
    part: str
    kind: str
    moment: str
    reached: bool
    """Whether a resize was at that moment."""
    job: int
    jobs: int
    """Submitted so far in this part, those included that are nobody's to touch."""
    seconds: float
    lost: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Run:
    """Fault after fault on one stage."""

    def __init__(
        self, stage: Stage, part: str, log: Path, tell: Callable[[Fault], None], moments: Sequence[str] = ()
    ) -> None:
        """`moments` are the only ones, where some are named."""
        self.stage, self._part, self._log, self._tell, self._moments = stage, part, log, tell, moments
        self._known: set[str] = set()

    def faults(self, kinds: list[str], first: int) -> Iterator[Fault]:
        """Let each of these kinds happen in turn."""
        self.stage.populate()
        self._quiet()
        for number, kind in enumerate(kinds, first):
            fault = self._one(number, kind)
            if fault.lost or fault.held or fault.broken:
                self._keep(number)
            with (self._log / "faults.jsonl").open("a") as file:
                file.write(json.dumps(asdict(fault)) + "\n")
            self._tell(fault)
            yield fault

    def _one(self, number: int, kind: str) -> Fault:
        stage, choice, started = self.stage, self.stage.random, time.monotonic()
        self._amend()
        stage.populate()
        elastic = sorted(stage.elastic())
        moment = str(getattr(gate, "value", gate)) if (gate := self._moment()) else "any"
        job_id, reached = choice.choice(elastic), False
        stage.calm(False)
        crowd = 0
        if gate:
            if gate in BACK and stage.await_gate(State.REQUEUING.value, GATE_S) is not None:
                crowd = stage.crowd(16 - _taken(stage) + 1)
                stage.open_gate()
            at = stage.await_gate(moment, GATE_S)
            reached = at is not None
            job_id = at if at is not None else job_id
        else:
            time.sleep(choice.uniform(0, 2))
        if crowd:
            stage.scontrol("scancel", str(crowd), user="bob")
        if stage.stories[job_id].role == "elastic":
            # What a Slurm that does not answer keeps a person from doing is not done.
            with suppress(ClusterError, subprocess.TimeoutExpired):
                KINDS[kind](stage, job_id)
        stage.open_gate()
        time.sleep(choice.uniform(0, 0.5))
        while stage.heals:
            stage.heals.pop()()
        stage.calm(True)
        trouble = self._quiet()
        verdict = judge(stage)
        fresh = [text for text in (*trouble, *verdict.broken) if text not in self._known]
        lost = [text for text in verdict.lost if text not in self._known]
        held = [text for text in verdict.held if text not in self._known]
        self._known |= {*fresh, *lost, *held}
        seconds = round(time.monotonic() - started, 2)
        count = len(stage.stories)
        return Fault(number, self._part, kind, moment, reached, job_id, count, seconds, lost, held, fresh)

    def _moment(self) -> str | State | None:
        choice = self.stage.random
        if self._moments:
            return choice.choice(self._moments)
        return choice.choice([None, choice.choice(GATES), choice.choice(GATES), choice.choice((*GATES, *BACK))])

    def _amend(self) -> None:
        """What people undo by now."""
        due = [amend for left, amend in self.stage.amends if left <= 1]
        self.stage.amends = [(left - 1, amend) for left, amend in self.stage.amends if left > 1]
        for amend in due:
            amend()

    def _quiet(self) -> list[str]:
        """Wait until no resize is open, the companion has ticked since, and no job is between two states."""
        stage = self.stage
        stage.listen()
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            stirring = self._stirring()
            if not stirring:
                return []
            time.sleep(SETTLE_S)
        return [f"not quiet within {QUIET_S:.0f} s: {stirring}"]

    def _stirring(self) -> str:
        stage = self.stage
        if stage.words().count("elastic jobs run") < 2:
            return "the companion does not tick"
        try:
            with stage.store() as store:
                if resizes := store.open_resizes():
                    return f"resizes: {[(r.job_id, r.state) for r in resizes]}"
                if store.deferrals():
                    return f"deferred: {store.deferrals()}"
                jobs = stage.jobs()
                for job_id in stage.elastic():
                    job = jobs.get(job_id)
                    if job is not None and (why := between(job)):
                        return why
                    record = store.jobs([job_id]).get(job_id)
                    if job is not None and (record is None or record.state != job.state.value):
                        return f"job {job_id} is {job.state.value}, the database has {record and record.state}"
        except (StoreError, ClusterError, subprocess.TimeoutExpired) as error:
            return str(error)
        return ""

    def _keep(self, number: int) -> None:
        """Keep what may explain it."""
        folder, stage = self._log / f"fault-{number}", self.stage
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            shutil.copy(stage.folder / "companion.log", folder)
        for log in stage.cluster.logs.glob("*.log"):
            with suppress(OSError):
                shutil.copy(log, folder)
        for name, command in {"jobs": ["scontrol", "-d", "show", "jobs"], "nodes": ["sinfo", "-N"]}.items():
            with suppress(ClusterError, subprocess.TimeoutExpired):
                (folder / name).write_text(stage.cluster.run(command, user="root").stdout)
        for job_id in stage.elastic():
            with suppress(OSError, shutil.Error):
                shutil.copytree(stage.directory(job_id), folder / f"ones-{job_id}", symlinks=True)
        with suppress(StoreError), stage.store() as store:
            lines = []
            for resize in store.resizes():
                steps = [
                    f"    {step.time:.2f} {step.state} {step.detail.text}" for step in store.resize_steps(resize.id)
                ]
                lines += [str(resize), *steps]
            (folder / "resizes").write_text("\n".join(lines))


def between(job: Job) -> str:
    if job.completing or job.flags & {"CONFIGURING"}:
        return f"job {job.job_id} is {sorted(job.flags)}"
    if job.pending and not job.held and job.reason in ("None", "", "Cleaning", "BeginTime") and _soon(job):
        return f"job {job.job_id} is about to start"
    return ""


def _soon(job: Job) -> bool:
    return job.eligible_time < time.time() + 60


def _taken(stage: Stage) -> int:
    """GPUs that jobs have."""
    return sum(job.nodes * job.gpus_per_node for job in stage.jobs().values() if job.state.value == "RUNNING")


def kinds_for(stage: Stage, count: int, deck: list[str]) -> list[str]:
    """So many kinds of fault from the deck, which is shuffled anew when it has nothing left that can happen here."""
    drawn: list[str] = []
    while len(drawn) < count:
        able = [kind for kind in deck if WHERE[kind](stage)]
        if able:
            deck.remove(able[0])
            drawn.append(able[0])
        else:
            deck[:] = stage.random.sample(list(KINDS), len(KINDS))
    return drawn


def run(
    cluster: Cluster,
    disks: Mapping[str, Path],
    count: int,
    seed: int,
    log: Path,
    tell: Callable[[Fault], None] = lambda fault: None,
    *,
    parts: tuple[str, ...] = PARTS,
    torch: int = 0,
    only: Sequence[str] = (),
    moments: Sequence[str] = (),
) -> list[Fault]:
    """So many faults from a seed, in equal parts, each with a database, a mode and jobs of its own; `only` kinds and
    `moments` of these names, where some are given.

    What explains a fault after which something was wrong is left in `log`.
    """
    log.mkdir(parents=True, exist_ok=True)
    faults: list[Fault] = []
    deck: list[str] = []
    for index, part in enumerate(parts):
        share = count * (index + 1) // len(parts) - count * index // len(parts)
        with _server(part) as server:
            if server is None and part.startswith("postgresql"):
                part = part.replace("postgresql", "sqlite")
            choice = random.Random(f"{seed} {index}")
            companions = 2 if "pair" in part else 1
            stage = Stage(cluster, disks, choice, own="own" in part, server=server, companions=companions, torch=torch)
            try:
                kinds = [*only] * share if only else kinds_for(stage, share, deck)
                faults += Run(stage, part, log, tell, moments).faults(kinds[:share], len(faults))
            finally:
                shutil.copy(stage.folder / "companion.log", log / f"companion-{index}.log")
                stage.end()
    return faults


@contextmanager
def _server(part: str) -> Iterator[Server | None]:
    if not part.startswith("postgresql"):
        yield None
        return
    try:
        server = Server()
    except NoServer:
        yield None
        return
    try:
        server.create()
        yield server
    finally:
        server.remove()


def figures(faults: list[Fault], seconds: float) -> dict[str, object]:
    """What was found, in numbers and words."""
    parts = {fault.part: fault.jobs for fault in faults}
    return {
        "faults": len(faults),
        "kinds": dict(sorted(Counter(fault.kind for fault in faults).items())),
        "at_a_gate": sum(fault.reached for fault in faults),
        "jobs": sum(parts.values()),
        "lost": [f"fault {fault.number}: {text}" for fault in faults for text in fault.lost],
        "held": [f"fault {fault.number}: {text}" for fault in faults for text in fault.held],
        "broken": [f"fault {fault.number}: {text}" for fault in faults for text in fault.broken],
        "seconds": round(seconds, 1),
    }
