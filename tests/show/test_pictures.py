"""Pictures of the live page: axes, colours that can be told apart, and what each shape says."""

from __future__ import annotations

import itertools
import random
import re
from importlib.resources import files

import numpy as np
import pytest

from ones_db import EpochPoint, TimelineRow
from ones_db.shape import Shape
from slurm_ones.show import palette
from slurm_ones.show.pictures import curve, gpus_over_time, of_numbers, of_time, scaling
from slurm_ones.show.usage import Measured
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
    by_user = gpus_over_time([row(7, 4, 0.0, 1800.0), row(8, 2, 600.0, None, user="<b>")], 8, 0.0, 3600.0, by="user")
    assert "alice</li>" in by_user and "&lt;b&gt;</li>" in by_user and "<b>" not in by_user


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0, 8, "0 2 4 6 8"), (0, 1, "0 1"), (0, 20480, "0 5000 10000 15000 20000"), (2, 3, "2 3")],
)
def test_whole_numbers_on_an_axis(low: float, high: float, marks: str) -> None:
    """Protects an axis of GPUs from halves, and from more numbers than can be read."""
    assert " ".join(text for _, text in of_numbers(low, high, "GPUs", whole=True).marks) == marks


@pytest.mark.parametrize("span_s", [60.0, 900.0, 3600.0, 6 * 3600.0, 86_400.0, 30 * 86_400.0, 3 * 365 * 86_400.0])
def test_times_on_an_axis(span_s: float) -> None:
    """Protects an axis of time: never more marks than can be read, all of them inside."""
    marks = of_time(1.7e9, 1.7e9 + span_s).marks
    assert len(marks) <= 8 and all(0 <= at <= 1 for at, _ in marks)
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
    further = str(scaling(measured, {1: 100.0, 16: 900.0}))
    assert 'class="predicted"' in further and ">15</text>" in further
