"""Figures of one companion for Prometheus: who has how many GPUs, what resizes cost and brought, what keeps jobs as
they are, and how far off models were.

All follow from what a tick has seen, so that they cost a tick next to nothing. Counters begin at 0 with the process,
and a resize is counted by the companion that ended it, so that a restart does not count it again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Total
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

import slurm_ones
from ones_db import RESIZE_DONE, JobHistory, ResizeRecord
from ones_db.reasons import SENTENCES, cause_of
from slurm_ones.act.transitions import FINAL
from slurm_ones.companion import Tick
from slurm_ones.config import Settings
from slurm_ones.policy.contract import ThroughputModel
from slurm_ones.rules.blocks import BLOCKS, REQUEUE
from slurm_ones.service.labels import NONE, OTHER, Labels, Who
from slurm_ones.show.live import LATE

SPACE = "slurm_ones"
WHOSE = ("partition", "account")
WAITING = "waiting"
"""Label of a resize of a job that waited, beside those of `rules.blocks`."""
PHASES: Mapping[str, tuple[str, ...]] = {
    REQUEUE: ("pause", "checkpoint", "queue", "launch", "group", "load", "first_step"),
    BLOCKS: ("pause", "ready", "transfer"),
    WAITING: (),
}
"""Of each way of a resize the phases: columns of the view `resize_cost`, without their `_s`."""
TOTAL = "total"
"""Label of the time from a resize's writing down to its end."""
SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
RATIOS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0)
OTHERS, OWN = "other jobs", "own sizes"
"""What a prediction was learned from: the second once a job had measured at any size."""
MOST_OFF = 1000.0
"""A ratio beyond this, or below its inverse, counts as this: one odd report must not be all of the mean."""

K = TypeVar("K", bound=tuple[str, ...])
Phases = Mapping[int, Mapping[str, float]]
"""Seconds of each phase, by a resize's id and the phase's column (`Store.resize_phases`)."""
NO_PHASES: Phases = {}


@dataclass(frozen=True)
class _Now:
    """What is so at one moment, by partition and account."""

    until: float = -math.inf
    """When it is too old to be shown."""
    took: Mapping[tuple[()], float] = field(default_factory=dict)
    """Seconds of the tick."""
    running: Mapping[Who, int] = field(default_factory=dict)
    waiting: Mapping[Who, int] = field(default_factory=dict)
    gpus: Mapping[Who, int] = field(default_factory=dict)
    refused: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    slow: Mapping[tuple[str], float] = field(default_factory=dict)
    """Speed of slow nodes."""


class _Present(Collector):
    """The gauges of the newest tick, all of one tick. Those of a companion that ticks no more, since another one leads,
    are not shown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = _Now()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `Collector`."""
        now = self.now if self._clock() <= self.now.until else _Now()
        yield _family("last_tick_seconds", "what the last tick took", now.took)
        yield _family("running_jobs", "elastic jobs that run", now.running, *WHOSE)
        yield _family("waiting_jobs", "elastic jobs that wait", now.waiting, *WHOSE)
        yield _family("gpus", "GPUs on which elastic jobs run", now.gpus, *WHOSE)
        yield _family("slow_node_speed", "speed of a slow node over that of others, as jobs measured", now.slow, "node")
        yield _family("refused_jobs", "elastic jobs that get no other size now", now.refused, *WHOSE, "reason")


