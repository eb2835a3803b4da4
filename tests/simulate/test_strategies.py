"""Simulated jobs with training strategies: what they state, how fast they are, and that no run leaves their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ones_wrapper.protocol.limits import SizeLimits
from slurm_ones.learn.step_time import layout_of
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.training.strategies import MEMORY, Links, leader, mesh, onebit, ring
from slurm_ones.simulate.workloads.catalogue import MESH, RING, STRATEGY_KINDS, build
from slurm_ones.simulate.workloads.generate import generate
from slurm_ones.simulate.workloads.profiles import Workload


def row(limits: tuple[SizeLimits, ...], gpus: int) -> SizeLimits:
    return next(row for row in limits if row.gpus == gpus)


def test_a_ring_has_a_least_size() -> None:
    """One sample of the long text does not fit one GPU, nor two; from four on it does."""
    for degree, fits in ((1, False), (2, True), (4, True)):
        by = ring(16_384, 1024, 24, degree)
        (first, *_) = by.limits(16, 1).sizes
        assert first.gpus == first.together == degree
        assert ((first.most_local(int(MEMORY)) or 0) > 0) == fits
    assert [one.gpus for one in RING.limits(16, 2).sizes] == [4, 8, 12, 16]


def test_bytes_are_those_of_the_formulas() -> None:
    """Ring: 2(N-1) + 4N-2 blocks a layer. Mesh: 3(q-1)/q² of 7BLH + 12H² a layer. 1-bit: a sixteenth of half
    precision. Leaders: a broadcast every so many steps."""
    block = 16_384 / 4 * 1024 * 2 * 24
    assert row(RING.limits(8, 2).sizes, 4).replica_bytes == pytest.approx((6 + 14) * block)
    sent = 3 * 1 / 4 * 12 * 2 * (7 * 1024 * 4096 * 8 + 12 * 4096**2)
    assert row(MESH.limits(8, 8).sizes, 8).replica_bytes == pytest.approx(sent / 8, rel=1e-6)
    assert mesh(1024, 4096, 12, 2).shared == 0.25
    by = onebit(1e8, 0.2)
    before, after = (row(by.limits(8, 1, share).sizes, 8).data_bytes for share in (0.1, 0.3))
    assert before == pytest.approx(2 * 7 / 8 * 2e8) and before / after == pytest.approx(16)
    assert not by.limits(8, 1, 0.1).batch_fixed and by.limits(8, 1, 0.3).batch_fixed
    assert row(leader(1e8, 16).limits(8, 1).sizes, 8).data_bytes == pytest.approx(7 / 8 * 4e8 / 16)


def test_slow_links_cost_a_compressed_job_less() -> None:
    """Once its exchange is packed, four times slower links slow a step on 16 GPUs by less than a tenth."""
    app = build(STRATEGY_KINDS["onebit-bert"])
    assert app.later is not None
    slowed = {}
    for name, one in (("before", app), ("after", app.later)):
        slow = replace(one.speed, links=Links().slower(4.0))  # type: ignore[type-var]
        seconds = [speed.step(4, 16, np.array([32.0]))[0][0] for speed in (one.speed, slow)]
        slowed[name] = seconds[1] / seconds[0]
    assert slowed["before"] > 2.0 and slowed["after"] < 1.1


def test_what_they_state_is_wired() -> None:
    """Each of them tells its bytes at all sizes, so that these enter the prediction."""
    from ones_wrapper.protocol import Spec

    for kind in STRATEGY_KINDS.values():
        app = build(kind)
        assert layout_of(Spec(1, 1, 1, 1, 1, limits=app.limits(0.0))).wired, kind.name


def test_users_ask_for_what_strategies_can_use() -> None:
    workload = generate("strategies", jobs=60, gpus=32)
    named = {s.application.rsplit("-", 1)[0] for s in workload.submissions}
    assert named >= STRATEGY_KINDS.keys()
    for s in workload.submissions:
        limits = workload.applications[s.application].limits(0.0)
        asked = limits.at(s.gpus) if limits is not None else None
        assert limits is None or (asked is not None and s.batch % asked.quantum == 0), s


def _short(name: str, dataset: int) -> dict[str, object]:
    kind = STRATEGY_KINDS[name]
    return {name: build(replace(kind, dataset=dataset, epochs=2), name=name)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ones", "ees"])
def test_the_companion_keeps_their_limits(policy: str) -> None:
    """Under the companion itself they are resized, and the engine finds no job at a size outside its limits; a batch
    that is frozen is never changed again."""
    apps = {**_short("ring-longtext", 600), **_short("optimus-wide", 4000), **_short("onebit-bert", 60_000)}
    jobs = [("ring-longtext", 4, 16), ("optimus-wide", 4, 32), ("onebit-bert", 1, 128), ("onebit-bert", 4, 256)]
    submissions = tuple(
        Submission(f"{name}-{i}", 60.0 * i, name, gpus, batch) for i, (name, gpus, batch) in enumerate(jobs)
    )
    workload = Workload("strategies", submissions, apps)  # type: ignore[arg-type]
    outcome = run(policy, {}, workload, ClusterSpec(4, 4))
    assert all(job.ended is not None for job in outcome.jobs)
    assert sum(job.resizes for job in outcome.jobs) >= 2
