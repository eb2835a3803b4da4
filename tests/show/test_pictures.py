"""Pictures and numbers that people look at: axes, colours that can be told apart, what each shape says, and what users'
text may not do to them."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from ones_db import EpochPoint, TimelineRow
from ones_db.shape import PARKED, Shape
from slurm_ones.show import palette
from slurm_ones.show.pictures import (
    Bar,
    curve,
    gpus_over_time,
    held,
    lines,
    of_magnitudes,
    of_numbers,
    of_time,
    scaling,
    thinned,
)
from slurm_ones.show.usage import Measured
from slurm_ones.text import resized, safe, seconds
from tests.show import colours

ENOUGH = 15.0
STYLE = files("slurm_ones.show").joinpath("static/style.css").read_text()
THEMES = {"light": 0, "dark": 1}


def of_theme(name: str) -> list[str]:
    return [re.findall(rf"--c{n}: (#[0-9a-f]{{6}});", STYLE)[THEMES[name]] for n in range(palette.COLOURS)]


@pytest.mark.parametrize("theme", THEMES)
def test_colours_can_be_told_apart_by_everybody(theme: str) -> None:
    """Protects readers without red or green cones, and prints in grey: any two differ, and those that touch in grey."""
    used = of_theme(theme)
    for one, other in itertools.combinations(range(palette.COLOURS), 2):
        for sight in colours.SIGHTS:
            assert colours.difference(used[one], used[other], sight) >= ENOUGH, (one, other, sight)
        assert (one in palette.APART[other]) == (other in palette.APART[one])
        if one in palette.APART[other]:
            assert colours.difference(used[one], used[other], "grey") >= ENOUGH, (one, other)


def test_the_measure_of_differences() -> None:
    """Protects the check above: published pairs of the CIEDE2000 formula (Sharma et al. 2005, rows 1, 17 and 25)."""
    pairs = (
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    )
    for one, other, expected in pairs:
        assert colours.ciede2000(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_what_touches_never_looks_alike(seed: int) -> None:
    """Protects pictures of busy clusters: jobs that lie on each other differ by colour or pattern, and a job that is
    seen again keeps its colour."""
    draw = random.Random(seed)
    jobs = list(range(30))
    starts = sorted(draw.uniform(0, 100) for _ in jobs)
    spans = [(job, start, start + draw.uniform(5, 60)) for job, start in zip(jobs, starts, strict=True)]
    first = palette.chosen(spans[:20], {})
    chosen = palette.chosen(spans[5:], first)
    assert all(chosen[job] == first[job] for job in jobs[5:20])
    moments = np.linspace(0, 160, 400)
    holding = np.array([[float(start <= at < end) for at in moments] for _, start, end in spans[5:]])
    used = [chosen[job] for job in jobs[5:]]
    shown = palette.patterns(used, holding)
    for column in holding.T:
        for low, high in itertools.pairwise(np.flatnonzero(column)):
            apart = used[low] in palette.APART[used[high]]
            assert apart or shown[low] != shown[high], (low, high)
    assert np.mean([pattern == 0 for pattern in shown]) > 0.6


def test_as_many_jobs_as_colours_have_one_each() -> None:
    """Protects the legend of a cluster with few jobs: jobs that run at once have different colours."""
    draw = random.Random(7)
    spans = [(n, float(n), n + draw.uniform(1, palette.COLOURS - 1)) for n in range(200)]
    chosen = palette.chosen(spans, {})
    for _, at, _ in spans:
        alive = [chosen[job] for job, start, end in spans if start <= at < end]
        assert len(set(alive)) == len(alive)


def row(job_id: int, gpus: int, start: float, end: float | None, asked: int = 1, user: str = "alice") -> TimelineRow:
    return TimelineRow(job_id, f"job{job_id}", user, "gpu", asked, 0, Shape(1, gpus), start, end)


def test_a_picture_says_what_it_shows() -> None:
    """Protects the picture's reader: axes with units, a legend, the cluster's line, and growth that is hatched."""
    drawn = str(gpus_over_time([row(7, 4, 0.0, 1800.0, asked=2), row(8, 2, 600.0, None, asked=2)], 8, 0.0, 3600.0))
    assert re.findall(r'class="tick up"[^>]*>(\d+)<', drawn) == ["0", "2", "4", "6", "8"]
    assert len(re.findall(r'class="tick across"[^>]*>\d\d:\d\d<', drawn)) >= 4 and '<p class="unit">GPUs</p>' in drawn
    assert "job 7 job7</li>" in drawn and "GPUs of the cluster" in drawn and "beyond what the job asked for" in drawn
    # Job 7 has 2 of 8 GPUs beyond what it asked for: a quarter of the height, in the two stretches that it ran.
    hatched = re.findall(r'fill="url\(#grown\)" x="(\S+)" y="\S+" width="(\S+)" height="(\S+)"', drawn)
    assert hatched == [("0.00", "166.67", "60.00"), ("166.67", "333.33", "60.00")]
    assert 'class="rest"' not in drawn
    # Alone, its id would look like a number of GPUs.
    alone = str(gpus_over_time([row(7, 4, 0.0, 1800.0, asked=2)], 8, 0.0, 3600.0))
    assert 'class="stripe"' in drawn and 'class="stripe"' not in alone
    by_user = gpus_over_time([row(7, 4, 0.0, 1800.0), row(8, 2, 600.0, None, user="<b>")], 8, 0.0, 3600.0, by="user")
    assert "alice</li>" in by_user and "&lt;b&gt;</li>" in by_user and "<b>" not in by_user


def test_a_line_of_what_rigid_jobs_leave() -> None:
    """Protects a reader who asks why GPUs stay free: steps at the right times and heights, also if there are many."""
    others = [(-900.0, 2), (900.0, 6), (1800.0, 0), (2700.0, 9)]
    drawn = str(gpus_over_time([row(7, 4, 0.0, None)], 8, 0.0, 3600.0, others=others))
    (points,) = re.findall(r'class="rest" points="([^"]*)"', drawn)
    corners = [tuple(map(float, point.split(","))) for point in points.split()]
    steps = ((0, 6), (900, 6), (900, 2), (1800, 2), (1800, 8))
    assert corners[:5] == [(1000 * at / 3600.0, 240 * (1 - gpus / 8)) for at, gpus in steps]
    assert corners[-2:] == [(750.0, 240.0), (1000.0, 240.0)]
    assert "less those of jobs that did not opt in</li>" in drawn and 'data-capacity="8" data-most="8"' in drawn
    many = str(gpus_over_time([row(7, 4, 0.0, None)], 8, 0.0, 3600.0, others=[(n / 10, n % 8) for n in range(36_000)]))
    (points,) = re.findall(r'class="rest" points="([^"]*)"', many)
    assert len(points.split()) == 1200


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0, 8, "0 2 4 6 8"), (0, 1, "0 1"), (0, 20480, "0 5000 10000 15000 20000"), (2, 3, "2 3")],
)
def test_whole_numbers_on_an_axis(low: float, high: float, marks: str) -> None:
    """Protects an axis of GPUs from halves, and from more numbers than can be read."""
    assert " ".join(text for _, text in of_numbers(low, high, "GPUs", whole=True).marks) == marks


@pytest.mark.parametrize(
    "span_s", [40.0, 60.0, 100.0, 900.0, 3600.0, 6 * 3600.0, 86_400.0, 30 * 86_400.0, 3 * 365 * 86_400.0]
)
def test_times_on_an_axis(span_s: float) -> None:
    """Protects an axis of time: never more marks than can be read, all of them inside."""
    marks = of_time(1.7e9, 1.7e9 + span_s).marks
    assert 1 + (span_s < 1e7) <= len(marks) <= 8 and all(0 <= at <= 1 for at, _ in marks)
    assert len({text for _, text in marks}) == len(marks)


def test_a_curve_marks_resizes() -> None:
    """Protects the reader of a loss: what a resize did to it can be seen, and odd values break nothing."""
    points = [EpochPoint(n, 2.0 / (n + 1), None, 100.0 * n, 0) for n in range(5)]
    points.append(EpochPoint(5, float("inf"), None, 500.0, 0))
    drawn = str(curve(points, "loss", [(150.0, "1x1 → 1x4"), (9000.0, "later")]))
    assert drawn.count('class="point"') == 5 and "<title>1x1 → 1x4</title>" in drawn and "later" not in drawn
    assert re.search(r'class="change" x1="37.50%"', drawn) and "a resize</li>" in drawn
    assert curve(points, "accuracy") == ""
    assert curve([EpochPoint(0, 0.0, None, 1.0, 0)], "loss").count('class="point"') == 1


def test_scaling_next_to_the_ideal() -> None:
    """Protects whoever asks whether more GPUs pay: what was measured, and what each GPU would add at best."""
    measured = [Measured(1, 1, 32, 60.0, 100.0, 1.0, None, None), Measured(1, 4, 128, 60.0, 320.0, 0.8, 0.9, 288.0)]
    drawn = str(scaling(measured))
    assert drawn.count('class="point"') == 2 and "4 GPUs, batch 128: 288 useful samples/s" in drawn
    assert 'class="ideal"' in drawn and scaling([]) == "" and 'class="predicted"' not in drawn
    faster = replace(measured[1], kind="h100", measured_s=59.0, goodput=900.0)
    assert str(scaling([*measured, faster])) == drawn, "another kind, for a shorter time"
    further = str(scaling(measured, {1: 100.0, 16: 900.0}))
    assert 'class="predicted"' in further and ">15</text>" in further


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
    """At each moment a job's height is the sum of its runs' GPUs, none before and after; what ends when another begins
    leaves no gap."""
    bars = [Bar("a", 0, 10, 1), Bar("a", 15, 20, 4), Bar("b", 5, 12, 2), Bar("a", 10, 12, 3)]
    moments = np.array([0, 5, 10, 12, 15, 20])
    holding = held(bars, ["a", "b"], moments)
    assert holding.tolist() == [[1, 1, 3, 0, 4, 0], [0, 2, 2, 0, 0, 0]]
    assert (holding[:, :-1] * np.diff(moments)).sum() == sum(bar.gpus * (bar.end - bar.start) for bar in bars)


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
