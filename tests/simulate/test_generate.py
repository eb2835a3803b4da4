"""Generated workloads: what a seed fixes, what a mix and a load mean, and what users ask for."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.training.application import Application, Position, TrainingCurve
from slurm_ones.simulate.workloads.catalogue import KINDS, SC21_KINDS, ParametricSpeed, build
from slurm_ones.simulate.workloads.generate import (
    MIXES,
    OFFERED,
    USEFUL,
    best_batch,
    day_rate,
    generate,
    offered,
    sensible_requests,
    submission_times,
    undisturbed_s,
)
from slurm_ones.simulate.workloads.profiles import Workload
from tests.marks import NIGHTLY, nightly


def test_deadlines_change_nothing_else() -> None:
    """So that policies are compared on the same jobs with and without; they lie as ElasticFlow's generator has them."""
    plain, due = generate("philly", jobs=40, seed=3), generate("philly", jobs=40, seed=3, deadlines=0.5)
    assert [replace(s, deadline_s=None) for s in due.submissions] == list(plain.submissions)
    ratios = [
        s.deadline_s / undisturbed_s(due.applications[s.application], s, 4)
        for s in due.submissions
        if s.deadline_s is not None
    ]
    assert len(ratios) == 20
    assert 0.5 <= min(ratios) < 0.75
    assert 1.25 < max(ratios) <= 1.5
    with pytest.raises(BadInput, match="deadlines: 2 is not between 0 and 1"):
        generate("philly", deadlines=2)


@cache
def philly(seed: int) -> Workload:
    return generate("philly", seed=seed)


def same(one: Workload, other: Workload) -> bool:
    """Equal jobs, and applications of equal speed, noise and length."""
    probe = np.array([64.0, 256.0])
    return one.submissions == other.submissions and all(
        np.array_equal(app.step_seconds(2, 8, probe), other.applications[name].step_seconds(2, 8, probe))
        and np.array_equal(app.var, other.applications[name].var)
        and app.total == other.applications[name].total
        for name, app in one.applications.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind == "philly" else nightly(kind) for kind in MIXES])
def test_a_seed_reproduces_everything_and_another_does_not(kind: str) -> None:
    assert same(generate(kind, seed=3), generate(kind, seed=3))
    assert not same(generate(kind, seed=3), generate(kind, seed=4))


@pytest.mark.slow
def test_seeds_perturb_what_applications_are() -> None:
    """No policy can be tuned to one profile: speed, noise and length differ from seed to seed by tens of percent."""
    lengths, speeds = [], []
    for seed in range(8 if NIGHTLY else 4):
        app = philly(seed).applications["resnet18-cifar10-a"]
        lengths.append(app.total)
        speeds.append(float(app.step_seconds(1, 1, np.array([512.0]))[0]))
    for values in (lengths, speeds):
        spread = np.std(np.log(values))
        assert 0.1 < spread < 0.7


