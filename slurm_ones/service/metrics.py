"""Prometheus metrics of one companion: GPUs, costs and gains of resizes, reasons for keeping a size, errors of
predictions.

All are computed from a tick's data. Counters begin at 0 with the process. A resize is counted once, by the companion
that ends it.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics, make_wsgi_app
from prometheus_client import Counter as Total
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

import slurm_ones
from ones_db import RESIZE_DONE, ResizeRecord
from ones_db.reasons import SENTENCES, cause_of
from slurm_ones.act.transitions import FINAL
from slurm_ones.companion import Tick
from slurm_ones.config import ConfigError, Settings
from slurm_ones.policy.contract import ThroughputModel
from slurm_ones.rules.blocks import BLOCKS, REQUEUE
from slurm_ones.service.notify import cut_off
from slurm_ones.show.live import LATE
from slurm_ones.text import plain

SPACE = "slurm_ones"
WHOSE = ("partition", "account")
OTHER = "other"
"""Label for all names after the first `PARTITIONS` or `PAIRS`."""
NONE = "none"
"""Label for an empty name, since Prometheus drops empty labels."""
LENGTH = 64
"""Largest number of characters of a name in a label."""
PARTITIONS, PAIRS = 16, 48
"""Largest number of partitions, and of pairs (partition, account), with labels of their own: the first that are
seen."""
WAITING = "waiting"
"""Label in place of the mechanism (`rules.blocks`) for a resize of a waiting job."""
PHASES: Mapping[str, tuple[str, ...]] = {
    REQUEUE: ("pause", "checkpoint", "queue", "launch", "group", "load", "first_step"),
    BLOCKS: ("pause", "ready", "transfer"),
    WAITING: (),
}
"""Phases of a resize by its mechanism, named as the columns of the view `resize_cost` without the suffix `_s`."""
TOTAL = "total"
"""Label of the phase for the whole time of a resize, from its decision to its end."""
SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
RATIOS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0)
OTHERS, OWN = "other jobs", "own sizes"
"""Labels for the source of a prediction: other jobs, or the job's own measurements at other sizes."""
HELD = ("gpu_seconds", "gpu_seconds_gained", "gpu_seconds_given_up")
MOST_OFF = 1000.0
"""Largest ratio of measured to predicted throughput; a ratio beyond it, or below its inverse, is set to this bound."""

Who = tuple[str, str]
"""Labels (partition, account)."""
Phases = Mapping[int, Mapping[str, float]]
"""Seconds of each phase, by the resize's id and then the phase's column (`Store.resize_phases`)."""
NO_PHASES: Phases = {}


class Figure(NamedTuple):
    """Definition of a metric: its type, help text, labels and buckets."""

    kind: type[Gauge | Total | Histogram]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


FIGURES = {
    "info": Figure(Gauge, "the companion, always 1", ("version", "policy", "mode")),
    "last_tick_timestamp_seconds": Figure(Gauge, "end of the last tick that succeeded"),
    "tick_interval_seconds": Figure(Gauge, "seconds between ticks, by the settings"),
    "ticks": Figure(Total, "ticks that succeeded"),
    "errors": Figure(Total, "errors that were logged"),
    "resizes_begun": Figure(Total, "resizes that were begun, or advised in advise mode", WHOSE),
    "resizes": Figure(Total, "resizes that ended, by the state they ended in", (*WHOSE, "way", "state")),
    "resize_failures": Figure(Total, "resizes without effect, by the reason", (*WHOSE, "reason")),
    "refusals": Figure(Total, "times that a job got a new reason for keeping its size", (*WHOSE, "reason")),
    "gpu_seconds": Figure(Total, "GPU-seconds that elastic jobs held", WHOSE),
    "gpu_seconds_gained": Figure(Total, "GPU-seconds beyond what the jobs asked for", WHOSE),
    "gpu_seconds_given_up": Figure(Total, "GPU-seconds that jobs asked for but ran without", WHOSE),
    "gpu_seconds_lost": Figure(Total, "GPU-seconds held while a resize paused training", (*WHOSE, "way")),
    "resize_phase_seconds": Figure(Histogram, "phases of resizes", (*WHOSE, "way", "phase"), SECONDS),
    "throughput_ratio": Figure(
        Histogram,
        "first throughput measured at a new size, divided by its prediction",
        (*WHOSE, "learned_from"),
        RATIOS,
    ),
}
"""Metrics that change as events happen: counters, histograms and some gauges."""

