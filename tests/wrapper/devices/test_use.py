"""How busy a GPU was over an interval; the driver's library is stood in for, as there is no card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.devices import streams
from ones_wrapper.devices.streams import Marks
from ones_wrapper.devices.use import DeviceUse
from ones_wrapper.run.meter import WARM_UP, Meter


def test_a_report_has_the_mean_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at most once a second; nothing is known of a CPU, nor of a device that gives no reading."""
    now, readings = 0.0, iter([0.2, 0.6, None, None, None, None])
    use = DeviceUse(torch.device("cpu"), lambda: now)
    use.look()
    assert use.take() == (None, None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    use._read = lambda: next(readings)
    meter, reports = Meter(2.0, lambda: now, use=use), []
    for _ in range(WARM_UP + 8):
        meter.start()
        now += 0.5
        if report := meter.stop(TrainingProgress(), 16, 16, 1.0):
            reports.append((report.gpu_use, report.gpu_memory))
    assert reports == [(pytest.approx(0.4), 70), (None, None)]


@pytest.mark.parametrize(("finishes", "found"), [(3, True), (None, False)])
def test_a_rescue_queries_once_more_after_its_time(
    finishes: int | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have been suspended since its last query."""
    queries, now = 0, 0.0

    def query() -> bool:
        nonlocal queries
        queries += 1
        return queries == finishes

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 0.0 if queries < 2 else 60.0

    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    marks = Marks(torch.device("cpu"), lambda device: SimpleNamespace(query=query))
    marks.step()
    assert (marks.done(2.0), queries) == (found, 3)