@pytest.mark.slow
def test_philly_is_skewed() -> None:
    """Most jobs ask for one GPU and are short; a few percent of the jobs take most of the GPU time."""
    gpus, hours, shares = [], [], []
    for seed in range(5):
        work = philly(seed)
        each = np.array([s.gpus * undisturbed_s(work.applications[s.application], s, 4) for s in work.submissions])
        gpus += [s.gpus for s in work.submissions]
        hours += list(each / 3600.0)
        shares.append(np.sort(each)[-len(each) // 20 :].sum() / each.sum())
    assert np.mean(np.array(gpus) == 1) > 0.45
    assert np.median(hours) < 2.0
    assert max(hours) > 100.0
    assert np.mean(shares) > 0.5


def test_uniform_has_every_kind_as_often() -> None:
    work = generate("uniform", jobs=150, seed=1)
    counts = [sum(s.application[:-2] == name for s in work.submissions) for name in KINDS]
    assert sum(counts) == 150
    assert max(counts) - min(counts) <= 1


@pytest.mark.slow
def test_load_is_what_is_asked_for_over_what_there_is() -> None:
    """At load 1 jobs ask for as much as in Pollux's study; twice the load is half the time."""
    found = [offered(philly(seed), 64, 4) for seed in range(8)]
    assert np.mean(found) == pytest.approx(OFFERED, rel=0.2)
    usual, twice = philly(2).submissions, generate("philly", seed=2, load=2.0).submissions
    assert [s.application for s in usual] == [s.application for s in twice]
    assert [s.time / 2 for s in usual] == pytest.approx([s.time for s in twice], abs=0.51)


@pytest.mark.slow
def test_twice_the_cluster_gets_twice_the_rate() -> None:
    usual = np.mean([offered(philly(seed), 64, 4) for seed in range(3)])
    large = np.mean([offered(generate("philly", seed=seed, gpus=256), 256, 4) for seed in range(3)])
    assert large == pytest.approx(usual, rel=0.25)


def test_sc21_arrives_as_published() -> None:
    """Fifty jobs, whole seconds between 0 and 60 apart, GPUs and batches of the paper's table."""
    work = generate("ones-sc21", seed=0)
    gaps = np.diff([0.0, *(s.time for s in work.submissions)])
    assert len(work.submissions) == 50
    assert np.array_equal(gaps, np.round(gaps))
    assert gaps.min() >= 0 and gaps.max() <= 60
    many = [g for seed in range(20) for g in np.diff([s.time for s in generate("ones-sc21", seed=seed).submissions])]
    assert np.mean(many) == pytest.approx(30.0, rel=0.08)
    asked = {s.application.split("-")[0]: (s.gpus, s.batch) for s in work.submissions}
    assert asked["resnet50"] == (16, 512)
    assert asked["googlenet"] == (4, 1024)
    assert len(SC21_KINDS) == 20


@pytest.mark.parametrize("kind", SC21_KINDS, ids=lambda kind: kind.name)
def test_sc21_jobs_last_minutes(kind) -> None:  # type: ignore[no-untyped-def]
    """At the size asked for every job of the paper's table runs for some 100 to 600 s, and reaches its target."""
    app = build(kind)
    size, batch = kind.gpus, min(kind.base_batch * kind.gpus, kind.max_batch)
    assert 100 < app.seconds(-(-size // 4), size, float(batch), 0.0) < 600
    assert app.metric_at(app.total, batch) >= app.target


def trained(app: Application, batch: int) -> tuple[int, float]:
    """Passes over the data until the training ends at one batch, and its metric then."""
    curve, at, ends = TrainingCurve(app, 1.0), Position(), False
    while not (ends or curve.finished(at)):
        at, ends = curve.next_pass(curve.use(at, app.dataset, batch, 1))
    return at.epoch, app.metric_at(at.progress, batch)


def test_patience_ends_where_the_last_epoch_does_at_the_base_batch() -> None:
    """An application's length means what it says: at efficiency 1 its epochs are the passes it makes."""
    kind = next(kind for kind in SC21_KINDS if kind.name == "resnet18-cifar20k")
    app = build(kind)
    assert trained(app, app.base_batch)[0] == kind.epochs


def test_too_large_a_batch_makes_more_passes_and_misses_the_target() -> None:
    """Ignoring efficiency costs accuracy: with little gradient noise, patience runs out before the target."""
    app = build(next(kind for kind in SC21_KINDS if kind.name == "resnet18-cifar20k"), noise=0.6)
    few, reached = trained(app, app.base_batch)
    many, missed = trained(app, app.max_batch)
    assert reached >= app.target
    assert missed < app.target
    assert many > 2 * few


@given(
    st.sampled_from(sorted(KINDS)), st.floats(0.5, 2.0), st.floats(0.5, 2.0), st.floats(0.4, 2.5), st.integers(1, 64)
)
def test_perturbed_kinds_stay_sensible(name: str, compute: float, exchange: float, noise: float, gpus: int) -> None:
    """Whatever a seed draws, more samples take no less time, metrics rise, and efficiency falls with the batch."""
    app = build(KINDS[name], compute=compute, exchange=exchange, noise=noise)
    batches = np.unique(np.geomspace(app.base_batch, app.max_batch, 12).round())
    batches = batches[batches >= gpus]
    steps = app.step_seconds(-(-gpus // 4), gpus, batches)
    assert np.all(np.isfinite(steps)) and np.all(steps > 0)
    for progress in (0.0, app.total / 2, app.total):
        worth = app.efficiency(progress, batches)
        assert np.all(np.diff(worth) <= 1e-12)
        assert np.all((worth > 0) & (worth <= 1))
    assert np.all(np.diff(app.metric[:, 0]) >= -1e-12)
    assert app.metric[-1, 0] >= app.target


def test_speed_overlaps_compute_and_exchange() -> None:
    """A step takes at least the longer of its parts and at most their sum; alone a GPU exchanges nothing."""
    speed = ParametricSpeed(0.01, 1e-3, (0.005, 0.001), (0.05, 0.002))
    local = np.array([1.0, 10.0, 100.0])
    compute = 0.01 + 1e-3 * local
    alone, none = speed.step(1, 1, local)
    assert np.allclose(alone, compute) and not none.any()
    step, exchange = speed.step(4, 16, local)
    assert np.all(step >= np.maximum(compute, 0.05 + 14 * 0.002)) and np.all(step <= compute + 0.05 + 14 * 0.002)
    assert np.allclose(step - exchange, compute)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.size != "small"])
def test_users_ask_for_sizes_that_pay(name: str) -> None:
    """A well-informed user's GPUs are each 50 to 80 % as useful as one alone, at the best batch of that size."""
    app = build(KINDS[name])
    one = best_batch(app, 1, 4)[0]
    for gpus, batch in sensible_requests(app, 64, 4):
        goodput, chosen = best_batch(app, gpus, 4)
        assert chosen == batch
        assert USEFUL[0] <= goodput / one / gpus <= USEFUL[1]
        assert gpus < 4 or gpus % 4 == 0


@pytest.mark.parametrize("how", ["poisson", "uniform", "diurnal"])
def test_arrivals_come_at_the_rate_asked_for(how: str) -> None:
    rng = np.random.default_rng(0)
    times = submission_times(how, 4000, 8 * 3600.0, rng)  # type: ignore[arg-type]
    assert np.all(np.diff(times) >= 0)
    assert times[-1] == pytest.approx(8 * 3600.0, rel=0.05)
    gaps = np.diff(times)
    spread = {"poisson": 1.0, "uniform": 1 / math.sqrt(3), "diurnal": 1.0}[how]
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.15)


def test_diurnal_arrivals_peak_in_the_afternoon() -> None:
    times = submission_times("diurnal", 5000, 24 * 3600.0, np.random.default_rng(1)) / 3600.0
    afternoon, night = (np.sum((times >= a) & (times < a + 4)) for a in (4, 16))
    assert afternoon > 3 * night
    hours = np.linspace(0, 24, 1000, endpoint=False) * 3600.0
    assert day_rate(hours).mean() == pytest.approx(1.0, abs=1e-3)


def test_rigid_jobs_are_the_share_asked_for() -> None:
    assert sum(not s.elastic for s in generate("philly", jobs=80, rigid=0.25).submissions) == 20


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kind": "phili"}, "philly"),
        ({"arrivals": "never"}, "poisson, uniform, diurnal"),
        ({"load": 0.0}, "load: 0.0"),
        ({"load": math.nan}, "load: nan"),
        ({"jobs": 0}, "jobs: 0"),
        ({"hours": -1.0}, "hours: -1.0"),
        ({"rigid": 1.5}, "rigid: 1.5"),
    ],
)
def test_bad_options_are_named(changed: dict[str, object], named: str) -> None:
    options: dict[str, object] = {"kind": "philly", **changed}
    with pytest.raises(BadInput, match=named):
        generate(str(options.pop("kind")), **options)  # type: ignore[arg-type]