NOW: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "last_tick_seconds": ("seconds that the last tick took", ()),
    "running_jobs": ("elastic jobs that run", WHOSE),
    "waiting_jobs": ("elastic jobs that wait", WHOSE),
    "gpus": ("GPUs on which elastic jobs run", WHOSE),
    "slow_node_speed": ("speed of a slow node divided by that of others, as jobs measured it", ("node",)),
    "refused_jobs": ("elastic jobs that keep their size now, by reason", (*WHOSE, "reason")),
}
"""Gauges of the newest tick: for each name, its help text and labels."""


class _Present(Collector):
    """Gauges of the newest tick, which disappear if no further tick comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.until = -math.inf
        """Time after which the values are too old to show."""
        self.values: Mapping[str, Mapping[Any, float]] = {}
        """Values by the metric's name, then by its labels."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self.values if self._clock() <= self.until else {}
        for name, (text, labels) in NOW.items():
            family = GaugeMetricFamily(f"{SPACE}_{name}", text, labels=labels)
            for whose, value in values.get(name, {}).items():
                family.add_metric(whose, value)
            yield family


class Labels:
    """Chooser of labels (partition, account): limited in number, with `?` for unprintable characters."""

    def __init__(self, partitions: int = PARTITIONS, pairs: int = PAIRS) -> None:
        self._most = partitions, pairs
        self._partitions: set[str] = {OTHER}
        self._pairs: set[Who] = set()

    def who(self, partition: str, account: str) -> Who:
        """Return the labels for a partition and an account. Names beyond the limits become `OTHER`."""
        name, whose = _text(partition), _text(account)
        if name not in self._partitions:
            if len(self._partitions) > self._most[0]:
                name = OTHER
            self._partitions.add(name)
        if (name, whose) not in self._pairs:
            if len(self._pairs) >= self._most[1]:
                return name, OTHER
            self._pairs.add((name, whose))
        return name, whose


def _text(name: str) -> str:
    return plain(name, LENGTH) or NONE


@dataclass(frozen=True)
class _Expected:
    """Throughput prediction for a job, and its last measured size (nodes, GPUs per node); None before any
    measurement."""

    model: ThroughputModel
    on: Mapping[str, ThroughputModel]
    """Throughput models by kind of GPU."""
    size: tuple[int, int] | None


