"""What the figures for Prometheus say of ticks, whatever partitions and accounts are called and jobs say of themselves;
and that whoever reaches their port harms nobody."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_db.reasons import NO_REASON, Reason
from ones_db.shape import Shape

pytest.importorskip("prometheus_client")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ones_db import JobRecord, ResizeRecord, Store, ThroughputPoint
from ones_db.reasons import reason
from slurm_ones.companion import Tick
from slurm_ones.config import ConfigError, Settings, parse
from slurm_ones.jobs.elastic import Elastic, Observation
from slurm_ones.learn.nodes import SlowNode
from slurm_ones.learn.throughput import MeasuredThroughput
from slurm_ones.policy.contract import Schedule
from slurm_ones.rules.plan import PartitionSchedule
from slurm_ones.service import metrics
from slurm_ones.service.health import Health, Notifier
from slurm_ones.service.logs import LastErrorHandler
from slurm_ones.service.metrics import NO_PHASES, OTHER, Labels, Metrics, Phases, lost
from slurm_ones.slurm.model import Snapshot
from tests.act.make import elastic, history
from tests.db.make import resized_job
from tests.prometheus import free_port
from tests.test_hostile_names import NAME
from tests.waiting import until

HERE = {"partition": "gpu", "account": "none"}


def tick(at: float, *jobs: Elastic, **other: Any) -> Tick:
    seen = Observation(Snapshot(at, {}, {}, {}), {one.job.job_id: one for one in jobs})
    return Tick(seen, **{"seconds": 0.25, **other})


class Figures:
    """Metrics, and what they serve."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.metrics = Metrics(lambda: self.now)
        self.metrics.leads(Settings(mode="act"))

    def tick(self, *jobs: Elastic, after: float = 60.0, phases: Phases = NO_PHASES, **other: Any) -> None:
        self.now += after
        self.metrics.ticked(self.now, tick(self.now, *jobs, **other), phases)

    def samples(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Of a figure each value by its labels, as Prometheus's own parser reads them."""
        text = generate_latest(self.metrics.registry).decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"slurm_ones_{name}":
                    found[frozenset(sample.labels.items())] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples(name).get(frozenset({**HERE, **labels}.items()))


def resize(state: str = "done", **changes: Any) -> ResizeRecord:
    outcome = Reason("no_checkpoint") if state != "done" else NO_REASON
    given: dict[str, Any] = {"ended": 100.0, "outcome": outcome, "id": 1} | changes
    return ResizeRecord(1, 0, Shape(1, 1), 32, Shape(1, 4), 64, state, 50.0, **given)


def test_gpu_seconds_beyond_what_jobs_asked_for() -> None:
    """Also of a job that runs with fewer; none of one that waits, nor of a time in which there was no tick."""
    figures = Figures()
    big, small, waits = elastic(1, Shape(1, 4), "n1"), elastic(2, Shape(1, 1), "n2"), elastic(3, Shape(1, 2))
    asked = {1: history(1), 2: history(2, job=JobRecord(2, "j", "a", 1.0, Shape(2, 2))), 3: history(3)}
    figures.tick(big, small, waits, histories=asked)
    assert figures.value("gpu_seconds_total") == 0.0
    figures.tick(big, small, waits, histories=asked)
    assert figures.value("gpu_seconds_total") == 300.0
    assert figures.value("gpu_seconds_gained_total") == 180.0
    assert figures.value("gpu_seconds_given_up_total") == 180.0
    figures.tick(big, after=86_400.0, histories=asked)
    assert figures.value("gpu_seconds_total") == 300.0 + 4 * 180.0
    figures.tick(elastic(4, Shape(1, 4), "n1", start_time=figures.now + 50.0), histories={4: history(4)})
    assert figures.value("gpu_seconds_total") == 300.0 + 4 * 180.0 + 4 * 10.0
    figures.tick(big, after=-500.0)
    assert figures.value("gpu_seconds_total") == 300.0 + 4 * 180.0 + 4 * 10.0


def test_slow_nodes() -> None:
    """As fast as jobs showed; not shown any more once a tick finds none."""
    figures = Figures()
    figures.tick(slow_nodes={"n3": SlowNode("n3", 0.6, 0.05, 4, 2)})
    assert figures.samples("slow_node_speed") == {frozenset({("node", "n3")}): 0.6}
    figures.tick()
    assert figures.samples("slow_node_speed") == {}


def test_what_another_companion_counted_is_not_counted_again() -> None:
    """That of one that leads again begins anew; and how long its last tick took is said no longer than it ticks."""
    figures = Figures()
    job, asked = elastic(1, Shape(1, 4), "n1"), {1: history(1)}
    figures.tick(job, histories=asked)
    assert figures.samples("last_tick_seconds") == {frozenset(): 0.25}
    figures.now += 3600.0
    assert figures.samples("last_tick_seconds") == {}
    figures.metrics.leads(Settings(mode="act"))
    figures.tick(job, histories=asked)
    assert figures.value("gpu_seconds_total") == 0.0
    figures.tick(job, histories=asked)
    assert figures.value("gpu_seconds_total") == 240.0


def test_each_error_is_counted() -> None:
    metrics, last = Metrics(), LastErrorHandler()
    health = Health(Notifier({}), last, metrics=metrics)
    for _ in range(2):
        for _ in range(3):
            last.handle(logging.makeLogRecord({"levelno": logging.ERROR, "msg": "no answer", "created": 5.0}))
        health.watchdog_ping()
    health.watchdog_ping()
    assert "slurm_ones_errors_total 6.0" in generate_latest(metrics.registry).decode()


def test_why_jobs_stay_as_they_are() -> None:
    """Counted when it begins, shown as long as it lasts, and gone once nobody ticks here."""
    figures = Figures()
    refused, waits = elastic(1, Shape(1, 1), "n1", refusal=reason("resize_off")), elastic(2, Shape(1, 2))
    outcomes = {2: reason("gpus_not_free", shape="1x2")}
    figures.tick(refused, waits, outcomes=outcomes)
    # Prometheus sees no increase in a series that begins with 1.
    assert figures.value("refusals_total", reason="gpus_not_free") == 0.0
    for _ in range(2):
        figures.tick(refused, waits, outcomes=outcomes)
    assert figures.value("refused_jobs", reason="resize_off") == 1.0
    assert figures.value("refusals_total", reason="gpus_not_free") == 1.0
    figures.tick(refused, waits, outcomes={2: reason("begins")})
    assert figures.value("refused_jobs", reason="gpus_not_free") is None
    figures.tick(refused, waits, outcomes=outcomes)
    assert figures.value("refusals_total", reason="gpus_not_free") == 2.0
    assert (figures.value("running_jobs"), figures.value("waiting_jobs"), figures.value("gpus")) == (1.0, 1.0, 1.0)
    figures.now += 1000.0
    assert figures.value("running_jobs") is None and figures.value("refused_jobs", reason="resize_off") is None
    assert figures.value("refusals_total", reason="gpus_not_free") == 2.0


def test_a_new_reason_of_several_jobs_begins_at_0_as_well() -> None:
    """Jobs that are refused at one tick for one reason all count for `increase()`, which a series at 1 would hide."""
    figures = Figures()
    jobs = [elastic(number, Shape(1, 2)) for number in (1, 2, 3)]
    outcomes = {number: reason("gpus_not_free", shape="1x2") for number in (1, 2, 3)}
    figures.tick(*jobs, outcomes=outcomes)
    assert figures.value("refusals_total", reason="gpus_not_free") == 0.0
    figures.tick(*jobs, outcomes=outcomes)
    assert figures.value("refusals_total", reason="gpus_not_free") == 3.0
    figures.tick(outcomes={})
    figures.tick(*jobs, outcomes=outcomes)
    assert figures.value("refusals_total", reason="gpus_not_free") == 6.0


def test_a_resize_is_counted_once_with_its_phases() -> None:
    """At the tick after its end, though its job has ended with it; what a job says is no longer than the resize was."""
    figures = Figures()
    job = elastic(1, Shape(1, 4), "n1")
    figures.tick(job)
    # Prometheus sees no increase in a series that begins with 1.
    assert figures.value("resizes_total", way="requeue", state="done") == 0.0
    figures.tick(ended=[resize()])
    assert [one.id for one in figures.metrics.due] == [1]
    assert figures.value("resizes_total", way="requeue", state="done") == 1.0
    told = {"pause_s": 1e300, "stall_s": 2.0, "launch_s": -5.0, "load_s": 3.0, "ready_s": 9.0}
    figures.tick(phases={1: told})
    figures.tick(phases={1: told})

    def phase(name: str) -> tuple[float | None, float | None]:
        labels = {"way": "requeue", "phase": name}
        count, total = (figures.value(f"resize_phase_seconds_{of}", **labels) for of in ("count", "sum"))
        return count, total

    assert phase("total") == phase("pause") == (1.0, 50.0)
    assert phase("load") == (1.0, 3.0) and phase("launch") == (1.0, 0.0) and phase("queue") == (0.0, 0.0)
    assert phase("ready") == (None, None)
    assert figures.value("gpu_seconds_lost_total", way="requeue") == 1 * 2.0 + 4 * 3.0
    figures.tick(job, ended=[resize("abandoned"), replace(resize("ended"), restart=-1, outcome=Reason(NAME))])
    assert figures.value("resize_failures_total", reason="no_checkpoint") == 0.0
    figures.tick(job)
    assert figures.value("resize_failures_total", reason="no_checkpoint") == 1.0
    assert figures.value("resize_failures_total", reason=OTHER) == 1.0
    assert figures.value("resizes_total", way="waiting", state="ended") == 1.0


def test_what_a_requeue_loses_without_effect() -> None:
    assert lost(resize("rolled_back"), {"launch": 3.0}, 2.0) == 1 * 2.0 + 1 * 3.0


def test_what_blocks_lose() -> None:
    """All GPUs during the pause, and those that join until they train."""
    joins = resize(mechanism="blocks", added=((1, Shape(1, 2)), (2, Shape(1, 1))))
    assert lost(joins, {"pause": 0.5, "ready": 8.0}, 0.0) == 4 * 0.5 + 3 * 8.0


def test_how_far_off_a_model_was() -> None:
    """The first measurement at a size, over what the model said before it: a number that is none counts for nothing."""
    figures = Figures()
    job = elastic(1, Shape(1, 2), "n1")

    def look(model: Any, *points: ThroughputPoint, **on: Any) -> None:
        view: Any = SimpleNamespace(model=model, on=on)
        decided = [PartitionSchedule("gpu", Schedule({}), 0.1, {1: view})]
        figures.tick(job, decided=decided, histories={1: history(1, throughput=points)})

    first = ThroughputPoint(Shape(1, 1), 32, 100.0, 5.0)
    learned = MeasuredThroughput.of([first])
    look(MeasuredThroughput.of(()))
    look(learned, first)
    look(learned, first)
    assert figures.value("throughput_ratio_count", learned_from="other jobs") == 1.0
    assert figures.value("throughput_ratio_count", learned_from="own sizes") == 0.0
    second = ThroughputPoint(Shape(1, 2), 64, 190.0, 9.0)
    look(learned, first, second)
    assert figures.value("throughput_ratio_count", learned_from="own sizes") == 1.0
    ratio = figures.value("throughput_ratio_sum", learned_from="own sizes")
    assert ratio is not None and 0.5 < ratio < 2.0
    look(learned, second, fast=MeasuredThroughput.of([ThroughputPoint(Shape(1, 1), 32, 1000.0, 5.0)]))
    look(learned, second, ThroughputPoint(Shape(1, 4), 128, 3800.0, 9.5, "fast"))
    faster = figures.value("throughput_ratio_sum", learned_from="own sizes")
    assert faster is not None and 0.5 < faster - ratio < 2.0, "by the model of that type of GPU"
    for odd in (math.nan, math.inf, 1e300):
        look(learned, second, ThroughputPoint(Shape(1, 4), 64, odd, 10.0))
        look(learned, second)
    total = figures.value("throughput_ratio_sum", learned_from="own sizes")
    assert total is not None and total < 2000.0


@pytest.mark.slow
def test_names_are_text_and_few() -> None:
    """Protects a Prometheus from whoever names partitions and accounts: no line of its own, no series without end."""
    labels = Labels(partitions=3, pairs=5)
    assert labels.who("gpu", "") == ("gpu", "none") and labels.who("gpu", NAME)[1].isprintable()
    assert len(labels.who("x" * 10_000, "")[0]) == 64
    pairs = {labels.who(f"p{i % 50}", f"a{i}") for i in range(1000)}
    assert len({name for name, _ in pairs}) <= 4 and len(pairs) <= 10 and (OTHER, OTHER) in pairs
    assert labels.who("gpu", "") == ("gpu", "none")

    figures = Figures()
    jobs = [elastic(1, Shape(1, 1), "n1", account=NAME, partitions=(NAME,))]
    jobs += [elastic(2, Shape(1, 1), "n1", account='"} evil 1\n# TYPE x', partitions=("\udcff\ud800",))]
    jobs += [elastic(i, Shape(1, 1), "n1", account=f"a{i}", partitions=(f"p{i % 40}",)) for i in range(3, 500)]
    figures.tick(*jobs)
    figures.tick(*jobs, ended=[replace(resize(), job_id=job.job.job_id) for job in jobs])
    figures.tick(*jobs)
    text = generate_latest(figures.metrics.registry).decode()
    assert text.count("\n") < 20_000 and all(line.isprintable() for line in text.split("\n"))
    assert sum(figures.samples("running_jobs").values()) == len(jobs)


def test_a_tick_costs_next_to_nothing() -> None:
    """At 1,000 jobs, all of them measured and refused something: against the seconds that their decision takes."""
    figures = Figures()
    jobs = [elastic(i, Shape(1, 2), "n1", account=f"a{i % 37}", partitions=(f"p{i % 10}",)) for i in range(1000)]
    told = {i: history(i, throughput=(ThroughputPoint(Shape(1, 2), 64, 190.0, 9.0),)) for i in range(1000)}
    view: Any = SimpleNamespace(model=MeasuredThroughput.of(()), on={})
    decided = [PartitionSchedule("p0", Schedule({}), 0.1, dict.fromkeys(range(1000), view))]
    given = {
        "histories": told,
        "decided": decided,
        "outcomes": dict.fromkeys(range(1000), reason("near_end", seconds=1.0)),
    }
    took = []
    for _ in range(5):
        began = time.thread_time()
        figures.tick(*jobs, **given)
        took.append(time.thread_time() - began)
    print(f"{1000 * min(took):.1f} ms")
    assert min(took) < 0.05


def test_phases_come_from_the_database(empty_url: str, tmp_path: Path) -> None:
    """As the companion runs: one that cannot be read costs its figures, and nothing else."""
    metrics = Metrics()
    with Store.open(empty_url, "here") as store:
        resized_job(store, 7)
        (done,) = store.resizes(7)
        assert store.resize_phases([done])[done.id]["load_s"] > 0
        health = Health(Notifier({}), LastErrorHandler(), metrics=metrics)
        health.leads(store, Settings())
        health.ticked(tick(1.0, ended=[done]))
        assert metrics.due == [done]
        health.ticked(tick(2.0))
        assert metrics.due == []
        text = generate_latest(metrics.registry).decode()
        assert 'phase="load",way="requeue"} 1.0' in text
        health.ticked(tick(3.0, ended=[done]))
    (tmp_path / "ones.sqlite").write_bytes(b"no database" * 1000)
    health.ticked(tick(4.0))
    text = generate_latest(metrics.registry).decode()
    assert 'phase="load",way="requeue"} 1.0' in text and 'phase="total",way="requeue"} 2.0' in text
    health.ticked(tick(5.0, ended=[None]))  # an error of ours
    health.ticked(tick(6.0))
    assert "slurm_ones_ticks_total 6.0" in generate_latest(metrics.registry).decode()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.5)
    monkeypatch.setattr(metrics, "LONGEST_S", 1.0)
    found = free_port()
    metrics.serve("127.0.0.1", found)
    yield found


