"""What happened in a fault run, and how everything stood at each moment of it.

Looking changes nothing: no random number is drawn, and what happens comes in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_ones.simulate.slurm.simulated_job import SimulatedJob
from slurm_ones.simulate.slurm.timeline import EPOCH
from tests.faults.safety import OpenResize

if TYPE_CHECKING:
    from tests.faults.run import FaultRun

FAULT, COMMAND, ORDER, PHASE, VIOLATION, OTHER = "fault", "command", "order", "phase", "violation", "other"
KINDS = {
    FAULT: "faults, others' acts",
    COMMAND: "asked of Slurm",
    ORDER: "orders to jobs",
    PHASE: "phases of resizes",
    VIOLATION: "violations",
    OTHER: "who leads",
}
"""Kinds of events, and what they are."""
_UNTOLD = "a write to the database"
"""A step that is at every second place."""


@dataclass(frozen=True)
class Happened:
    """One event. Times are simulated seconds after the start."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True)
class Stood:
    """How one thing stood from a moment on, until its next entry."""

    time: float
    state: str
    """One word: waits, held, runs or ended of a job; up or down of others."""
    gpus: int = 0
    facts: tuple[tuple[str, str], ...] = ()
    """A name and a value each."""


@dataclass
class Recording:
    """A run from its first tick to the end of its last job."""

    events: list[Happened] = field(default_factory=list)
    jobs: dict[str, list[Stood]] = field(default_factory=dict)
    others: dict[str, list[Stood]] = field(default_factory=dict)
    """Companions, the controller, nodes."""

    @property
    def rest(self) -> float:
        """When the last thing happened that is no change of a job alone."""
        changes = [stood.time for track in self.others.values() for stood in track]
        return max([event.time for event in self.events if event.kind != VIOLATION] + changes, default=0.0)