class Metrics:
    """Metrics that one companion serves."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        # Nothing of the process itself: that is systemd's to tell.
        self.registry = CollectorRegistry()
        self._clock = clock
        self._labels = Labels()
        self._interval_s = 60.0
        self._seen: float | None = None
        """Time of the last tick's snapshot, Unix seconds."""
        self._begun_for: set[Who] = set()
        self._who: dict[int, Who] = {}
        self._causes: dict[int, str] = {}
        self._expected: dict[int, _Expected] = {}
        self._due: list[tuple[ResizeRecord, Who]] = []
        self._shown: set[tuple[str, ...]] = set()
        """Names and labels of series that have a reason among the labels, and that Prometheus may have read already."""
        self._later: list[tuple[tuple[str, ...], Total]] = []
        """Series that this tick shows at 0 for the first time. The next tick adds 1 for each time a series is
        listed."""
        self._present = _Present(clock)
        self.registry.register(self._present)
        self._figures: dict[str, Any] = {}
        for name, (kind, text, names, buckets) in FIGURES.items():
            more: dict[str, Any] = {"buckets": buckets} if buckets else {}
            self._figures[name] = kind(name, text, names, namespace=SPACE, registry=self.registry, **more)

    def _of(self, name: str, *labels: str) -> Any:
        return self._figures[name].labels(*labels) if labels else self._figures[name]

    def leads(self, settings: Settings) -> None:
        """Start to count, because this companion leads now, with these settings."""
        # What was so before, another companion may have counted.
        self._seen, self._expected = None, {}
        self._interval_s = settings.interval_s
        self._of("tick_interval_seconds").set(settings.interval_s)
        self._of("info").clear()
        self._of("info", slurm_ones.__version__, settings.policy, settings.mode).set(1)

    def failed(self, errors: int) -> None:
        """Add to the number of logged errors."""
        self._of("errors").inc(errors)

    @property
    def due(self) -> list[ResizeRecord]:
        """Resizes that ended at the previous tick, whose phases their jobs have reported by now."""
        return [resize for resize, _ in self._due]

    def ticked(self, now: float, tick: Tick, phases: Phases = NO_PHASES) -> None:
        """Update all metrics after a tick that ended at `now`. `phases` are the phases of the resizes in `due`."""
        for resize, who in self._due:
            self._time_of(resize, who, phases.get(resize.id, {}))
        self._due = []
        for name, series in self._later:
            self._shown.add(name)
            series.inc()
        self._later = []
        elastic = tick.observation.elastic
        whose = {job_id: self._labels.who(one.partition, one.job.home.account) for job_id, one in elastic.items()}
        for who in {*whose.values()} - self._begun_for:
            self._begin_for(who)
        # A job that ended together with its resize is only in the labels of the tick before.
        before, self._who = self._who, whose
        self._of("last_tick_timestamp_seconds").set(now)
        self._of("ticks").inc()
        for change in tick.begun:
            self._of("resizes_begun", *whose[change.job_id]).inc()
        for resize in tick.ended:
            self._count(resize, whose.get(resize.job_id) or before.get(resize.job_id) or (NONE, NONE))
        self._hold(tick, whose)
        self._compare(tick, whose)
        causes = self._refused(tick)
        running = {job_id: one for job_id, one in elastic.items() if one.job.running}
        gpus: Counter[Who] = Counter()
        for job_id, one in running.items():
            gpus[whose[job_id]] += one.shape.gpus
        self._present.until = self._clock() + LATE * self._interval_s
        self._present.values = {
            "last_tick_seconds": {(): tick.seconds},
            "running_jobs": Counter(whose[job_id] for job_id in running),
            "waiting_jobs": Counter(whose[job_id] for job_id in elastic if job_id not in running),
            "gpus": gpus,
            "slow_node_speed": {(name,): node.factor for name, node in tick.slow_nodes.items()},
            "refused_jobs": Counter((*whose[job_id], code) for job_id, code in causes.items()),
        }

    def _begin_for(self, who: Who) -> None:
        """Show all counters with these labels at 0, so that Prometheus sees their first increase."""
        self._begun_for.add(who)
        for name in ("resizes_begun", *HELD):
            self._of(name, *who)
        for source in (OTHERS, OWN):
            self._of("throughput_ratio", *who, source)
        for way in PHASES:
            for state in FINAL:
                self._of("resizes", *who, way, state.value)

    def _hold(self, tick: Tick, whose: Mapping[int, Who]) -> None:
        """Count the GPU-seconds that jobs held since the last tick. A gap of more than `LATE` intervals counts as
        `LATE` intervals."""
        seen = tick.observation.snapshot.time
        since, self._seen = self._seen, seen
        if since is None:
            return
        passed = min(max(seen - since, 0.0), LATE * self._interval_s)
        held: dict[Who, list[float]] = {}
        for job_id, one in tick.observation.elastic.items():
            if one.job.running:
                gpus, seconds = one.shape.gpus, min(passed, max(seen - one.job.start_time, 0.0))
                history = tick.histories.get(job_id)
                more = gpus - ((history.job.requested_shape.gpus if history is not None else 0) or gpus)
                sums = held.setdefault(whose[job_id], [0.0, 0.0, 0.0])
                sums[0] += gpus * seconds
                sums[1] += max(more, 0) * seconds
                sums[2] += max(-more, 0) * seconds
        for who, sums in held.items():
            for name, gpu_s in zip(HELD, sums, strict=True):
                self._of(name, *who).inc(gpu_s)

    def _refused(self, tick: Tick) -> dict[int, str]:
        """Return the code of the reason for each job that keeps its size, by job id; count reasons that are new for a
        job."""
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
                self._count_reason("refusals", (*self._who[job_id], code))
        return self._causes

    def _compare(self, tick: Tick, whose: Mapping[int, Who]) -> None:
        """Compare the first throughput measured at a new size with the throughput that was predicted for that size."""
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
                        self._of("throughput_ratio", *whose[job_id], source).observe(ratio)
                expected[job_id] = _Expected(view.model, view.on, size)
        self._expected = expected

    def _count(self, resize: ResizeRecord, who: Who) -> None:
        way = _way(resize)
        for phase in (TOTAL, *PHASES[way]):
            self._of("resize_phase_seconds", *who, way, phase)
        self._of("gpu_seconds_lost", *who, way)
        self._of("resizes", *who, way, resize.state).inc()
        self._due.append((resize, who))
        if resize.state != RESIZE_DONE:
            code = resize.outcome.code if resize.outcome.code in SENTENCES else OTHER
            self._count_reason("resize_failures", (*who, code))

    def _count_reason(self, name: str, labels: tuple[str, ...]) -> None:
        """Add 1 to a counter. If it is new, show it at 0 until the next tick, so that Prometheus sees an increase."""
        if (name, *labels) in self._shown:
            self._of(name, *labels).inc()
        else:
            self._later.append(((name, *labels), self._of(name, *labels)))

    def _time_of(self, resize: ResizeRecord, who: Who, phases: Mapping[str, float]) -> None:
        """Record the duration of a resize and of its phases, none longer than the resize."""
        way = _way(resize)
        lasted = max((resize.ended or resize.started) - resize.started, 0.0)
        self._of("resize_phase_seconds", *who, way, TOTAL).observe(lasted)
        told = {of: min(max(phases[f"{of}_s"], 0.0), lasted) for of in PHASES[way] if f"{of}_s" in phases}
        for name, seconds in told.items():
            self._of("resize_phase_seconds", *who, way, name).observe(seconds)
        stalled = min(max(phases.get("stall_s", 0.0), 0.0), lasted)
        self._of("gpu_seconds_lost", *who, way).inc(lost(resize, told, stalled))


