"""GPUs over time: the minimum satisfactory share against exhaustive search, and promises that stand together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.policy.contract import Reserved
from slurm_ones.policy.timeline import MOST_EDGES, FreeTimeline, SpeedCurve, admitted, filled

SIZES = np.array([0, 1, 2, 4])


def curve(work: float, due: float, rates: tuple[float, ...] = (1.0, 1.5, 2.0), least: int = 0) -> SpeedCurve:
    """A job on 1, 2 or 4 GPUs."""
    return SpeedCurve.of(SIZES, np.array([0.0, *rates]), work, due, 0.0, least)


def test_the_share_is_that_of_the_papers_example() -> None:
    """ElasticFlow, Fig. 5: beside jobs that take 1 and 2 of 4 GPUs up to time 1, three units of work are done by 2 with
    one GPU at first, then four."""
    timeline = FreeTimeline.of(4, [1.0, 2.0], 0.0).less(np.array([3, 0]))
    found = timeline.fill(curve(3.0, 2.0))
    assert found.met
    assert found.gpus.tolist() == [1, 4]
    assert not timeline.fill(curve(3.1, 2.0)).met
    assert timeline.fill(curve(2.5, 2.0)).gpus.tolist() == [1, 2]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.floats(0.1, 12.0),
    st.integers(1, 4),
    st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
)
def test_a_deadline_is_met_wherever_anything_meets_it(
    free: list[int], work: float, due: int, gains: list[float]
) -> None:
    """No other choice of sizes over time does more by the deadline than the highest level."""
    rates = tuple(np.cumsum(gains))
    timeline = FreeTimeline.of(5, [float(at) for at in range(1, len(free) + 1)], 0.0)
    timeline = timeline.less(5 - np.array(free))
    own = curve(work, float(due), rates)
    found = timeline.fill(own)
    speed = dict(zip(SIZES.tolist(), (0.0, *rates), strict=True))
    options = [[n for n in SIZES.tolist() if n <= room] for room in free[:due]]
    most = max(sum(speed[n] for n in chosen) for chosen in itertools.product(*options))
    assert found.met == (most >= work - 1e-12) or abs(most - work) < 1e-9
    assert (found.gpus <= np.array(free)).all()


def test_reserved_gpus_are_left_alone() -> None:
    """A reservation that begins later takes its GPUs from then on, wherever its edges lie."""
    timeline = FreeTimeline.of(4, [100.0], 50.0, [Reserved(90.0, 120.0, 3), Reserved(0.0, 49.0, 4)])
    assert timeline.starts.tolist() == [0.0, 40.0, 70.0]
    assert timeline.free.tolist() == [4, 1, 4]
    assert timeline.fill(curve(130.0, 100.0)).gpus.tolist() == [2, 1, 2]


def test_a_new_job_breaks_no_earlier_promise() -> None:
    """It is told whose it would break, also where its own deadline comes first."""
    timeline = FreeTimeline.of(4, [10.0, 20.0], 0.0)
    long = curve(30.0, 20.0)
    assert filled(timeline, [long])[0].met
    found, broken = admitted(timeline, [long], curve(20.0, 10.0))
    assert found.met
    assert broken == 0
    found, broken = admitted(timeline, [long], curve(5.0, 10.0))
    assert found.met
    assert broken is None


def test_a_promise_that_is_lost_already_speaks_against_nobody() -> None:
    """Who cannot end in time any more is not broken by others, and goes on with all that helps it."""
    timeline = FreeTimeline.of(4, [10.0, 20.0], 0.0)
    lost = curve(100.0, 10.0)
    before = filled(timeline, [lost])
    assert not before[0].met
    assert before[0].gpus[0] == 4
    assert admitted(timeline, [lost], curve(15.0, 20.0))[1] is None


def test_a_running_job_keeps_its_least_size_and_pays_for_a_change() -> None:
    """What it holds was set aside before; another size costs its pause first."""
    timeline = FreeTimeline.of(4, [10.0], 0.0).less(np.array([4]))
    held = curve(8.0, 10.0, least=1)
    assert timeline.fill(held).gpus.tolist() == [1]
    paused = SpeedCurve.of(SIZES, np.array([0.0, 1.0, 1.5, 2.0]), 9.5, 10.0, np.array([0.0, 1.0, 0.0, 0.0]))
    assert FreeTimeline.of(4, [10.0], 0.0).fill(paused).gpus.tolist() == [2]


def test_many_moments_are_thinned() -> None:
    """So that thousands of deadlines cost no more than a few."""
    timeline = FreeTimeline.of(4, [float(at) for at in range(2, 4000, 2)], 0.0)
    assert len(timeline.starts) <= MOST_EDGES + 1
    assert timeline.ends[-1] == pytest.approx(3998.0)