def fetched(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return b"slurm_ones_ticks_total" in answer.read()
    return False


def test_who_keeps_the_port_busy_harms_nobody(port: int) -> None:
    """A thousand silent clients, some that send a byte now and then, and one with an endless line: a few at a time,
    none for long, and then figures again."""
    clients, before = [], threading.active_count()
    for n in range(1000):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        clients.append(client)
        if n % 100 == 0:
            time.sleep(0.01)
    assert threading.active_count() < before + 40
    end = time.monotonic() + 60
    while not fetched(port):
        assert time.monotonic() < end
        for client in clients[:20]:
            with suppress(OSError):
                client.send(b"G" * 2000)
        time.sleep(0.1)
    for client in clients:
        client.close()


def test_a_place_is_given_back_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    with monkeypatch.context() as patch:
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            if "process_request_thread" in thread.name:
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(threading.Thread, "start", refused)
        assert not any(fetched(port) for _ in range(metrics.AT_ONCE))
    until(lambda: fetched(port))


def test_where_it_listens() -> None:
    """At an address of this machine; a name, or what is no address, is refused with a word of what is."""
    assert parse('metrics_address = "::1"').metrics_address == "::1"
    for wrong in ("localhost", "10.0.0", "", "0.0.0.0:80"):
        with pytest.raises(ConfigError, match=r"metrics_address: .*write an IP address of this machine"):
            parse(f'metrics_address = "{wrong}"')
    with pytest.raises(ConfigError, match="metrics_port: port 1 of"):
        metrics.serve("192.0.2.7", 1)