class Recorder:
    """Fills a recording while the run goes on."""

    def __init__(self, run: FaultRun) -> None:
        """Begins at once."""
        self._run = run
        self.recording = Recording()
        self._tried = ""
        """A step of the companion that has begun."""
        self._wrap()
        self.look()

    def _wrap(self) -> None:
        run, timeline = self._run, self._run.world.timeline
        trace, report, passed = run.injector.trace, run.checker.report, timeline.run

        def traced(text: str) -> None:
            trace(text)
            self._traced(text)
            self.look()

        def reported(what: str) -> None:
            report(what)
            self._happened(VIOLATION, what)
            self.look()

        def pass_time(until: float, *, until_change: bool = False) -> None:
            # The same events in the same order, with a look after each moment that has some.
            while timeline._heap and timeline._heap[0][0] <= until:
                passed(timeline._heap[0][0], until_change=until_change)
                self.look()
                if until_change and timeline.changed:
                    return
            passed(until, until_change=until_change)

        run.injector.trace = traced
        run.checker.report = reported  # type: ignore[method-assign]
        timeline.run = pass_time  # type: ignore[method-assign]

    @property
    def _now(self) -> float:
        return self._run.world.timeline.now - EPOCH

    def _happened(self, kind: str, text: str) -> None:
        self.recording.events.append(Happened(self._now, kind, text))

    def _traced(self, text: str) -> None:
        words = text.strip()
        done = words.startswith("after ")
        # Where it was tried and nothing came after it: refused, not answered, or killed in the middle.
        if self._tried and words not in (f"after {self._tried}", f"before {self._tried}"):
            self._happened(_kind(self._tried), f"{self._tried}: begun")
        self._tried = ""
        if words.startswith("*** "):
            self._happened(FAULT, words[4:].strip())
        elif words.startswith("before "):
            self._tried = "" if words.endswith(_UNTOLD) else words.removeprefix("before ")
        elif done:
            if not words.endswith(_UNTOLD):
                self._happened(_kind(words.removeprefix("after ")), words.removeprefix("after "))
        else:
            self._happened(PHASE if words.startswith("job ") else OTHER, words)

    # -- how everything stands -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Note what is another than at the last look."""
        run, world = self._run, self._run.world
        opened = run._open()
        records: dict[int, list[SimulatedJob]] = defaultdict(list)
        for record in world.cluster.jobs.values():
            records[record.main_id].append(record)
        names = {job_id: name for name, job_id in world.job_ids.items()}
        for job_id, found in records.items():
            note(self.recording.jobs, f"{job_id} {names.get(job_id, '')}".strip(), self._job(job_id, found, opened))
        leader = run.leaders[-1] if run.leaders else ""
        for host in run.hosts:
            role = "" if len(run.hosts) == 1 else "leads" if host.name == leader else "stands by"
            facts = [("its clock is off by", f"{host.clock.offset_s:.0f} s")] if host.clock.offset_s else []
            facts += [("it", role)] if role and host.alive else []
            state = "up" if host.alive else "ended" if host.ended else "down"
            note(self.recording.others, f"companion on {host.name}", self._stood(state, facts))
        note(self.recording.others, "controller", self._stood("down" if run.controller.down else "up"))
        stop = world.stop_file.exists()
        note(self.recording.others, "stop file", self._stood("there" if stop else "not there"))
        for name, node in world.cluster.nodes.to_model().items():
            state = "up" if node.usable else "down"
            note(self.recording.others, f"node {name}", self._stood(state, [("Slurm says", str(node.state))]))

    def _stood(self, state: str, facts: Sequence[tuple[str, str]] = ()) -> Stood:
        return Stood(self._now, state, facts=tuple(facts))

    def _job(self, job_id: int, records: Sequence[SimulatedJob], opened: Mapping[int, OpenResize]) -> Stood:
        world = self._run.world
        alive = [record for record in records if not record.ended]
        running = [record for record in alive if record.running]
        gpus = sum(sum(record.gpus.values()) for record in records)
        held = sorted({record.held_by for record in alive if record.held_by})
        state = "ended" if not alive else "runs" if running else "held" if held else "waits"
        facts = [("Slurm's state", ", ".join(sorted({record.state.value for record in alive or records})))]
        if records[0].array is None:
            facts.append(("shape", f"{records[0].nodes}x{records[0].gpus_per_node}"))
            facts += [("held by", held[0])] if held else []
            facts += [("restarts", str(records[0].restart))] if records[0].restart else []
        training = world.trainings.get(job_id)
        if training.hot is not None:
            facts += [(f"tasks {_tasks(record)}", _task(record)) for record in alive]
            facts.append(("train together", ", ".join(map(str, training.members)) or "none"))
        if training is not None and running:
            facts += [("it", training.phase.name.lower()), ("global batch", str(training.batch))]
        if job_id in opened:
            resize = opened[job_id]
            facts.append(("resize", f"{resize.old} → {resize.new}: {resize.state}"))
        comment = alive[0].request.comment if alive else ""
        facts += [("comment", comment)] if comment else []
        return Stood(self._now, state, gpus, tuple(facts))


def note(tracks: dict[str, list[Stood]], name: str, stood: Stood) -> None:
    """Add it to what is known of that thing, where it is another than before."""
    track = tracks.setdefault(name, [])
    last = track[-1] if track else None
    if last is not None and (last.state, last.gpus, last.facts) == (stood.state, stood.gpus, stood.facts):
        return
    if last is not None and last.time == stood.time:
        track.pop()
    track.append(stood)


def _kind(step: str) -> str:
    return ORDER if step.startswith("order ") else COMMAND


def _tasks(record: SimulatedJob) -> str:
    tasks = record.array_tasks
    return f"{tasks[0]}–{tasks[-1]}" if len(tasks) > 1 else ", ".join(map(str, tasks))


def _task(record: SimulatedJob) -> str:
    held = f", held by {record.held_by}" if record.held_by else ""
    return f"{record.state.value} {record.nodes}x{record.gpus_per_node}{held}"
