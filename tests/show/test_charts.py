"""What people look at: plots, pages and tables, and what users' text may not do to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import PARKED, Shape
from slurm_ones.show import charts
from slurm_ones.show.charts import Bar, held, thinned
from slurm_ones.text import plain, resized, safe, seconds
from tests.demo.drawing import draw_gpus, lane


@given(st.text(max_size=400), st.integers(1, 100))
def test_plain_text_cannot_steer_a_terminal(text: str, width: int) -> None:
    """Whatever a job is called, what is printed is one printable line of bounded length."""
    shown = plain(text, width)
    assert shown.isprintable()
    assert len(shown) <= width


def test_safe_text_is_no_markup() -> None:
    """A job called [red]x[/] is shown as such."""
    assert safe("[red]x[/]") == r"\[red]x\[/]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (4.21, "4.2 s"), (59.4, "59 s"), (185, "3 m 05 s"), (7800, "2 h 10 m"), (270_000, "3 d 3 h")],
)
def test_seconds_are_readable(value: float | None, shown: str) -> None:
    """Times are shown in units that fit them."""
    assert seconds(value) == shown


def test_a_parked_job_is_called_so() -> None:
    """A resize to no GPUs has words, not 0x0."""
    assert (resized(Shape(1, 2), Shape(2, 4)), resized(Shape(1, 2), PARKED)) == ("1x2 → 2x4", "1x2 → parked")


def test_a_change_of_the_batch_is_seen() -> None:
    """Also where the shape stays, which would read as no change at all."""
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
    moments, holding = held(bars, ["a", "b"])
    assert moments.tolist() == [0, 5, 10, 12, 15, 20]
    assert holding.tolist() == [[1, 1, 0, 4, 4, 0], [0, 2, 2, 2, 0, 0]]
    assert (holding[:, :-1] * np.diff(moments)).sum() == sum(bar.gpus * (bar.end - bar.start) for bar in bars)


def test_runs_that_follow_each_other_leave_no_gap() -> None:
    """The stripes' areas are the GPU-seconds held, and what ends when another begins leaves no gap."""
    bars = [Bar("a", 0, 10, 1), Bar("a", 12, 20, 4), Bar("b", 5, 12, 2), Bar("a", 10, 12, 3)]
    moments, holding = held(bars, ["a", "b"])
    assert list(moments) == [0, 5, 10, 12, 20]
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


def test_draw_leaves_a_picture(tmp_path: Path) -> None:
    """A PNG of some size is written, also for a cluster on which nothing ran."""
    draw_gpus([lane("one", [Bar("a", 0, 10, 1)], 4), lane("none", [], 4)], tmp_path / "gpus.png")
    assert (tmp_path / "gpus.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("gpus", [1, 2, 4, 16, 18, 1000])
def test_gpus_are_counted_in_whole_numbers(gpus: int) -> None:
    """Protects the scale of small clusters, whose marks would be fractions of a GPU."""
    _, (axis,) = charts._figure(1, 3.5)
    charts._stack(axis, lane("one", [Bar("a", 0, 10, 1)], gpus), ["a"], {"a": "red"}, 1.0)
    marks = [at for at in axis.get_yticks() if at <= gpus]
    assert len(marks) >= 2 and all(at == int(at) for at in marks)