def _family(name: str, text: str, values: Mapping[K, float], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{SPACE}_{name}", text, labels=labels)
    for whose, value in values.items():
        family.add_metric(whose, value)
    return family


@dataclass(frozen=True)
class _Expected:
    """What the model of a job says, and the nodes and GPUs per node that the job has measured last."""

    model: ThroughputModel
    on: Mapping[str, ThroughputModel]
    """By kind of GPU."""
    size: tuple[int, int] | None


class Metrics:
    """What one companion serves. `clock` gives the time by which gauges become too old."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        # Nothing of the process itself: that is systemd's to tell.
        self.registry = CollectorRegistry()
        self._clock = clock
        self._labels = Labels()
        self._interval_s = 60.0
        self._seen: float | None = None
        """Time of the last tick's snapshot."""
        self._begun_for: set[Who] = set()
        self._who: dict[int, Who] = {}
        self._causes: dict[int, str] = {}
        self._expected: dict[int, _Expected] = {}
        self._due: list[tuple[ResizeRecord, Who]] = []
        self._shown: set[tuple[str, ...]] = set()
        """Series by reason that are there already."""
        self._later: list[tuple[tuple[str, ...], Total]] = []
        """Those that are new since the last tick, once for each time that they are to be counted up."""
        self._present = _Present(clock)
        self.registry.register(self._present)
        self._info = self._gauge("info", "the companion, always 1", "version", "policy", "mode")
        self._time = self._gauge("last_tick_timestamp_seconds", "end of the last tick that was not in vain")
        self._interval = self._gauge("tick_interval_seconds", "seconds between ticks, by the settings")
        self._ticks = self._total("ticks", "ticks that were not in vain")
        self._errors = self._total("errors", "errors that were logged")
        self._begun = self._total("resizes_begun", "resizes begun, or advised", *WHOSE)
        self._ended = self._total("resizes", "resizes that ended, by the state they ended in", *WHOSE, "way", "state")
        self._failed = self._total("resize_failures", "resizes without effect, by the reason", *WHOSE, "reason")
        self._refusals = self._total("refusals", "times that a job began to get no other size", *WHOSE, "reason")
        self._held = self._total("gpu_seconds", "GPU-seconds that elastic jobs held", *WHOSE)
        self._gained = self._total("gpu_seconds_gained", "those beyond what the jobs asked for", *WHOSE)
        self._given = self._total("gpu_seconds_given_up", "those that jobs asked for and ran without", *WHOSE)
        self._lost = self._total("gpu_seconds_lost", "those held while a resize kept training still", *WHOSE, "way")
        self._phases = self._histogram("resize_phase_seconds", "phases of resizes", SECONDS, *WHOSE, "way", "phase")
        self._ratio = self._histogram(
            "throughput_ratio",
            "throughput first measured after a change of size, over what was predicted of it before",
            RATIOS,
            *WHOSE,
            "learned_from",
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=SPACE, registry=self.registry)

    def _total(self, name: str, text: str, *labels: str) -> Total:
        return Total(name, text, labels, namespace=SPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=SPACE, registry=self.registry, buckets=buckets)

    def leads(self, settings: Settings) -> None:
        """The companion leads from now on, by these settings."""
        # What was so before, another companion may have counted.
        self._seen, self._expected = None, {}
        self._interval_s = settings.interval_s
        self._interval.set(settings.interval_s)
        self._info.clear()
        self._info.labels(slurm_ones.__version__, settings.policy, settings.mode).set(1)

    def failed(self, errors: int) -> None:
        """Count errors."""
        self._errors.inc(errors)

    @property
    def due(self) -> list[ResizeRecord]:
        """Resizes that ended at the tick before, whose jobs have told by now how long each phase took."""
        return [resize for resize, _ in self._due]

    def ticked(self, now: float, tick: Tick, phases: Phases = NO_PHASES) -> None:
        """Take in a tick that ended at `now`, Unix seconds, and the phases of those that were `due`."""
        for resize, who in self._due:
            self._time_of(resize, who, phases.get(resize.id, {}))
        self._due = []
        for name, series in self._later:
            self._shown.add(name)
            series.inc()
        self._later = []
        elastic = tick.observation.elastic
        whose = {job_id: self._labels.who(one.partition, one.job.account) for job_id, one in elastic.items()}
        for who in {*whose.values()} - self._begun_for:
            self._begin_for(who)
        # Of a job whose resize ended with it the last word counts.
        before, self._who = self._who, whose
        self._time.set(now)
        self._ticks.inc()
        for change in tick.begun:
            self._begun.labels(*whose[change.job_id]).inc()
        for resize in tick.ended:
            self._count(resize, whose.get(resize.job_id) or before.get(resize.job_id) or (NONE, NONE))
        self._hold(tick, whose)
        self._compare(tick, whose)
        causes = self._refused(tick)
        running = {job_id: one for job_id, one in elastic.items() if one.job.running}
        gpus: Counter[Who] = Counter()
        for job_id, one in running.items():
            gpus[whose[job_id]] += one.shape.gpus
        self._present.now = _Now(
            self._clock() + LATE * self._interval_s,
            {(): tick.seconds},
            Counter(whose[job_id] for job_id in running),
            Counter(whose[job_id] for job_id in elastic if job_id not in running),
            gpus,
            Counter((*whose[job_id], code) for job_id, code in causes.items()),
            {(name,): node.factor for name, node in tick.slow_nodes.items()},
        )

    def _begin_for(self, who: Who) -> None:
        """A series that is there from the beginning is one whose first increase is seen."""
        self._begun_for.add(who)
        for total in (self._begun, self._held, self._gained, self._given):
            total.labels(*who)
        for source in (OTHERS, OWN):
            self._ratio.labels(*who, source)
        for way in PHASES:
            for state in FINAL:
                self._ended.labels(*who, way, state.value)

    def _hold(self, tick: Tick, whose: Mapping[int, Who]) -> None:
        """Add up what jobs held since the last tick: as now, and for longer than a few ticks nobody knows."""
        seen = tick.observation.snapshot.time
        since, self._seen = self._seen, seen
        if since is None:
            return
        passed = min(max(seen - since, 0.0), LATE * self._interval_s)
        held: dict[Who, list[float]] = {}
        for job_id, one in tick.observation.elastic.items():
            if one.job.running:
                gpus, seconds = one.shape.gpus, min(passed, max(seen - one.job.start_time, 0.0))
                more = gpus - (_asked(tick.histories.get(job_id)) or gpus)
                sums = held.setdefault(whose[job_id], [0.0, 0.0, 0.0])
                sums[0] += gpus * seconds
                sums[1] += max(more, 0) * seconds
                sums[2] += max(-more, 0) * seconds
        for who, sums in held.items():
            for total, gpu_s in zip((self._held, self._gained, self._given), sums, strict=True):
                total.labels(*who).inc(gpu_s)

    def _refused(self, tick: Tick) -> dict[int, str]:
        """Why jobs get no other size, by job; each that was not so before is counted."""
        given = {id_: why.code for one in tick.decided for id_, why in one.schedule.reasons.items()}
        before, self._causes = self._causes, {}
        for job_id, one in tick.observation.elastic.items():
            outcome = tick.outcomes.get(job_id)
            refusal = one.refusal.code if one.refusal is not None else ""
            code = cause_of(refusal, outcome.code if outcome is not None else "", given.get(job_id, ""))
            if not code:
                continue
            self._causes[job_id] = code
            if before.get(job_id) != code:
                self._count_reason("refusals", self._refusals, (*self._who[job_id], code))
        return self._causes

    def _compare(self, tick: Tick, whose: Mapping[int, Who]) -> None:
        """Of each job that has measured another size than last: how far off the model was that it had before."""
        expected = {job_id: known for job_id, known in self._expected.items() if job_id in whose}
        for one in tick.decided:
            for job_id, view in one.views.items():
                history, known = tick.histories.get(job_id), expected.get(job_id)
                last = history.throughput[-1] if history is not None and history.throughput else None
                size = (last.shape.nodes, last.shape.gpus_per_node) if last is not None else None
                if known is not None and last is not None and size != known.size:
                    asked = (last.shape.nodes, last.shape.gpus, last.batch)
                    model = known.on.get(last.kind, known.model)
                    predicted = float(model.throughput(*(np.array([number]) for number in asked))[0])
                    source = OTHERS if known.size is None else OWN
                    if (ratio := _ratio(last.samples_per_s, predicted)) is not None:
                        self._ratio.labels(*whose[job_id], source).observe(ratio)
                expected[job_id] = _Expected(view.model, view.on, size)
        self._expected = expected

    def _count(self, resize: ResizeRecord, who: Who) -> None:
        way = _way(resize)
        for phase in (TOTAL, *PHASES[way]):
            self._phases.labels(*who, way, phase)
        self._lost.labels(*who, way)
        self._ended.labels(*who, way, resize.state).inc()
        self._due.append((resize, who))
        if resize.state != RESIZE_DONE:
            code = resize.outcome.code if resize.outcome.code in SENTENCES else OTHER
            self._count_reason("failures", self._failed, (*who, code))

    def _count_reason(self, name: str, total: Total, labels: tuple[str, ...]) -> None:
        """Count one more. There are too many reasons to show each from the beginning: one that is new is shown with 0
        until the next tick, so that its first increase is seen."""
        if (name, *labels) in self._shown:
            total.labels(*labels).inc()
        else:
            self._later.append(((name, *labels), total.labels(*labels)))

    def _time_of(self, resize: ResizeRecord, who: Who, phases: Mapping[str, float]) -> None:
        """Take in where the time of a resize went. What a job tells of itself counts no longer than the resize lasted
        by the companion's clock."""
        way = _way(resize)
        lasted = max((resize.ended or resize.started) - resize.started, 0.0)
        self._phases.labels(*who, way, TOTAL).observe(lasted)
        told = {of: min(max(phases[f"{of}_s"], 0.0), lasted) for of in PHASES[way] if f"{of}_s" in phases}
        for name, seconds in told.items():
            self._phases.labels(*who, way, name).observe(seconds)
        stalled = min(max(phases.get("stall_s", 0.0), 0.0), lasted)
        self._lost.labels(*who, way).inc(lost(resize, told, stalled))


def lost(resize: ResizeRecord, phases: Mapping[str, float], stalled: float) -> float:
    """GPU-seconds that a job held while a resize kept its training still.

    By a requeue: its old GPUs while it wrote the checkpoint, its new ones from the batch script to its first step. By
    blocks: all that it had during the pause, and those that joined until they were ready.
    """
    old, new = resize.old_shape.gpus, resize.new_shape.gpus
    if resize.mechanism == BLOCKS:
        joined = sum(shape.gpus for _, shape in resize.added)
        return max(old, new) * phases.get("pause", 0.0) + joined * phases.get("ready", 0.0)
    starting = sum(phases.get(name, 0.0) for name in ("launch", "group", "load", "first_step"))
    return old * stalled + new * starting


def _way(resize: ResizeRecord) -> str:
    if resize.mechanism == BLOCKS:
        return BLOCKS
    return REQUEUE if resize.restart >= 0 else WAITING


def _asked(history: JobHistory | None) -> int:
    """GPUs that a job asked for; 0 where that is not known."""
    return history.job.requested_shape.gpus if history is not None else 0


def _ratio(measured: float, predicted: float) -> float | None:
    if not (math.isfinite(measured) and math.isfinite(predicted) and predicted > 0):
        return None
    return min(max(measured / predicted, 1 / MOST_OFF), MOST_OFF)