def lost(resize: ResizeRecord, phases: Mapping[str, float], stalled: float) -> float:
    """Return the GPU-seconds that a job held while a resize paused its training.

    In a requeue, the job holds its old GPUs during the checkpoint, and the new ones from the script's start to the
    first step. After a failed resize, the new GPUs are the old ones. In a change of blocks, the job holds the larger of
    both sizes during the pause, and joining blocks until they are ready.
    """
    old, new = resize.old_shape.gpus, resize.new_shape.gpus
    if resize.mechanism == BLOCKS:
        joined = sum(shape.gpus for _, shape in resize.added)
        return max(old, new) * phases.get("pause", 0.0) + joined * phases.get("ready", 0.0)
    starting = sum(phases.get(name, 0.0) for name in ("launch", "group", "load", "first_step"))
    return old * stalled + (new if resize.state == RESIZE_DONE else old) * starting


def _way(resize: ResizeRecord) -> str:
    if resize.mechanism == BLOCKS:
        return BLOCKS
    return REQUEUE if resize.restart >= 0 else WAITING


def _ratio(measured: float, predicted: float) -> float | None:
    if not (math.isfinite(measured) and math.isfinite(predicted) and predicted > 0):
        return None
    return min(max(measured / predicted, 1 / MOST_OFF), MOST_OFF)


# -- the HTTP server, with limits on concurrent requests and on their duration -----------------------------------------

AT_ONCE = 8
"""Largest number of requests at a time; further connections are closed at once."""
SILENT_S = 5.0
"""Seconds after which the connection of a client that neither sends nor reads is closed."""
LONGEST_S = 20.0
"""Seconds after which any connection is closed."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def setup(self) -> None:
        super().setup()
        # Whoever sends a byte now and then is never silent for long.
        self._end = cut_off(self.connection, LONGEST_S)

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because anybody who reaches the port could fill the log."""


class _Server(ThreadingWSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any, **named: Any) -> None:
        self._places = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(*args, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started, which would have given the place back.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that disconnects is not an error of the companion."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def serve(address: str, port: int) -> Metrics:
    """Serve http://address:port/metrics from a thread until the process ends. Raises `ConfigError`."""
    # When a series began would double their number.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = Metrics()
    kind = _Server6 if ":" in address else _Server
    try:
        server = make_server(address, port, make_wsgi_app(metrics.registry), kind, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(f"metrics_port: port {port} of {address}: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return metrics
