"""A fault run as a page: one file, which shows how everything stood at each moment. It needs no network."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from slurm_ones.show.palette import COLOURS
from slurm_ones.text import plain
from tests.faults.plan import FaultPlan
from tests.faults.recording import COMMAND, FAULT, KINDS, ORDER, PHASE, VIOLATION, Recorder, Recording, Stood
from tests.faults.run import Result, run

WIDTH, HEIGHT = 1000.0, 34.0
MARK = 3.0
"""Width of what has no length."""
BEYOND = 1.15
"""The picture ends so much later than the last event; jobs that are left alone may go on for hours."""
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Bar:
    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Row:
    name: str
    bars: Sequence[Bar]
    job: bool = False


def write_replay(path: Path, plan: FaultPlan) -> Result:
    """Carry the plan out and write its page; returns what became of it."""
    recorders: list[Recorder] = []
    result = run(plan, begun=lambda fault_run: recorders.append(Recorder(fault_run)))
    path.write_text(page(plan, result, recorders[0].recording), encoding="utf-8")
    return result


def page(plan: FaultPlan, result: Result, recording: Recording) -> str:
    """The page as text; whatever others wrote is text in it."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True)
    environment.filters["plain"] = plain
    end = recording.rest * BEYOND or 1.0
    rendered: str = environment.get_template("replay.html").render(
        plan=plan,
        violations=result.violations,
        faults=sum(result.kinds.values()),
        resizes=result.resizes,
        rows=list(rows(plan, recording, end)),
        clipped=f"The scale is the square root of time; its right edge is {end:.0f} s and all that comes later.",
        facts=_facts(plan),
        data=data(recording, end),
        style=files("slurm_ones.show").joinpath("static/style.css").read_text(encoding="utf-8"),
        script=(FOLDER / "replay.js").read_text(encoding="utf-8"),
    )
    return rendered


def data(recording: Recording, end: float) -> dict[str, Any]:
    """What the script shows: moments in order; events and states name theirs by its place."""
    tracks = [*recording.jobs.values(), *recording.others.values()]
    times = sorted({stood.time for track in tracks for stood in track} | {event.time for event in recording.events})

    def told(found: Mapping[str, Sequence[Stood]]) -> list[Any]:
        return [
            [plain(name, 80), [[bisect_left(times, s.time), s.state, s.gpus, _shown(s)] for s in track]]
            for name, track in found.items()
        ]

    return {
        "times": times,
        "x": [round(_x(time, end), 2) for time in times],
        "jobs": told(recording.jobs),
        "others": told(recording.others),
        "events": [[bisect_left(times, e.time), e.kind, plain(e.text, 400)] for e in recording.events],
    }


def _shown(stood: Stood) -> list[list[str]]:
    return [[plain(name, 60), plain(value, 300)] for name, value in stood.facts]


def rows(plan: FaultPlan, recording: Recording, end: float) -> Iterator[Row]:
    """The picture: the jobs, what happened by its kind, and what else there is where it was ever down."""
    for name, track in recording.jobs.items():
        bars = [bar for begin, until, stood in _spans(track, end) for bar in _of_job(plan, name, begin, until, stood)]
        yield Row(name, bars, job=True)
    for kind in (VIOLATION, FAULT, COMMAND, ORDER, PHASE):
        marks = [e for e in recording.events if e.kind == kind]
        if marks:
            bars = [
                Bar(f"mark {kind}", _left(e.time, end), 4.0, MARK, HEIGHT - 8.0, f"{e.time:.1f} s: {e.text}")
                for e in marks
            ]
            yield Row(KINDS[kind], bars)
    for name, track in recording.others.items():
        down = [span for span in _spans(track, end) if span[2].state in ("down", "there")]
        if down:
            yield Row(f"{name} {down[0][2].state}", [_wide("down", *span, end, 8.0) for span in down])


def _of_job(plan: FaultPlan, name: str, begin: float, until: float, stood: Stood) -> Iterator[Bar]:
    width = round(max(until - begin, 0.5), 2)
    if stood.gpus:
        high = round(max((HEIGHT - 6.0) * stood.gpus / plan.spec.gpus, 2.0), 2)
        facts = "; ".join(f"{name} {value}" for name, value in stood.facts)
        yield Bar(
            f"c{int(name.split()[0]) % COLOURS}", begin, HEIGHT - high, width, high, f"{stood.gpus} GPUs; {facts}"
        )
    elif stood.state in ("waits", "held"):
        yield Bar(stood.state, begin, HEIGHT - 4.0, width, 4.0, f"{stood.time:.1f} s: {stood.state}")
    for what, phase in stood.facts:
        if what == "resize":
            yield Bar("resize", begin, 0.0, width, 4.0, f"{stood.time:.1f} s: {phase}")


def _wide(kind: str, begin: float, until: float, stood: Stood, end: float, high: float) -> Bar:
    title = f"{stood.state} from {stood.time:.1f} s"
    return Bar(kind, begin, (HEIGHT - high) / 2, max(until - begin, MARK), high, title)


def _spans(track: Sequence[Stood], end: float) -> Iterator[tuple[float, float, Stood]]:
    """Each state with where it begins and ends in the picture."""
    for stood, later in zip(track, [*track[1:], None], strict=True):
        begin, until = _x(stood.time, end), WIDTH if later is None else _x(later.time, end)
        if begin < WIDTH:
            yield round(begin, 2), round(until, 2), stood


def _x(time: float, end: float) -> float:
    """Most happens early, and then one waits for jobs to end: the square root gives the former more room."""
    return min(WIDTH * math.sqrt(max(time, 0.0) / end), WIDTH)


def _left(time: float, end: float) -> float:
    return round(min(_x(time, end), WIDTH - MARK), 2)


def _facts(plan: FaultPlan) -> list[tuple[str, str]]:
    flaws = {job.name: ", ".join(sorted(flaw.value for flaw in job.flaws)) for job in plan.jobs}
    jobs = [
        (
            job.name,
            f"{'of blocks, ' * job.blocks}{job.opt_in}, asks for {job.gpus} GPUs at {job.time:.0f} s"
            + (f"; its own faults: {flaws[job.name]}" if flaws[job.name] else ""),
        )
        for job in plan.jobs
    ]
    rates = ", ".join(f"{kind.value} {rate:.0%}" for kind, rate in plan.rates.items() if rate)
    events = ", ".join(f"{time:.0f} s {kind.value}" for time, kind in plan.events)
    settings = ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    return [
        *jobs,
        ("a tick each", f"{plan.interval_s:.0f} s, {plan.ticks} times with faults"),
        ("faults at steps", rates or "none"),
        ("faults at times", events or "none"),
        ("settings", settings),
    ]
