"""What a lie that agrees with itself gains: less to come, more speed, better scaling than is plausible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import JobHistory, ThroughputPoint
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.learn.histories import SILENT_S
from slurm_ones.learn.learner import PEERS, Learner
from slurm_ones.learn.progress import BetaProgress, TrainingState
from slurm_ones.learn.step_time import CAUTIOUS, fit_all
from slurm_ones.learn.throughput import LINEAR, PROVEN_S, MeasuredThroughput, points_of
from tests.learn.test_knowledge import history, speed_of


def model(*points: tuple[int, float], ran: dict[tuple[int, int], float] | None = None) -> MeasuredThroughput:
    """Of a job that measured (GPUs, samples/s) with 32 samples a GPU, three times each."""
    measured = [ThroughputPoint(Shape(1, n), 32 * n, speed, 10.0 * i) for n, speed in points for i in range(3)]
    return MeasuredThroughput(fit_all([(points_of(measured, 32.0, ran=ran), 32.0, CAUTIOUS)])[0])


def at(found: MeasuredThroughput, gpus: int) -> float:
    return float(found.throughput(np.array([1]), np.array([gpus]), np.array([32 * gpus]))[0])


def of(user: str, told: JobHistory) -> JobHistory:
    return replace(told, job=replace(told.job, user=user))


@given(st.floats(1.0, 1e4), st.floats(0.0, 1e5))
def test_who_declares_too_little_is_soon_taken_for_what_it_is(declared: float, over: float) -> None:
    """Beyond what it declared a job has as much to come as it is over; up to there, what it declared is left."""
    progress = BetaProgress().progress(TrainingState(1000, declared + over), declared)
    assert progress.beta >= min(over, 1e6) * (1 - 1e-9)
    assert progress.to_come(0.9) <= progress.most
    within = BetaProgress().progress(TrainingState(1000, 0.5 * declared), declared)
    assert within.beta == pytest.approx(0.5 * declared)


@given(st.floats(0.0, 1e6))
def test_who_falls_silent_is_not_nearly_done(silent_s: float) -> None:
    """A running job at its end that is not heard of has as long to go as that lasts; an evaluation is forgiven."""
    told = history(1, 10)  # all of ten epochs, at 100 samples/s
    known = Learner().about(told, now=5.0 + silent_s)
    came = known.progress.beta * 1000 / 100.0
    assert came >= silent_s - SILENT_S - 1e-6
    if silent_s <= SILENT_S:
        assert known.progress.beta == Learner().about(told).progress.beta


def test_a_new_size_is_believed_with_time() -> None:
    """A claim at a size that the job has just come to moves the model less than one that has lasted."""
    expected = at(model((1, 100.0)), 4)
    new, old = (at(model((1, 100.0), (4, 90.0), ran={(1, 1): 1e6, (1, 4): s}), 4) for s in (0.0, 10 * PROVEN_S))
    assert old == pytest.approx(90.0, rel=0.05)
    assert old < new < expected


@given(st.sampled_from([2, 4, 8]), st.floats(1.0, 1e6), st.sampled_from([2, 4, 8]))
def test_nothing_scales_better_than_linearly(claimed: int, by: float, asked: int) -> None:
    """Whatever is claimed at a size, no size is taken to be faster per GPU than the smallest was."""
    found = model((1, 100.0), (claimed, 100.0 * claimed * by))
    assert at(found, asked) <= 100.0 * asked * np.exp(LINEAR) * (1 + 1e-6)


def test_peers_bound_a_claim() -> None:
    """A job ten times as fast as three others' of its kind is believed some of it; those of its own user say nothing,
    and a job like its peers is believed as it says."""
    peers = [of(f"user{i}", history(i, 10)) for i in range(PEERS)]
    liar, honest = of("liar", history(20, 1, speed=1000.0)), of("liar", history(21, 1, speed=120.0))
    learner = Learner()
    learner.finished(peers)
    assert speed_of(learner.about(liar)) < 500.0
    assert speed_of(learner.about(honest)) == pytest.approx(120.0, rel=0.1)
    mine = Learner()
    mine.finished([of("liar", told) for told in peers])
    assert speed_of(mine.about(liar)) > 800.0


def test_no_user_teaches_more_than_all_others() -> None:
    """A hundred finished jobs that lied do not decide how fast jobs of other people are taken to be."""

    def told(user: str, i: int, speed: float) -> JobHistory:
        return of(user, replace(history(i, 10, speed=speed), spec=Spec(32, 256, 64, 2000 + i, 10)))

    fresh = replace(history(500, 0, speed=0.0), spec=Spec(32, 256, 64, 77, 10))

    def expected(lie: float) -> float:
        learner = Learner()
        learner.finished([told("liar", i, lie) for i in range(60)] + [told(f"u{i}", 100 + i, 100.0) for i in range(12)])
        return speed_of(learner.about(fresh))

    assert expected(1e5) < 1e4
    assert expected(1e9) < 1.5 * expected(1e5), "a greater lie gains no more"
    alone = Learner()
    alone.finished([told("liar", i, 1e5) for i in range(60)])
    assert 2e4 < speed_of(alone.about(fresh)) < 2e5, "where nobody else is known, it is what is expected"


def test_a_bound_by_peers_lets_no_claim_scale_better() -> None:
    """All of its sizes count less by as much: peers are in doubt at many GPUs, which is no proof of what a job says."""
    peers = [of(f"user{i}", history(i, 10)) for i in range(PEERS)]
    learner = Learner()
    learner.finished(peers)
    honest, liar = of("liar", history(21, 1)), of("liar", history(20, 1, speed=1000.0))
    scaled = [
        [speed_of(learner.about(told), n) / speed_of(learner.about(told)) for n in (2, 4, 8)] for told in (honest, liar)
    ]
    assert all(lied <= true * 1.1 for true, lied in zip(*scaled, strict=True))
