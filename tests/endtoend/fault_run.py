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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ones_db import StoreError
from slurm_ones.act.transitions import Stage, State
from slurm_ones.slurm.model import SlurmJob
from tests.cluster import Cluster, ClusterError
from tests.db.server import NoServer, Server
from tests.endtoend.fault_site import FaultSite
from tests.endtoend.faults import KINDS, POSSIBLE
from tests.endtoend.guest_faults import GUEST_KINDS
from tests.endtoend.invariants import Findings, check, check_guests

GATES = (
    *(State.DRAINING, State.REQUEUING, State.RESHAPING, State.RELEASING, State.WAITING, State.STARTING),
    *(State.PARKING, State.HOLDING, State.DONE),
    *(State.PREPARING, State.OPENING, State.JOINING, State.LEAVING, str(Stage(State.LEAVING, back=True))),
    *("after requeue_hold", "after reshape", "after release", "after hold", "after defer"),
    *("after hold_waiting", "after throttle", "after reuse"),
)
BACK = tuple(str(Stage(state, back=True)) for state in (State.HOLDING, State.RESHAPING, State.RELEASING, State.WAITING))
"""Gates on the way back, which resizes take when others have taken their GPUs."""
PARTS = ("sqlite own", "postgresql operator pair", "sqlite operator pair", "postgresql own")
"""Database, mode, and whether there are two companions, of which one stands by."""
MODES = ("cancel", "requeue")
GATE_S = 6.0
UNDO_TRIES = 5
GUESTS_OFTEN = 3
"""So often each of the kinds that need guests is in the deck."""
QUIET_S = 120.0
SETTLE_S = 0.25
JUDGE_S = 30.0
"""For so long what is found may still be on its way: a block that trains apart ends, and the companion is sure that a
job is over, seconds after nothing is open any more."""


@dataclass(frozen=True)
class FaultOutcome:
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
    preempted: int = 0
    """Blocks that Slurm took meanwhile."""
    served_s: list[float] = field(default_factory=list)
    """How long each rigid job had waited that started meanwhile and still runs."""


