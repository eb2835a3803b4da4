"""Which jobs leave their GPUs idle, by what Slurm or they themselves say. No GPU: all readings are made up."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from ones_db import ReportLine
from ones_db.shape import Shape
from ones_wrapper.protocol import Report
from slurm_ones.config import LimitSettings
from slurm_ones.jobs.gpu_use import LOOK_S, GpuUses
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import GpuUse
from tests.act.make import elastic
from tests.db.make import hello, throughput

LIMITS = LimitSettings(idle_use=0.1, idle_s=1800)
JOBS = {7: elastic(7, Shape(1, 4), "n1")}
Says = Callable[[float], float | None]


class Readings:
    """A Slurm that measures these uses."""

    def __init__(self, **uses: GpuUse) -> None:
        self.uses = {int(name[1:]): use for name, use in uses.items()}
        self.away = False

    def gpu_use(self, job_ids: Collection[int]) -> dict[int, GpuUse]:
        if self.away:
            raise Unreachable("away")
        return {job_id: self.uses[job_id] for job_id in job_ids if job_id in self.uses}


def line(report: Report) -> ReportLine:
    return ReportLine(1, 0.0, report)


def watched(
    says: Says, *, slurm: Readings | None = None, until_s: float = 4000, joins_s: float = 0, every_s: float = 60.0
) -> tuple[GpuUses, list[ReportLine]]:
    """A job that reports each minute for its last minute, if it says anything; a block joins at a time."""
    uses, stored, now = GpuUses(slurm or Readings(), LIMITS), [], 0.0  # type: ignore[arg-type]
    while now < until_s:
        now += every_s
        uses.look(JOBS, now)
        if now == joins_s:
            uses.read(7, [hello()], now)
        if (use := says(now)) is not None:
            stored += uses.read(7, [throughput(2, seconds=every_s, gpu_use=use, gpu_memory=9)], now)
    return uses, stored


@pytest.mark.parametrize(
    ("says", "options", "idle"),
    [
        (lambda now: 0.04, {}, 0.04),
        (lambda now: 0.04, {"until_s": 1500}, None),
        (lambda now: 0.4, {}, None),
        (lambda now: 0.1, {}, None),
        (lambda now: None, {}, None),
        (lambda now: 1.0 if now % 300 == 0 else 0.0, {}, None),
        (lambda now: 0.0 if now < 900 else None, {}, None),
        (lambda now: 0.0, {"until_s": 3000, "joins_s": 1500}, None),
        (lambda now: 0.0, {"until_s": 3500, "joins_s": 1500}, 0.0),
        (lambda now: -1e300, {}, 0.0),
        (lambda now: 1e300, {}, None),
    ],
    ids=["idle", "not for long", "busy", "at the threshold", "says nothing", "bursts", "waits", "a block joined",
         "for long since", "a lie that costs the liar", "a lie"],
)  # fmt: skip
def test_idle_by_its_own_reports(says: Says, options: dict[str, float], idle: float | None) -> None:
    """Its mean over the time that the site set, of what was measured, since its ranks changed last."""
    uses, stored = watched(says, **options)  # type: ignore[arg-type]
    assert uses.idle.get(7) == (pytest.approx(idle) if idle is not None else None)
    assert all(0.0 <= line.report.gpu_use <= 1.0 for line in stored)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(("gpus", "idle"), [(0.2, True), (2.0, False)])
def test_of_whom_slurm_measures_no_claim_counts(gpus: float, idle: bool) -> None:
    """Four GPUs that together are used as a fifth of one, or as two: 5 or 50 % of each."""
    uses, stored = watched(lambda now: 1.0 if idle else 0.0, slurm=Readings(j7=GpuUse(gpus, 4096)))
    assert (7 in uses.idle) == idle
    assert {(line.report.gpu_use, line.report.gpu_memory) for line in stored} == {(gpus / 4, 1024)}  # type: ignore[union-attr]


def test_it_is_idle_until_a_whole_time_shows_otherwise() -> None:
    """Once it has given back, at its new size; an end, a Slurm that is away, and a site that sets no threshold."""
    slurm = Readings(j7=GpuUse(0.0))
    uses, _ = watched(lambda now: None, slurm=slurm)
    slurm.uses[7] = GpuUse(4.0)
    now = 4000.0
    while 7 in uses.idle:
        now += LOOK_S
        uses.look(JOBS, now)
    assert 1000 < now - 4000 <= 2 * 1800
    slurm.away = True
    uses.look(JOBS, now + LOOK_S)
    assert uses.read(7, [throughput(2, gpu_use=0.5)], now)[0].report.gpu_use == 0.5  # type: ignore[union-attr]
    for jobs, later_s in (({}, 1.0), (JOBS, 3.1 * 1800)):
        uses, _ = watched(lambda now: 0.0)
        assert uses.idle == {7: 0.0}
        uses.look(jobs, 4020.0 + later_s)
        assert uses.idle == {}
    off = GpuUses(Readings(j7=GpuUse(0.0)), LimitSettings())  # type: ignore[arg-type]
    for now in range(0, 9000, 60):
        off.look(JOBS, now)
        off.read(7, [throughput(2, seconds=60.0, gpu_use=0.0)], now)
    assert off.idle == {}


def test_a_busy_job_does_not_stay_idle_after_the_clock_was_set_back() -> None:
    """It would give its growth back, and get none, for as long as the clock was ahead."""
    uses = GpuUses(Readings(), LIMITS)  # type: ignore[arg-type]
    for start, use in ((86_400, 0.0), (0, 0.9)):
        for now in range(start, start + 4000, 60):
            uses.look(JOBS, float(now))
            uses.read(7, [throughput(2, seconds=60.0, gpu_use=use, gpu_memory=9)], float(now))
        assert (7 in uses.idle) == (use == 0.0)
