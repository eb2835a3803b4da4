"""The throughput model: what was measured, what was not, how sure it is, and figures that make no sense."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import ThroughputPoint
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from slurm_ones.learn import step_time
from slurm_ones.learn.hierarchy import GroupPath, JobEvidence, Tree
from slurm_ones.learn.step_time import CAUTIOUS, LATENCY_GB, PLAIN, WIRED, StepLayout, fit_all, layout_of
from slurm_ones.learn.throughput import MeasuredThroughput, believable, points_of
from slurm_ones.policy.contract import Floats

PROFILES = Path(__file__).parents[3] / "shared/data/adaptdl/profiles"
PER_NODE = 4


def measured(gpus: int, speed: float, *, local: int = 64, time: float = 0.0) -> ThroughputPoint:
    nodes = max(gpus // PER_NODE, 1)
    return ThroughputPoint(Shape(nodes, gpus // nodes), local * gpus, speed, time)


def at(model: MeasuredThroughput, gpus: int, batch: int | None = None, *, doubt: bool = False) -> float:
    batches = np.array([64 * gpus if batch is None else batch])
    nodes = np.array([max(gpus // PER_NODE, 1)])
    said = model.uncertainty if doubt else model.throughput
    return float(said(nodes, np.array([gpus]), batches)[0])


def of(*points: ThroughputPoint) -> MeasuredThroughput:
    return MeasuredThroughput.of(points)


def test_mean_of_the_last_five_at_each_size() -> None:
    """An old slow stretch (a cold cache) does not weigh on the figure for ever, whatever order lines come
    in.
    """
    lines = [measured(2, speed, time=float(t)) for t, speed in enumerate([1.0, 100, 110, 120, 130, 140])]
    assert at(of(*lines[::-1]), 2) == pytest.approx(120.0, rel=0.02)


def test_one_stall_does_not_count() -> None:
    """A stretch in which the file system hung says nothing about the size."""
    lines = [measured(2, speed, time=float(t)) for t, speed in enumerate([100.0, 101, 4, 99, 100])]
    assert at(of(*lines), 2) == pytest.approx(100.0, rel=0.03)


def test_what_was_measured_is_predicted_as_measured() -> None:
    """Also where no step time of the formula could be so: 4 GPUs that are slower than 2, 8 faster than twice 4."""
    truth = {1: 100.0, 2: 150.0, 4: 140.0, 8: 330.0}
    model = of(*(measured(n, speed, time=float(t)) for n, speed in truth.items() for t in range(5)))
    for gpus, speed in truth.items():
        assert at(model, gpus) == pytest.approx(speed, rel=0.12)
        assert at(model, gpus, doubt=True) < 0.1


def test_nothing_measured_is_a_cautious_guess() -> None:
    """A sample/s a GPU, less than linear inside a node, less again across, and no confidence in it."""
    model = MeasuredThroughput.of()
    speeds = [at(model, n, 32 * n) for n in (1, 2, 4, 8, 16)]
    assert speeds[0] == pytest.approx(1.0, rel=0.01)
    gains = [b / a for a, b in pairwise(speeds)]
    assert all(1.05 < gain < 2.0 for gain in gains)
    assert gains[2] < gains[1], "leaving the node costs more than staying in it"
    assert at(model, 1, doubt=True) > 2.0


def test_measured_scaling_replaces_optimism() -> None:
    """A job that gained nothing from 2 → 4 GPUs is not promised much at 16; nor is noise a promise."""
    lines = [measured(n, 200.0, time=float(t)) for n in (2, 4) for t in range(5)]
    fast = [measured(n, 100.0 * n, time=float(t)) for n in (2, 4) for t in range(5)]
    assert at(of(*lines), 16) < 0.7 * at(of(*fast), 16)
    superlinear = of(measured(2, 200.0), measured(4, 500.0))
    assert at(superlinear, 8) < 1000.0


def test_across_nodes_is_learned_apart_from_inside() -> None:
    """Two jobs alike in one node, of which one has a slow network: they part where it is crossed."""
    inside = [measured(n, 95.0 * n, time=float(t)) for n in (1, 2, 4) for t in range(5)]
    slow, quick = ([*inside, measured(8, speed)] for speed in (300.0, 740.0))
    assert at(of(*slow), 2) == pytest.approx(at(of(*quick), 2), rel=0.05)
    assert at(of(*slow), 16) < 0.6 * at(of(*quick), 16)
    spread, packed = (of(*slow).throughput(np.array([n]), np.array([2]), np.array([128]))[0] for n in (2, 1))
    assert spread < 0.8 * packed, "two GPUs in two nodes are not two in one"


def test_other_batches_follow_the_step_time() -> None:
    """Steps of 0.1 s + 1 ms a sample measured at two batches predict a third at the same size."""

    def speed(local: int) -> float:
        return local / (0.1 + 0.001 * local)

    model = of(*(measured(1, speed(local), local=local, time=float(t)) for local in (32, 128) for t in range(5)))
    assert at(model, 1, 64) == pytest.approx(speed(64), rel=0.05)
    assert at(model, 1, 256) == pytest.approx(speed(256), rel=0.1)
    assert at(model, 1, 10**9) < 2.5 * speed(512), "no faster for ever with the batch"


def test_samples_that_do_not_fit_take_more_passes() -> None:
    """A batch of twice what the memory holds is no faster a sample than one that just fits."""
    lines = [measured(1, local / (0.1 + 0.001 * local), local=local) for local in (32, 64, 128)]
    fit = fit_all([(points_of(lines, 64.0, StepLayout(128.0)), 64.0, CAUTIOUS)])[0]
    model = MeasuredThroughput(fit, StepLayout(128.0))
    assert at(model, 1, 256) <= 1.1 * at(model, 1, 128)


def test_doubt_grows_with_distance() -> None:
    """A size next to what was measured is surer than one far away, and measuring takes the doubt away."""
    one = of(*(measured(2, 180.0, time=float(t)) for t in range(5)))
    doubts = [at(one, n, doubt=True) for n in (2, 4, 8, 16, 64)]
    assert doubts[0] < 0.1
    assert doubts == sorted(doubts)
    assert doubts[-1] > 3 * doubts[1]
    both = of(*(measured(n, 90.0 * n, time=float(t)) for n in (2, 8) for t in range(5)))
    assert at(both, 8, doubt=True) < 0.1 < at(one, 8, doubt=True)
    assert at(both, 16, doubt=True) < at(one, 16, doubt=True)
    assert at(one, 2, 100_000, doubt=True) > 2 * at(one, 2, 160, doubt=True)


Truth = Callable[[int, int, float], float]
"""Seconds of a step on (nodes, GPUs) at a local batch."""


def pollux_like(rng: np.random.Generator) -> Truth:
    """A draw from the family that the model assumes."""
    parameters = CAUTIOUS.mean + rng.normal(0.0, 0.7, step_time.PARAMETERS) * np.array([4, 1, 1, 1, 1, 1, 0.5])

    def seconds(nodes: int, gpus: int, local: float) -> float:
        size = step_time.sizes(*(np.array([float(x)]) for x in (nodes, gpus, local * gpus)), 64.0, StepLayout(1e9))
        return math.exp(step_time.log_step(parameters, size, np.float64(64.0))[0])

    return seconds


def power_law(rng: np.random.Generator) -> Truth:
    """Outside the family: n^e, another e across nodes."""
    inside, across, per_gpu = rng.uniform(0.7, 1.0), rng.uniform(0.4, 0.9), math.exp(rng.normal(4, 2))
    fixed = rng.uniform(0.0, 1.0)

    def seconds(nodes: int, gpus: int, local: float) -> float:
        speed = per_gpu * min(gpus, PER_NODE) ** inside * nodes**across
        return (local + 64.0 * fixed) * gpus / (speed * (1.0 + fixed))

    return seconds


def stragglers(rng: np.random.Generator) -> Truth:
    """Outside the family: each step waits for the slowest of n lognormal GPUs."""
    sigma, each = rng.uniform(0.03, 0.2), math.exp(rng.normal(-4, 1))

    def seconds(nodes: int, gpus: int, local: float) -> float:
        return each * local * math.exp(sigma * math.sqrt(2.0 * math.log(gpus + 0.5))) + 0.01 * each * gpus

    return seconds


@pytest.mark.parametrize(("family", "most"), [(pollux_like, 0.2), (power_law, 0.2), (stragglers, 0.2)])
def test_untried_sizes_after_two(family: Callable[[np.random.Generator], Truth], most: float) -> None:
    """From a size in a node and one across, with 5 % noise: untried sizes and batches within a fifth at the median, and
    the doubt is about right."""
    rng = np.random.default_rng(0)
    errors, within = [], []
    for _ in range(60):
        truth = family(rng)

        def speed(nodes: int, gpus: int, local: float, truth: Truth = truth) -> float:
            return gpus * local / truth(nodes, gpus, local)

        lines = [
            ThroughputPoint(
                Shape(nodes, gpus // nodes), local * gpus, speed(nodes, gpus, local) * rng.lognormal(0, 0.05), k
            )
            for nodes, gpus, local in ((1, 4, 64), (2, 8, 64))
            for k in range(5)
        ]
        model = MeasuredThroughput.of(lines)
        for nodes, gpus, local in ((1, 1, 64), (1, 2, 64), (1, 4, 128), (3, 12, 64), (4, 16, 64), (2, 8, 128)):
            where = (np.array([nodes]), np.array([gpus]), np.array([gpus * local]))
            errors.append(abs(math.log(model.throughput(*where)[0] / speed(nodes, gpus, local))))
            within.append(errors[-1] < 1.28 * math.sqrt(math.log1p(model.uncertainty(*where)[0] ** 2)))
    assert np.median(errors) < most
    assert np.mean(within) > 0.65, "80 % within 1.28 standard deviations, or more"


def test_measured_profiles() -> None:
    """On step times of real jobs: once one size in a node and two across are known, so are the others about."""
    if not PROFILES.is_dir():
        pytest.skip("no measured profiles here")
    rng = np.random.default_rng(0)
    medians = []
    for folder in sorted(PROFILES.iterdir()):
        times: dict[tuple[int, int, int], float] = {}
        with (folder / "placements.csv").open() as file:
            for row in csv.DictReader(file):
                placement = [int(c) for c in row["placement"]]
                if len(placement) == 1 or set(placement) == {PER_NODE}:
                    times[len(placement), sum(placement), int(row["local_bsz"])] = float(row["step_time"])
        errors = []
        batches = sorted({local for _, _, local in times})
        for local in batches[2:-2:3]:
            sizes = [(nodes, gpus, local) for nodes, gpus in ((1, 4), (2, 8), (4, 16))]
            if not all(size in times for size in sizes):
                continue
            model = MeasuredThroughput.of(
                [
                    ThroughputPoint(
                        Shape(nodes, gpus // nodes), local * gpus, local * gpus / times[size] / noise, float(k)
                    )
                    for size in sizes
                    for nodes, gpus, _ in (size,)
                    for k, noise in enumerate(rng.lognormal(0.0, 0.05, 5))
                ]
            )
            for (nodes, gpus, other), seconds in times.items():
                if (nodes, gpus) not in {size[:2] for size in sizes} and local / 2 <= other <= 2 * local:
                    where = (np.array([nodes]), np.array([gpus]), np.array([gpus * other]))
                    errors.append(abs(math.log(model.throughput(*where)[0] * seconds / (gpus * other))))
        medians.append(float(np.median(errors)))
    assert np.median(medians) < 0.2
    assert max(medians) < 0.4


def test_jobs_of_a_kind_teach_each_other() -> None:
    """What ten jobs measured is an eleventh's prior: nearer than the cautious one, and surer."""
    rng = np.random.default_rng(1)
    lines = [
        [measured(n, 50.0 * n**0.6 * rng.lognormal(0, 0.05), time=float(t)) for n in (1, 4, 8) for t in range(3)]
        for _ in range(10)
    ]
    fits = fit_all([(points_of(line, 64.0), 64.0, CAUTIOUS) for line in lines])
    mine = GroupPath("family", "spec", "alice")
    prior = Tree([(mine, JobEvidence.of(fit)) for fit in fits], CAUTIOUS).expect(mine)
    taught = MeasuredThroughput(fit_all([(points_of([], 64.0), 64.0, prior)])[0])
    for gpus in (1, 4, 8):
        assert at(taught, gpus) == pytest.approx(50.0 * gpus**0.6, rel=0.25)
        assert at(taught, gpus, doubt=True) < 0.5 * at(MeasuredThroughput.of(), gpus, doubt=True)
    assert Tree([], CAUTIOUS).expect(mine) is CAUTIOUS