class FaultRun:
    """FaultOutcome after fault on one site."""

    def __init__(
        self,
        site: FaultSite,
        part: str,
        log: Path,
        on_fault: Callable[[FaultOutcome], None],
        moments: Sequence[str] = (),
    ) -> None:
        """`moments` are the only ones, where some are named."""
        self.site, self._part, self._log, self._on_fault, self._moments = site, part, log, on_fault, moments
        self._known: set[str] = set()
        self._unending: set[str] = set()
        """What was waited for once, in vain; each fault after it would wait as long."""
        self._preempted = len(site.preempted()) if site.guests else 0

    def faults(self, kinds: list[str], first: int) -> Iterator[FaultOutcome]:
        """Let each of these kinds happen in turn."""
        self.site.populate()
        self._quiet()
        for number, kind in enumerate(kinds, first):
            fault = self._one(number, kind)
            if fault.lost or fault.held or fault.broken:
                self._keep(number)
            with (self._log / "faults.jsonl").open("a") as file:
                file.write(json.dumps(asdict(fault)) + "\n")
            self._on_fault(fault)
            yield fault

    def _one(self, number: int, kind: str) -> FaultOutcome:
        site, choice, started = self.site, self.site.random, time.monotonic()
        self._undo_due()
        site.populate()
        elastic = sorted(site.elastic())
        moment = str(getattr(gate, "value", gate)) if (gate := self._moment(kind)) else "any"
        job_id, reached = choice.choice(elastic), False
        site.set_quiet(False)
        crowd = 0
        if gate:
            if gate in BACK and site.await_gate(State.REQUEUING.value, GATE_S) is not None:
                crowd = site.crowd(16 - _taken(site) + 1)
                site.open_gate()
            at = site.await_gate(moment, GATE_S)
            reached = at is not None
            job_id = at if at is not None else job_id
        else:
            time.sleep(choice.uniform(0, 2))
        if crowd:
            site.scontrol("scancel", str(crowd), user="bob")
        if site.expected[job_id].role == "elastic":
            # What a Slurm that does not answer keeps a person from doing is not done.
            with suppress(ClusterError, subprocess.TimeoutExpired):
                KINDS[kind](site, job_id)
        site.open_gate()
        time.sleep(choice.uniform(0, 0.5))
        while site.repairs:
            site.repairs.pop()()
        site.set_quiet(True)
        trouble = self._quiet()
        findings = self._judged()
        fresh = [text for text in (*trouble, *findings.broken) if text not in self._known]
        lost = [text for text in findings.lost if text not in self._known]
        held = [text for text in findings.held if text not in self._known]
        self._known |= {*fresh, *lost, *held}
        seconds = round(time.monotonic() - started, 2)
        count = len(site.expected)
        outcome = FaultOutcome(number, self._part, kind, moment, reached, job_id, count, seconds, lost, held, fresh)
        return self._with_guests(outcome) if site.guests else outcome

    def _with_guests(self, outcome: FaultOutcome) -> FaultOutcome:
        taken, before = len(self.site.preempted()), self._preempted
        self._preempted, since = taken, time.time() - outcome.seconds
        rigid = [job for job in self.site.records().values() if job.user == "bob" and job.running]
        waits = [job.start_time - job.eligible_time for job in rigid if job.start_time > since]
        return replace(outcome, preempted=taken - before, served_s=waits)

    def _judged(self) -> Findings:
        until = time.monotonic() + JUDGE_S
        while True:
            findings = check(self.site)
            if self.site.guests:
                findings.broken += check_guests(self.site)
            fresh = {*findings.lost, *findings.held, *findings.broken} - self._known
            if not fresh or time.monotonic() > until:
                return findings
            time.sleep(1)

    def _moment(self, kind: str) -> str | State | None:
        choice = self.site.random
        if gates := GUEST_KINDS.get(kind):
            return choice.choice(gates)
        if self._moments:
            return choice.choice(self._moments)
        return choice.choice([None, choice.choice(GATES), choice.choice(GATES), choice.choice((*GATES, *BACK))])

    def _undo_due(self) -> None:
        """What people undo by now. What Slurm does not take is tried again some times."""
        due = [(left, undo) for left, undo in self.site.undo_later if left <= 1]
        self.site.undo_later = [(left - 1, undo) for left, undo in self.site.undo_later if left > 1]
        self.site.undo_later += [(left - 1, undo) for left, undo in due if not undo() and left > 1 - UNDO_TRIES]

    def _quiet(self) -> list[str]:
        """Wait until no resize is open, the companion has ticked since, and no job is between two states."""
        site = self.site
        site.skip_log()
        until, unsettled = time.monotonic() + QUIET_S, [""]
        while time.monotonic() < until:
            unsettled = [why for why in self._unsettled() if why not in self._unending]
            if not unsettled:
                return []
            time.sleep(SETTLE_S)
        self._unending |= {why for why in unsettled if why.startswith(("job ", "resize "))}
        return [f"not quiet within {QUIET_S:.0f} s: {', '.join(unsettled)}"]

    def _unsettled(self) -> Iterator[str]:
        site = self.site
        if site.companion_log().count("elastic jobs run") < 2:
            yield "the companion does not tick"
            return
        try:
            with site.store() as store:
                yield from (f"resize of job {r.job_id}: {r.state}" for r in store.open_resizes())
                if deferrals := store.deferrals():
                    yield f"deferred: {deferrals}"
                jobs = site.jobs()
                for job_id in site.elastic():
                    job = jobs.get(job_id)
                    if job is None:
                        continue
                    if why := between(job):
                        yield why
                    record = store.jobs([job_id]).get(job_id)
                    if record is None or record.state != job.state.value:
                        yield f"job {job_id} is {job.state.value}, the database has {record and record.state}"
        except (StoreError, ClusterError, subprocess.TimeoutExpired) as error:
            yield str(error)

    def _keep(self, number: int) -> None:
        """Keep what may explain it."""
        folder, site = self._log / f"fault-{number}", self.site
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            shutil.copy(site.folder / "companion.log", folder)
        for log in site.cluster.logs.glob("*.log"):
            with suppress(OSError):
                shutil.copy(log, folder)
        for name, command in {"jobs": ["scontrol", "-d", "show", "jobs"], "nodes": ["sinfo", "-N"]}.items():
            with suppress(ClusterError, subprocess.TimeoutExpired):
                (folder / name).write_text(site.cluster.run(command, user="root").stdout)
        for job_id in site.elastic():
            with suppress(OSError, shutil.Error):
                shutil.copytree(site.directory(job_id), folder / f"ones-{job_id}", symlinks=True)
        with suppress(StoreError), site.store() as store:
            lines = [str(record) for record in store.jobs().values()]
            for resize in store.resizes():
                steps = [f"    {step.time:.2f} {step.state} {step.detail!s}" for step in store.resize_steps(resize.id)]
                lines += [str(resize), *steps]
            (folder / "resizes").write_text("\n".join(lines))


