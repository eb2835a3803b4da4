"""The bound: never beaten, near the optimum where that is known, and what `--bound` shows of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slurm_ones.bound.bound import FINE_MOMENTS, FINE_PARTS, MOMENTS, SAFE, bound_of, fluid_mean_jct_s, weights_of
from slurm_ones.bound.curves import Curve, Pool, Work, curve, pools_of, work_of
from slurm_ones.bound.dual import Dual, improved
from slurm_ones.cli import app as command_line
from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.outcome import alone_seconds
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec, Part, asked_shape
from slurm_ones.simulate.study.figures import Bound
from slurm_ones.simulate.training.application import Hot, Requeue, on_kind
from slurm_ones.simulate.workloads.generate import generate, undisturbed_s
from slurm_ones.simulate.workloads.profiles import Workload
from tests.marks import examples, nightly

PARTS = 32


def flat(work: float, exponent: float, most: int) -> Curve:
    """Rate n^exponent, the same all the time."""
    return on_kinds(work, exponent, (most,), (1.0,)).counted(np.ones(1), np.array([most]))


def on_kinds(work: float, exponent: float, there: tuple[int, ...], faster: tuple[float, ...]) -> Curve:
    """Rate n^exponent of the slowest kind, the same all the time; there are so many GPUs of each, so much `faster`."""
    columns = [(n, k, False) for k, most in enumerate(there) for n in range(1, most + 1)]
    columns += [(n, k, True) for k in range(len(there) - 1) for n in range(2, sum(there[k:]) + 1)]
    sizes, kind, mixed = (np.array(each) for each in zip(*columns, strict=True))
    rate = np.array(faster)[kind] * sizes**exponent
    return Curve(np.full(PARTS, work / PARTS), sizes, kind, mixed.astype(bool), np.tile(rate, (PARTS, 1)))


def edges_of(work: Work, intervals: int) -> Floats:
    over = float(work.submitted.max() + 3.0 * work.alone_s.sum() * work.gpus)
    return np.linspace(0.0, over, intervals + 1)


def bound(work: Work, intervals: int = 24, evaluations: int = 40) -> float:
    """Mean JCT."""
    return improved(Dual(work, edges_of(work, intervals), 8), evaluations)[0] / len(work.submitted)


def optimum(curves: list[Curve], submitted: list[int], there: tuple[int, ...], faster: tuple[float, ...]) -> float:
    """Mean JCT of the best schedule of whole GPUs that changes at whole seconds alone, by trying all: any GPUs of each
    kind, at the pace of the slowest. The curves are those on the slowest kind."""
    total = [round(float(c.work.sum()), 6) for c in curves]
    ways = list(itertools.product(*(range(n + 1) for n in there)))
    pace = {way: min((f for n, f in zip(way, faster, strict=True) if n), default=0.0) for way in ways}

    @cache
    def best(now: int, done: tuple[float, ...]) -> float:
        live = [j for j in range(len(curves)) if done[j] < total[j] - 1e-9]
        if not live:
            return 0.0
        waiting = [j for j in live if submitted[j] <= now]
        if not waiting:
            return best(now + 1, done)
        found = np.inf
        for chosen in itertools.product(ways, repeat=len(waiting)):
            taken = np.sum(chosen, axis=0)
            if not taken.any() or (taken > there).any():
                continue
            after, waited = list(done), 0.0
            for j, way in zip(waiting, chosen, strict=True):
                rate = pace[way] * float(curves[j].rate[0, sum(way) - 1]) if sum(way) else 0.0
                needs = (total[j] - done[j]) / rate if rate else np.inf
                waited += min(needs, 1.0)
                after[j] = total[j] if needs <= 1.0 else round(done[j] + rate, 6)
            found = min(found, waited + best(now + 1, tuple(after)))
        return found

    return best(0, (0.0,) * len(curves)) / len(curves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("works", "exponent", "submitted", "there", "faster"),
    [
        nightly((4.0, 7.0), 0.5, (0, 0), (2,), (1.0,)),
        nightly((3.0, 6.0, 9.0), 1.0, (0, 0, 0), (2,), (1.0,)),
        nightly((8.0, 3.0), 0.7, (0, 2), (3,), (1.0,)),
        ((5.0, 5.0, 2.0), 0.8, (0, 1, 3), (2,), (1.0,)),
        nightly((4.0, 7.0), 0.5, (0, 0), (1, 1), (1.0, 2.0)),
        ((4.0, 5.0), 0.9, (0, 1), (2, 1), (1.0, 1.5)),
        nightly((3.0, 6.0, 4.0), 0.7, (0, 0, 1), (1, 1), (1.0, 1.0)),
        nightly((8.0, 3.0), 1.0, (0, 0), (2, 2), (1.0, 1.2)),
    ],
)
def test_is_just_below_the_best_of_all_schedules(
    works: tuple[float, ...],
    exponent: float,
    submitted: tuple[int, ...],
    there: tuple[int, ...],
    faster: tuple[float, ...],
) -> None:
    curves = [on_kinds(work, exponent, there, faster) for work in works]
    work = Work(curves, np.arange(len(works)), np.array(submitted, float), np.array(there))
    edges = edges_of(work.counted(np.ones(len(there))), 40)
    weights, prices = weights_of(work, edges)
    found = improved(Dual(work.counted(weights), edges, 8), 40, prices)[0] / len(works)
    best = optimum([flat(work, exponent, sum(there)) for work in works], list(submitted), there, faster)
    assert 0.9 * best <= found <= best + 1e-6


def test_gpus_of_several_kinds_count_as_the_cheapest_that_are_no_slower() -> None:
    curve = on_kinds(8.0, 1.0, (2, 3), (1.0, 2.0)).counted(np.array([0.5, 0.8]), np.array([2, 3]))
    assert curve.sizes[:5].tolist() == pytest.approx([0.5, 1.0, 0.8, 1.6, 2.4])
    assert curve.sizes[5:].tolist() == pytest.approx([1.3, 1.8, 2.3, 3.1])
    dear = on_kinds(8.0, 1.0, (2, 3), (1.0, 2.0)).counted(np.array([3.0, 0.8]), np.array([2, 3]))
    assert dear.sizes[5:].tolist() == pytest.approx([3.8, 4.6, 5.4, 6.2])


def random_schedule(work: Work, rng: np.random.Generator) -> float:
    """Mean JCT where shares of a kind of GPUs are drawn at random whenever a job comes, ends or begins another part."""
    jobs = len(work.submitted)
    left = [work.curves[c].work.copy() for c in work.curve]
    now, ended = 0.0, np.full(jobs, np.nan)
    while np.isnan(ended).any():
        there = [j for j in range(jobs) if work.submitted[j] <= now and np.isnan(ended[j])]
        later = [float(t) - now for t in work.submitted if t > now]
        rates, horizon = {}, min(later, default=np.inf)
        kind = rng.integers(0, len(work.there), len(there))
        shares = rng.dirichlet(np.full(len(there), rng.choice([0.2, 1.0, 5.0])), 1)[0] if there else np.zeros(0)
        for j, k, share in zip(there, kind, shares, strict=True):
            own = work.curves[work.curve[j]]
            part = int(np.flatnonzero(left[j] > 1e-12)[0])
            here = np.flatnonzero((own.kind == k) & ~own.mixed)
            gpus = share / float(shares[kind == k].sum()) * float(work.there[k])
            column = int(here[rng.integers(max(int(gpus), 1), len(here) + 1) - 1])
            # In turns with nobody: a share of the time on a larger size.
            rates[j] = (part, float(own.rate[part, column]) * min(gpus / own.sizes[column], 1.0))
            if rates[j][1] > 0:
                horizon = min(horizon, left[j][part] / rates[j][1])
        now += horizon
        for j, (part, rate) in rates.items():
            left[j][part] = max(left[j][part] - rate * horizon, 0.0)
            if left[j][part] < 1e-9:
                left[j][part] = 0.0
            if not left[j].any():
                ended[j] = now
    return float((ended - work.submitted).mean())


@st.composite
def works(draw: st.DrawFn) -> Work:
    """A few jobs whose speed on many GPUs, of one kind or two, changes while they train."""
    there = np.array(draw(st.lists(st.integers(2, 8), min_size=1, max_size=2)))
    curves = []
    for _ in range(draw(st.integers(1, 3))):
        low, high, faster = draw(st.floats(0.1, 0.9)), draw(st.floats(0.1, 1.0)), draw(st.floats(1.0, 4.0))
        shape = on_kinds(1.0, 1.0, tuple(there.tolist()), (1.0, faster)[: len(there)])
        paces = np.where(shape.kind == 1, faster, 1.0)
        rate = np.array([paces * shape.sizes ** (low + (high - low) * k / PARTS) for k in range(PARTS)])
        # Parts take equally long with the best GPUs, as `curves` cuts them.
        work = draw(st.floats(5.0, 500.0)) / PARTS * rate.max(axis=1)
        curves.append(replace(shape, work=work, rate=rate))
    jobs = draw(st.integers(1, 5))
    curve = np.array(draw(st.lists(st.integers(0, len(curves) - 1), min_size=jobs, max_size=jobs)))
    submitted = np.sort(draw(st.lists(st.floats(0.0, 300.0), min_size=jobs, max_size=jobs)))
    return Work(curves, curve, submitted - submitted[0], there)


@pytest.mark.slow
@examples(8)
@given(works(), st.floats(0.05, 1.0), st.integers(0, 2**32 - 1))
def test_no_schedule_drawn_at_random_beats_it(work: Work, weight: float, seed: int) -> None:
    weights = np.append(np.full(len(work.there) - 1, weight), 1.0)
    found = bound(work.counted(weights), intervals=16, evaluations=8)
    rng = np.random.default_rng(seed)
    assert all(found <= random_schedule(work, rng) * (1 + 1e-6) for _ in range(8))
    assert found <= fluid_mean_jct_s(work, weights) * (1 + 1e-3)


@pytest.fixture(scope="module")
def dual() -> Dual:
    """Of three jobs with two curves on four GPUs."""
    jobs, submitted = np.array([0, 1, 0]), np.array([0.0, 3.0, 20.0])
    work = Work([flat(40.0, 0.6, 4), flat(90.0, 0.9, 4)], jobs, submitted, np.array([4]), 4.0)
    return Dual(work, np.linspace(0.0, 300.0, 31), 8)


def test_any_prices_give_a_bound(dual: Dual) -> None:
    best, _ = improved(dual, 80)
    rng = np.random.default_rng(1)
    drawn = [dual.value(rng.gamma(0.5, 0.3, 30))[0] for _ in range(10)]
    assert max(drawn) <= best + 1e-6
    least = float(dual.work.alone_s.sum())
    assert dual.value(np.zeros(30))[0] == pytest.approx(least, rel=1e-6) and best > least


def test_the_gradient_is_that_of_the_value(dual: Dual) -> None:
    prices = np.linspace(0.2, 0.01, 30)
    gradient = dual.value(prices)[1]
    for i in (0, 2, 5):
        step = np.zeros(30)
        step[i] = 1e-6
        difference = dual.value(prices + step)[0] - dual.value(prices - step)[0]
        assert gradient[i] == pytest.approx(difference / 2e-6, rel=1e-3)


def short(kind: str, jobs: int) -> Workload:
    """A generated workload without its longest jobs."""
    found = generate(kind, jobs=3 * jobs, seed=3, gpus=8, gpus_per_node=4, rigid=0.25)
    length = {s.name: undisturbed_s(found.applications[s.application], s, 4) for s in found.submissions}
    kept = sorted(found.submissions, key=lambda s: length[s.name])[:jobs]
    return replace(found, submissions=tuple(sorted(kept, key=lambda s: s.time)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nightly("philly"), "ones-sc21", nightly("strategies")])
def test_no_policy_beats_it(kind: str) -> None:
    workload = short(kind, 6)
    found = bound_of(workload, [(2, 4, "")], evaluations=8)
    assert found.alone_mean_jct_s <= found.mean_jct_s <= found.fluid_mean_jct_s * 1.001
    for policy, mechanism in (("ones", Requeue(0.0)), ("srtf", Requeue(0.0)), ("ones", Hot(launch_s=0.0))):
        cluster = ClusterSpec(2, 4)
        outcome = run(policy, {}, workload, cluster, oracle="pack", mechanism=mechanism)
        assert found.mean_jct_s <= np.mean([job.jct_s for job in outcome.jobs])


@pytest.mark.nightly
def test_no_policy_beats_it_on_several_kinds() -> None:
    workload = short("philly", 4)
    # Only on both kinds is there room for it.
    wide = replace(workload.submissions[0], gpus=6, elastic=False)
    workload = replace(workload, submissions=(wide, *workload.submissions[1:]))
    parts = (Part(1, 4, "a100"), Part(2, 2, "t4"))
    found = bound_of(workload, parts, evaluations=8)
    assert found.alone_mean_jct_s <= found.mean_jct_s <= found.fluid_mean_jct_s * 1.001
    for policy, options in (("ones", {"kinds": False}), ("pollux", {})):
        cluster = ClusterSpec(parts=parts)
        outcome = run(policy, options, workload, cluster, oracle="pack", mechanism=Requeue(0.0))
        assert found.mean_jct_s <= np.mean([job.jct_s for job in outcome.jobs])
        assert max(segment.gpus for segment in outcome.segments) > 4


def test_a_curve_is_never_slower_than_the_truth_on_several_kinds() -> None:
    workload = generate("philly", jobs=12, seed=4, gpus=16, gpus_per_node=4)
    pools = pools_of([(2, 4, "a100"), (1, 8, "t4")])
    assert [pool.kind for pool in pools] == ["t4", "a100"]
    for name, app in workload.applications.items():
        found = curve(app, 1.0, 1, pools, 16)
        cuts = np.append(0.0, np.cumsum(found.work))
        for kind, mixed, placement in (
            (0, False, (4,)),
            (1, False, (4, 2)),
            (0, True, (1, 4)),
            (0, True, (8, 4)),
            (0, True, (3, 1, 2)),
        ):
            column = np.flatnonzero((found.kind == kind) & (found.mixed == mixed) & (found.sizes == sum(placement)))
            for progress in np.linspace(0.0, float(cuts[-1]) * 0.999, 5):
                part = int(np.searchsorted(cuts, progress, side="right")) - 1
                batch = max(app.base_batch, min(app.max_batch, sum(placement)))
                speed = on_kind(app, pools[kind].kind).placed_speed(placement, float(batch))
                least = speed * float(app.efficiency(progress, batch))
                if sum(placement) <= app.max_gpus:
                    assert least <= found.rate[part, column].item() * (1 + 1e-9), name


def test_a_curve_is_never_slower_than_the_truth() -> None:
    workload = generate("philly", jobs=12, seed=4, gpus=16, gpus_per_node=4)
    for name, app in workload.applications.items():
        found = curve(app, 1.0, 1, [Pool.of(4, 4)], 16)
        truth = alone_seconds(app, 1.0, 16, 4)
        alone = found.counted(np.ones(1), np.array([16])).alone_s
        assert 0.9 * truth <= alone <= truth * (1 + 1e-9), name
        cuts = np.append(0.0, np.cumsum(found.work))
        for progress in np.linspace(0.0, float(cuts[-1]) * 0.999, 7):
            part = int(np.searchsorted(cuts, progress, side="right")) - 1
            for placement, batch in (((1,), app.base_batch), ((4,), app.max_batch), ((2, 2), app.max_batch // 2)):
                batch = max(batch, app.base_batch)
                speed = app.placed_speed(placement, float(batch)) * float(app.efficiency(progress, batch))
                column = int(np.searchsorted(found.sizes, sum(placement)))
                assert speed <= found.rate[part, column] * (1 + 1e-9)


def test_a_rigid_job_may_hold_what_slurm_rounds_it_up_to() -> None:
    """Five GPUs on nodes of four are three on each of two: the bound allows both, and its fluid schedule ends."""
    workload = generate("philly", jobs=12, seed=4, gpus=16, gpus_per_node=4)
    name, app = next((name, app) for name, app in workload.applications.items() if app.max_gpus >= 6)
    held = asked_shape(5, ClusterSpec(4, 4))
    found = curve(app, 1.0, 5, [Pool.of(4, 4)], 16, 5, app.max_batch)
    assert found.sizes.tolist() == [5, 6] and held.gpus == 6
    truth = app.seconds(held.nodes, held.gpus, app.max_batch, 0.0)
    assert found.counted(np.ones(1), np.array([16])).alone_s <= truth * (1 + 1e-9)
    rigid = replace(workload.submissions[0], application=name, gpus=5, batch=app.max_batch, elastic=False)
    work = work_of(replace(workload, submissions=(rigid,)), [Pool.of(4, 4)], 16)
    assert fluid_mean_jct_s(work, np.ones(1)) <= truth * 1.01


@pytest.mark.slow
def test_what_is_numerical_is_less_than_what_is_taken_off_for_it() -> None:
    workload, pools, one = short("philly", 5), [Pool.of(2, 4)], np.ones(1)
    coarse = work_of(workload, pools, PARTS).counted(one)
    edges = np.linspace(0.0, float(coarse.submitted.max() + 2 * coarse.alone_s.max()), 33)
    prices = improved(Dual(coarse, edges, MOMENTS), 20)[1]

    def value(parts: int, moments: int) -> float:
        return Dual(work_of(workload, pools, parts).counted(one), edges, moments).value(prices)[0]

    assert SAFE * value(FINE_PARTS, FINE_MOMENTS) <= value(4 * FINE_PARTS, 4 * FINE_MOMENTS)
    assert value(PARTS, MOMENTS) <= value(FINE_PARTS, FINE_MOMENTS) / SAFE


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["2x4", nightly("1x4:t4+1x4:a100")])
def test_the_command_shows_and_writes_it(tmp_path: Path, cluster: str) -> None:
    path = tmp_path / "out.json"
    command = f"simulate --jobs 4 --cluster {cluster} --idealized --bound --processes 1 --figures {path}"
    shown = CliRunner().invoke(command_line, command.split())
    assert shown.exit_code == 0, shown.output
    assert "mean JCT over the bound" in shown.output and "of it: sharing, s" in shown.output
    written = json.loads(path.read_text())
    assert set(written["bound"]) == {"mean_jct_s", "fluid_mean_jct_s", "alone_mean_jct_s"}
    assert Bound(**written["bound"]).mean_jct_s <= written["policies"]["ones"]["mean_jct_s"]
    own = written["policies"]["ones"]
    parts = own["alone_s"] + own["sharing_s"] + own["pauses_s"] + own["rest_s"]
    assert parts == pytest.approx(own["mean_jct_s"])
    assert own["over_bound"] == pytest.approx(own["mean_jct_s"] / written["bound"]["mean_jct_s"])
    assert written["bounds"][0]["seed"] == 0