def test_many_at_once_are_as_each_alone() -> None:
    """A tick fits all jobs in one call; nobody's parameters depend on who else reported."""
    jobs = [
        (points_of([measured(n, 100.0 * n**e) for n in (1, 2, 8)][:k], 64.0), 64.0, CAUTIOUS)
        for k in (0, 1, 3)
        for e in (0.5, 0.9)
    ]
    for together, job in zip(fit_all(jobs), jobs, strict=True):
        alone = fit_all([job])[0]
        assert together.parameters == pytest.approx(alone.parameters, abs=0.02)
        model, other = MeasuredThroughput(together), MeasuredThroughput(alone)
        assert at(model, 16) == pytest.approx(at(other, 16), rel=0.01)


TOLD = tuple(SizeLimits(n, n // 2 or 1, replica_bytes=10**8, data_bytes=10**9) for n in (1, 2, 4, 8, 16))


@pytest.mark.parametrize(
    "layout",
    [
        StepLayout(64.0),
        layout_of(Spec(32, 4096, 64, 0, 0, gradient_bytes=10**9)),
        layout_of(Spec(32, 4096, 64, 0, 0, limits=StrategyLimits("ring", TOLD))),
    ],
)
def test_slopes(layout: StepLayout) -> None:
    """The hand-written derivatives are those of the step time."""
    rng = np.random.default_rng(0)
    size = step_time.sizes(
        np.array([1.0, 1, 1, 2, 4]), np.array([1.0, 2, 4, 8, 16]), np.array([32.0, 128, 99, 4096, 512]), 32.0, layout
    )
    reference = np.float64(32.0)
    for _ in range(20):
        parameters = CAUTIOUS.mean + rng.normal(0.0, 0.7, step_time.PARAMETERS)
        slopes = step_time.log_step_and_slopes(parameters, size, reference)[1]
        for k in range(step_time.PARAMETERS):
            nudge = np.zeros(step_time.PARAMETERS)
            nudge[k] = 1e-6
            rise = step_time.log_step(parameters + nudge, size, reference) - step_time.log_step(
                parameters - nudge, size, reference
            )
            assert slopes[:, k] == pytest.approx(rise / 2e-6, abs=1e-6)


HIDDEN, LAYERS, LENGTH = 1024, 24, 16384
PARAMETERS = 12 * HIDDEN**2 * LAYERS


def _ring_row(gpus: int, ring: int) -> SizeLimits:
    """A ring of `ring` GPUs in each replica: bytes of the blocks that go around, and of the gradients of all ranks."""
    block = 4 * LENGTH // ring * HIDDEN * LAYERS
    within = (2 * (ring - 1) + 4 * ring - 2) * block if ring > 1 else 0
    return SizeLimits(
        gpus, gpus // ring, replica_bytes=within, data_bytes=round(2 * (gpus - 1) / gpus * 4 * PARAMETERS)
    )


ONE_RING = tuple(_ring_row(n, n) for n in (1, 2, 4, 8, 16))
"""All GPUs in one ring: it sends more the more there are."""
RINGS = tuple(_ring_row(n, min(n, 2)) for n in (1, 2, 4, 8, 16))
LEADERS = tuple(SizeLimits(n, n, data_bytes=4 * PARAMETERS // 16) for n in (1, 2, 4, 8, 16))
PLAINLY = tuple(SizeLimits(n, n, data_bytes=2 * (n - 1) * 4 * PARAMETERS // n) for n in (1, 2, 4, 8, 16))
"""Plain data parallel, which tells the bytes of its gradients alone."""


@pytest.mark.parametrize(
    "rows", [ONE_RING, RINGS, LEADERS, PLAINLY], ids=["one ring", "rings", "leaders", "plain data parallel"]
)
def test_bytes_predict_sizes_that_were_not_tried(rows: tuple[SizeLimits, ...]) -> None:
    """Over simulated jobs on links of other speeds, which overlap and lose time to messages as no formula says, a job
    that has tried one node is predicted better at all larger sizes where it tells what it sends."""
    plain = rows is PLAINLY
    told = layout_of(
        Spec(64, 4096, 64, 0, 0, gradient_bytes=4 * PARAMETERS)
        if plain
        else Spec(64, 4096, 64, 0, 0, limits=StrategyLimits("ring", rows))
    )
    spec_of = {row.gpus: row for row in rows}
    rng = np.random.default_rng(3)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(24):
        sample, fixed = float(rng.uniform(0.2, 0.8)), float(rng.uniform(0.02, 0.3))
        inside, across = float(rng.uniform(4e9, 30e9)), float(rng.uniform(0.6e9, 4e9))
        overlap = float(rng.uniform(1.2, 3.0))

        def seconds(
            gpus: int, batch: int, *, by: tuple[float, ...] = (sample, fixed, inside, across, overlap)
        ) -> float:
            row, nodes = spec_of[gpus], max(gpus // PER_NODE, 1)
            ring = gpus // row.replicas
            compute = by[1] + by[0] * batch / gpus
            within = row.replica_bytes * batch / row.replicas / (by[2] if ring <= PER_NODE else by[3])
            between = row.data_bytes / (by[2] if nodes == 1 else by[3]) if row.data_bytes else 0.0
            exchange = (within + between + 2e-5 * gpus) * (gpus > 1)
            return float((compute ** by[4] + exchange ** by[4]) ** (1 / by[4]))

        tried = [(1, 16), (2, 32), (4, 64), (8, 64)]
        points = [
            ThroughputPoint(
                Shape(max(n // PER_NODE, 1), min(n, PER_NODE)),
                b,
                b / seconds(n, b) * float(np.exp(rng.normal(0, 0.03))),
                0.0,
            )
            for n, b in tried
            for _ in range(3)
        ]
        for wired in (True, False):
            layout, prior = (told, WIRED) if wired else (StepLayout(64.0), CAUTIOUS)
            fit = fit_all([(points_of(points, 64.0, layout), 64.0, prior)])[0]
            model = MeasuredThroughput(fit, layout)
            for n, b in ((8, 256), (16, 64), (16, 128), (16, 256)):
                found = model.throughput(np.array([n // PER_NODE]), np.array([n]), np.array([b]))[0]
                errors[wired].append(abs(math.log(found * seconds(n, b) / b)))
    with_bytes, without = (float(np.mean(errors[wired])) for wired in (True, False))
    print(f"mean error of the log step time: {with_bytes:.3f} with bytes, {without:.3f} without")
    assert with_bytes < 0.8 * without


def test_a_large_batch_does_not_hide_a_short_exchange() -> None:
    """A job that has only trained large batches is told what small ones would be by its bytes: without them its
    exchange is taken for a share of its step, and nobody would try."""
    inside, across, sample = 10e9, 2e9, 0.35

    def seconds(gpus: int, batch: int) -> float:
        sent = 2 * (gpus - 1) / gpus * 5e8
        return 0.08 + sample * batch / gpus + (sent / (inside if gpus <= PER_NODE else across) if gpus > 1 else 0.0)

    points = [
        ThroughputPoint(Shape(max(n // PER_NODE, 1), min(n, PER_NODE)), b, b / seconds(n, b), 0.0)
        for n, b in ((4, 48), (8, 104), (12, 180))
    ]
    found = []
    for spec, prior in ((Spec(16, 512, 4, 0, 0, gradient_bytes=5 * 10**8), WIRED), (Spec(16, 512, 4, 0, 0), CAUTIOUS)):
        layout = layout_of(spec)
        model = MeasuredThroughput(fit_all([(points_of(points, 16.0, layout), 16.0, prior)])[0], layout)
        said = float(model.throughput(np.array([3]), np.array([12]), np.array([24]))[0])
        found.append(abs(math.log(said * seconds(12, 24) / 24)))
    assert found[0] < 0.3 < found[1], found


def test_few_bytes_take_their_time() -> None:
    """Protects small models from being thought to scale without end: no exchange is shorter than its messages."""
    layout = layout_of(Spec(64, 4096, 64, 0, 0, gradient_bytes=8))
    inside, _ = layout.sent(np.array([1.0]), np.array([4.0]), np.array([64.0]))
    assert layout.wired and math.exp(float(inside[0])) == pytest.approx(LATENCY_GB, rel=1e-3)


def test_nothing_changes_where_no_bytes_are_told() -> None:
    """A strategy that tells sizes alone is fitted as a plain job is, to the last bit."""
    rows = tuple(SizeLimits(n, n) for n in (1, 2, 4, 8, 16))
    silent = layout_of(Spec(64, 4096, 64, 0, 0, limits=StrategyLimits("mine", rows)))
    points = [measured(n, 90.0 * n**0.8) for n in (1, 2, 4)]
    plain, said = (
        MeasuredThroughput(fit_all([(points_of(points, 64.0, layout), 64.0, CAUTIOUS)])[0], layout)
        for layout in (StepLayout(64.0), silent)
    )
    assert not silent.wired
    sizes = np.array([1, 1, 2, 4]), np.array([1, 4, 8, 16]), np.array([64, 256, 512, 1024])
    assert plain.throughput(*sizes).tolist() == said.throughput(*sizes).tolist()
    assert plain.uncertainty(*sizes).tolist() == said.uncertainty(*sizes).tolist()


def test_nonsense_costs_that_figure_alone() -> None:
    bad = [measured(2, speed, time=9.0) for speed in (0.0, -5.0, math.nan, math.inf, 1e300)]
    bad += [
        ThroughputPoint(Shape(0, 2), 64, 9.0, 9.0),
        ThroughputPoint(Shape(1, 2), 0, 9.0, 9.0),
        measured(2, 9.0, time=math.nan),
    ]
    assert not any(map(believable, bad))
    assert at(of(measured(2, 200.0), *bad), 2) == at(of(measured(2, 200.0)), 2)


anything = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 1e11)
shapes = st.builds(Shape, st.integers(-1, 40), st.integers(-1, 8))
lines = st.builds(ThroughputPoint, shapes, st.integers(-1, 2**40), anything, anything)


@given(st.lists(lines, max_size=25))
def test_always_finite_and_never_negative(measurements: list[ThroughputPoint]) -> None:
    """Whatever a job reports, a policy gets numbers it can compute with, in the shape it asked for."""
    nodes = np.array([[0, 1, 1, 2], [16, 1024, 2**40, 1]])
    gpus = np.array([[0, 1, 2, 7], [64, 4096, 2**62, 1]])
    batches = np.array([[0, 1, 64, 500], [10**6, 2**40, 2**62, 1]])
    model = MeasuredThroughput.of(measurements)
    speeds: Floats
    for speeds in (model.throughput(nodes, gpus, batches), model.uncertainty(nodes, gpus, batches)):
        assert speeds.shape == gpus.shape
        assert np.isfinite(speeds).all()
        assert (speeds >= 0).all()
    assert model.throughput(nodes, gpus, batches)[0, 0] == 0.0


SIZES = np.array([1, 2, 4, 8, 16])
RING = StepLayout(
    64.0,
    np.array([2, 4, 8]),
    np.array([1.0, 2.0, 4.0]),
    np.array([32.0, 32.0, 16.0]),
    np.array([0.01, 0.01, 0.01]),
    np.array([0.0, 0.1, 0.1]),
)


@st.composite
def models(draw: st.DrawFn) -> MeasuredThroughput:
    """A job that measured nothing, one size or several, alone or beside peers, laid out in one way or another."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=4, unique=True))
    power = draw(st.sampled_from([0.5, 0.8, 1.2]))
    layout = draw(st.sampled_from([PLAIN, StepLayout(32.0), StepLayout(32.0, gradient_gb=0.4), RING]))
    measured = [ThroughputPoint(Shape(max(n // 4, 1), min(n, 4)), 64 * n, 100.0 * n**power, float(n)) for n in sizes]
    fit = fit_all([(points_of(measured, 64.0, layout), 64.0, CAUTIOUS)])[0]
    peers = replace(CAUTIOUS, mean=CAUTIOUS.mean + 0.1) if draw(st.booleans()) else None
    return MeasuredThroughput(fit, layout, peers)


@given(st.lists(models(), min_size=1, max_size=6))
def test_asked_together_they_say_what_each_says_alone(jobs: list[MeasuredThroughput]) -> None:
    gpus = np.tile(SIZES, (len(jobs), 1))
    asked = (np.maximum(gpus // 4, 1), gpus, 48 * gpus)
    together = MeasuredThroughput.together(jobs)
    for name in ("throughput", "uncertainty", "plausible"):
        found = getattr(together, name)(*asked)
        assert np.isfinite(found).all()
        for j, job in enumerate(jobs):
            alone = getattr(job, name)(*(array[j] for array in asked))
            assert found[j] == pytest.approx(alone, rel=1e-9)