def between(job: SlurmJob) -> str:
    if job.completing or job.flags & {"CONFIGURING"}:
        return f"job {job.job_id} is {sorted(job.flags)}"
    if job.pending and not job.held and job.reason in ("None", "", "Cleaning", "BeginTime") and _soon(job):
        return f"job {job.job_id} is about to start"
    return ""


def _soon(job: SlurmJob) -> bool:
    return job.eligible_time < time.time() + 60


def _taken(site: FaultSite) -> int:
    return sum(job.nodes * job.gpus_per_node for job in site.jobs().values() if job.state.value == "RUNNING")


def kinds_for(site: FaultSite, count: int, deck: list[str]) -> list[str]:
    """So many kinds of fault from the deck, which is shuffled anew when it has nothing left that can happen here."""
    drawn: list[str] = []
    while len(drawn) < count:
        able = [kind for kind in deck if POSSIBLE[kind](site)]
        if able:
            deck.remove(able[0])
            drawn.append(able[0])
        else:
            names = [name for name in KINDS if name not in GUEST_KINDS]
            names += [*GUEST_KINDS] * GUESTS_OFTEN if site.guests else []
            deck[:] = site.random.sample(names, len(names))
    return drawn


def run(
    cluster: Cluster,
    disks: Mapping[str, Path],
    count: int,
    seed: int,
    log: Path,
    on_fault: Callable[[FaultOutcome], None] = lambda fault: None,
    *,
    parts: tuple[str, ...] = PARTS,
    torch: int = 0,
    blocks: int = 2,
    systemd: bool = False,
    guests: bool = False,
    only: Sequence[str] = (),
    moments: Sequence[str] = (),
) -> list[FaultOutcome]:
    """So many faults from a seed, in equal parts, each with a database, a mode and jobs of its own; `only` kinds and
    `moments` of these names, where some are given. With `guests` Slurm preempts them in one part by cancelling them,
    and in the next by a requeue.

    What explains a fault after which something was wrong is left in `log`.
    """
    log.mkdir(parents=True, exist_ok=True)
    faults: list[FaultOutcome] = []
    deck: list[str] = []
    for index, part in enumerate(parts):
        share = count * (index + 1) // len(parts) - count * index // len(parts)
        with _server(part) as server:
            if server is None and part.startswith("postgresql"):
                part = part.replace("postgresql", "sqlite")
            choice = random.Random(f"{seed} {index}")
            companions = 2 if "pair" in part else 1
            mode = MODES[(seed + index) % 2] if guests else ""
            part = f"{part} {mode}".strip()
            site = FaultSite(
                cluster,
                disks,
                choice,
                own="own" in part,
                server=server,
                companions=companions,
                torch=torch,
                blocks=blocks,
                systemd=systemd,
                guests=mode,
            )
            try:
                able = [kind for kind in only if POSSIBLE[kind](site)]
                kinds = able * share if only else kinds_for(site, share, deck)
                faults += FaultRun(site, part, log, on_fault, moments).faults(kinds[:share], len(faults))
            finally:
                shutil.copy(site.folder / "companion.log", log / f"companion-{index}.log")
                site.end()
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


def figures(faults: list[FaultOutcome], seconds: float) -> dict[str, object]:
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
        "preempted": sum(fault.preempted for fault in faults),
        "served_s": sorted(wait for fault in faults for wait in fault.served_s),
        "seconds": round(seconds, 1),
    }
