"""Profiles and workloads as researchers have them, and what a bad one is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurm_ones.simulate.workloads.profiles import (
    BadInput,
    read_profile,
    read_profiles,
    read_workload,
    smallest_rotation,
)
from tests.simulate.profiles import EPOCHS, ITERATIONS, write_profile, write_workload


def one(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value])


def test_a_profile_says_what_was_measured(tmp_path: Path) -> None:
    """At measured points the step time is the measured one, to a thousandth; between local batches it is linear."""
    app = read_profile(write_profile(tmp_path / "net"))
    assert app.step_seconds(1, 4, one(4 * 16.0)) == pytest.approx(1.01, rel=1e-3)
    assert app.step_seconds(1, 4, one(4 * 136.0)) == pytest.approx(1.085, rel=0.01)
    assert app.placed_speed((4, 4), 8 * 16.0) == pytest.approx(8 * 16 / 1.51)
    assert (app.base_batch, app.max_batch, app.max_local_batch) == (64, 256, 256)
    assert app.total == 64 * ITERATIONS * EPOCHS


def test_between_placements_it_interpolates(tmp_path: Path) -> None:
    """Three nodes of four lie between two and four of them; nodes that give unequal shares have their own times."""
    app = read_profile(write_profile(tmp_path / "net", placements={"1": 1, "4": 1, "44": 1.5, "4444": 2.0, "31": 7.0}))
    assert app.placed_speed((4, 4, 4), 12 * 16.0) == pytest.approx(12 * 16 / 1.76, rel=0.01)
    assert app.placed_speed((1, 3), 4 * 16.0) == pytest.approx(4 * 16 / 7.01)
    assert app.placed_speed((3, 1), 4 * 16.0) == app.placed_speed((1, 3), 4 * 16.0), "a rotation is the same placement"
    assert smallest_rotation((4, 1, 2)) == (1, 2, 4) != smallest_rotation((4, 2, 1))


def test_what_does_not_fit_a_gpu_is_accumulated(tmp_path: Path) -> None:
    """Passes after the first cost their compute and no exchange; one GPU beyond its base batch makes two passes."""
    app = read_profile(write_profile(tmp_path / "net", batches=(64, 1024)))
    step = 1.0 + 0.01 * 16
    assert app.step_seconds(1, 2, one(1024.0)) == pytest.approx(step + 0.9 * step)
    half = 1.0 + 0.01 * 8
    assert app.step_seconds(1, 1, one(256.0)) == pytest.approx(half + 0.9 * half, rel=0.01)
    assert app.step_seconds(1, 1, one(64.0)) == pytest.approx(1.04, rel=0.01)


def test_efficiency_follows_the_gradient(tmp_path: Path) -> None:
    """(var + sqr) / (var + s · sqr): with variance and norm alike four times the batch brings 2/5 per sample."""
    app = read_profile(write_profile(tmp_path / "net", noise=1.0))
    assert app.efficiency(0.0, [64, 256]).tolist() == pytest.approx([1.0, 0.4])
    assert app.efficiencies(256.0).tolist() == pytest.approx([0.4] * EPOCHS)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("placements.csv", "4,16,1.01", "4,16,fast", r"placements.csv: line 6: column step_time: 'fast' is no"),
        ("placements.csv", "4,16,1.01", "4,16,inf", r"line 6: column step_time: 'inf' is not a number"),
        ("placements.csv", "4,16,1.01", "4,16,-1", r"line 6: column step_time: '-1' is negative"),
        ("placements.csv", "4,16,1.01", "4o,16,1.01", r"line 6: column placement: '4o' is not GPUs per node"),
        ("placements.csv", "step_time", "seconds", r"line 1: no column step_time"),
        ("placements.csv", "1,256,", "2,256,", r"too few points"),
        ("validation-64.csv", "200,200", "100,200", r"progress does not rise"),
        ("validation-64.csv", "300,300,0.3,1.0", "300,300,0.3,nan", r"-64.csv: line 4: column grad_sqr: 'nan'"),
    ],
)
def test_bad_profiles_name_file_line_and_column(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    folder = write_profile(tmp_path / "net")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput, match=message):
        read_profile(folder)


def test_a_profile_of_one_node_alone_is_too_little(tmp_path: Path) -> None:
    """What several nodes do cannot be told from one; a guess would look like a measurement."""
    with pytest.raises(BadInput, match="too few points: several nodes"):
        read_profile(write_profile(tmp_path / "net", placements={"1": 1.0, "4": 1.0}))
    with pytest.raises(BadInput, match="no such directory"):
        read_profiles(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b,1,nut,4,64", r"line 3: column application: 'nut' has no profile; there are net"),
        ("b,-1,net,4,64", r"line 3: column time: '-1' is negative"),
        ("b,nan,net,4,64", r"line 3: column time: 'nan' is not a number"),
        ("a,1,net,4,64", r"line 3: column name: 'a' is there twice"),
        ("b,1,net,0,64", r"line 3: column num_replicas: 0 is not a whole number above 0"),
        ("b,1,net,4,6.5", r"line 3: column batch_size: 6.5 is not a whole number"),
        ("b,1,net,4,", r"line 3: column batch_size: '' is not a number"),
    ],
)
def test_bad_workloads_name_file_line_and_column(tmp_path: Path, row: str, message: str) -> None:
    write_profile(tmp_path / "profiles" / "net")
    path = write_workload(tmp_path / "work.csv", ["a,0,net,4,64", row])
    with pytest.raises(BadInput, match=rf"work\.csv: {message}"):
        read_workload(path, read_profiles(tmp_path / "profiles"))
    with pytest.raises(BadInput, match="no job in it"):
        read_workload(write_workload(path, []), {})
