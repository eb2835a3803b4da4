"""What people look at: pictures, pages and tables, and what users' text may not do to them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ones_db.shape import PARKED, Shape
from slurm_ones.show.pictures import Bar, held, lines, of_magnitudes, of_numbers, thinned
from slurm_ones.text import resized, safe, seconds


def test_safe_text_is_no_markup() -> None:
    """A job called [red]x[/] is shown as such."""
    assert safe("[red]x[/]") == r"\[red]x\[/]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (4.21, "4.2 s"), (59.4, "59 s"), (185, "3 m 05 s"), (7800, "2 h 10 m"), (270_000, "3 d 3 h")],
)
def test_seconds_are_readable(value: float | None, shown: str) -> None:
    assert seconds(value) == shown


def test_a_parked_job_is_called_so() -> None:
    """A resize to no GPUs has words, not 0x0."""
    assert (resized(Shape(1, 2), Shape(2, 4)), resized(Shape(1, 2), PARKED)) == ("1x2 → 2x4", "1x2 → parked")


def test_a_change_of_the_batch_is_seen() -> None:
    assert resized(Shape(1, 1), Shape(1, 1), 32, 128) == "1x1, batch 32 → 128"
    assert resized(Shape(1, 1), Shape(2, 4), 32, 128) == "1x1 → 2x4, batch 32 → 128"
    assert (resized(Shape(1, 1), Shape(1, 2), 32, 32), resized(Shape(1, 1), Shape(1, 2), 32, None)) == (
        "1x1 → 1x2",
        "1x1 → 1x2",
    )
    assert resized(Shape(1, 1), Shape(1, 2), None, 64) == "1x1 → 1x2, batch ? → 64"


def test_jobs_hold_what_their_runs_held() -> None:
    """At each moment a job's height is the sum of its runs' GPUs, none before and after."""
    bars = [Bar("a", 0, 10, 1), Bar("a", 12, 20, 4), Bar("b", 5, 15, 2)]
    moments = np.array([0, 5, 10, 12, 15, 20])
    holding = held(bars, ["a", "b"], moments)
    assert holding.tolist() == [[1, 1, 0, 4, 4, 0], [0, 2, 2, 2, 0, 0]]
    assert (holding[:, :-1] * np.diff(moments)).sum() == sum(bar.gpus * (bar.end - bar.start) for bar in bars)


def test_runs_that_follow_each_other_leave_no_gap() -> None:
    """The stripes' areas are the GPU-seconds held, and what ends when another begins leaves no gap."""
    bars = [Bar("a", 0, 10, 1), Bar("a", 12, 20, 4), Bar("b", 5, 12, 2), Bar("a", 10, 12, 3)]
    moments = np.array([0, 5, 10, 12, 20])
    holding = held(bars, ["a", "b"], moments)
    assert holding.tolist() == [[1, 1, 3, 4, 0], [0, 2, 2, 0, 0]]
    assert (holding[:, :-1] * np.diff(moments)).sum() == sum(b.gpus * (b.end - b.start) for b in bars)


def test_thinned_lines_keep_their_mean() -> None:
    """A long run's line is short, over the same time, about the same values."""
    points = [(float(t), float(t % 7)) for t in range(10_000)]
    times, values = thinned(points, 100)
    assert len(times) == 100 and times[0] == 0
    assert values.mean() == pytest.approx(3.0, abs=0.05)
    assert thinned([], 5)[0].size == 0
    assert thinned([(1.0, 2.0)], 5)[1].tolist() == [2.0]


@pytest.mark.parametrize("gpus", [1, 2, 4, 16, 18, 1000])
def test_gpus_are_counted_in_whole_numbers(gpus: int) -> None:
    """Protects the scale of small clusters, whose marks would be fractions of a GPU."""
    marks = of_numbers(0, gpus, "GPUs", whole=True).marks
    assert 2 <= len(marks) <= 7 and all(float(text).is_integer() for _, text in marks)


@pytest.mark.parametrize(
    ("low", "high", "texts"), [(0.1, 1, "0.1 0.2 0.5 1"), (1, 1e6, "1 10 100 1000 10000 100000 1e+06")]
)
def test_a_logarithmic_axis_has_few_round_ticks(low: float, high: float, texts: str) -> None:
    marks = of_magnitudes(low, high, "hours").marks
    assert [text for _, text in marks] == texts.split()
    assert (marks[0][0], marks[-1][0]) == (0.0, pytest.approx(1.0))


@pytest.mark.parametrize("log", [False, True])
def test_each_line_has_its_name_and_its_place(log: bool) -> None:
    """Points lie within the picture, equal values at one height; what has no point has no line."""
    x, y = np.array([1.0, 5.0, 20.0]), np.array([0.25, 0.5, 1.0])
    drawn = lines({"<one>": (x, y), "two": (2 * x, y), "empty": (x[:0], y[:0])}, "hours", "share", log=log)
    found = [line.split() for line in re.findall(r'points="([^"]*)"', drawn)]
    assert len(found) == 2 and "empty" not in drawn and "<one>" not in drawn and drawn.count("&lt;one&gt;") == 2
    places = np.array([[tuple(map(float, point.split(","))) for point in line] for line in found])
    assert (places >= 0).all() and (places <= (1000, 240)).all() and (np.diff(places[:, :, 0]) > 0).all()
    assert (places[0, :, 1] == places[1, :, 1]).all() and (np.diff(places[0, :, 1]) < 0).all()


def test_nothing_to_draw_is_no_picture() -> None:
    assert lines({"crashed": (np.zeros(0), np.zeros(0))}, "hours", "share", log=True) == ""
