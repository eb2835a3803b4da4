"""Kinds of GPU in what is learned: factors from few measurements, with their doubt."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ones_db import JobHistory, ThroughputPoint
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.learn.hierarchy import SCRIPT, SITE
from slurm_ones.learn.histories import base_kind
from slurm_ones.learn.learner import Learner
from tests.learn.test_knowledge import history

KINDS = ("slow", "fast")


def ran(job_id: int, dataset: int = 1000, user: str = "alice", **speeds: float) -> JobHistory:
    """A job that measured these speeds on one GPU of each kind."""
    points = [ThroughputPoint(Shape(1, 1), 32, speed, 5.0 + i, kind) for i, (kind, speed) in enumerate(speeds.items())]
    told = replace(history(job_id, 4), throughput=tuple(points), spec=Spec(32, 256, 64, dataset, 10))
    return replace(told, job=replace(told.job, user=user))


def on(learner: Learner, known: JobHistory, gpus: int = 1) -> dict[str, tuple[float, float]]:
    """Speed and doubt on each kind."""
    where = np.array([1]), np.array([gpus]), np.array([32 * gpus])
    models = learner.about(known, kinds=KINDS).on
    return {kind: (float(m.throughput(*where)[0]), float(m.uncertainty(*where)[0])) for kind, m in models.items()}


def test_a_kind_that_nobody_knows() -> None:
    """As fast as the one that is known, with a doubt that no policy relies on."""
    found = on(Learner(), ran(1, slow=100.0))
    assert found["slow"][0] == pytest.approx(100.0, rel=0.05) and found["fast"][0] == pytest.approx(found["slow"][0])
    assert found["fast"][1] > 0.9 * SITE and found["slow"][1] < 0.2


def test_what_the_site_guesses() -> None:
    """For a job that has measured on one kind, and for one that has not."""
    learner = Learner(gpu_speeds={"slow": 1.0, "fast": 3.0})
    found = on(learner, ran(1, slow=100.0))
    assert found["fast"][0] == pytest.approx(3 * found["slow"][0], rel=0.01)
    assert SCRIPT < found["fast"][1] < SITE
    for unmeasured in (history(2, 0, speed=0.0), None):
        models = learner.about(unmeasured, kinds=KINDS).on
        one = np.array([1]), np.array([1]), np.array([32])
        speeds = {kind: float(model.throughput(*one)[0]) for kind, model in models.items()}
        assert speeds["fast"] == pytest.approx(3 * speeds["slow"], rel=0.01)


def test_what_the_job_itself_measured_counts_most() -> None:
    """Whatever the site guessed: a job that ran on both is known on both."""
    found = on(Learner(gpu_speeds={"slow": 1.0, "fast": 8.0}), ran(1, slow=100.0, fast=200.0))
    assert found["slow"][0] == pytest.approx(100.0, rel=0.25) and found["fast"][0] == pytest.approx(200.0, rel=0.1)
    assert found["fast"][1] < 0.2


def test_jobs_of_a_script_teach_its_others() -> None:
    """Two that ran on both say much of a third that ran on one; a strange script learns less from them. Jobs of which
    some ran here and some there say it too."""
    learner = Learner()
    learner.finished([ran(i, slow=100.0, fast=250.0) for i in (1, 2)])
    third, strange = on(learner, ran(3, slow=80.0)), on(learner, ran(4, dataset=555, slow=80.0))
    assert math.log(third["fast"][0] / third["slow"][0]) == pytest.approx(math.log(2.5), abs=0.15)
    assert 1.2 < strange["fast"][0] / strange["slow"][0] < third["fast"][0] / third["slow"][0]
    assert third["fast"][1] < strange["fast"][1] < SITE
    apart = Learner()
    apart.finished([*(ran(i, slow=100.0) for i in range(3)), *(ran(i, fast=250.0) for i in range(3, 6))])
    found = on(apart, ran(9, slow=100.0))
    assert 2.0 < found["fast"][0] / found["slow"][0] < 2.6


def test_figures_of_several_kinds_are_not_mixed() -> None:
    """A new job of the script is expected to be as fast on each kind as others were there."""
    learner = Learner()
    learner.finished([*(ran(i, slow=100.0) for i in range(4)), *(ran(i, fast=300.0) for i in range(4, 8))])
    found = on(learner, replace(history(9, 0, speed=0.0), spec=Spec(32, 256, 64, 1000, 10)))
    assert found["slow"][0] == pytest.approx(100.0, rel=0.15)
    assert found["fast"][0] == pytest.approx(300.0, rel=0.25)


def test_who_runs_many_jobs_tells_no_more_of_others() -> None:
    """Of a user's jobs of a script the median counts, once."""
    honest = [ran(i, user=f"u{i}", slow=100.0, fast=200.0) for i in range(3)]
    liar = [ran(i, user="liar", slow=100.0, fast=1e5) for i in range(10, 60)]
    learner = Learner()
    learner.finished([*honest, *liar])
    one = Learner()
    one.finished([*honest, liar[0]])
    many, few = (on(each, ran(99, user="bob", slow=100.0)) for each in (learner, one))
    assert many["fast"][0] == pytest.approx(few["fast"][0], rel=0.1)


def test_exchange_is_no_faster_on_faster_gpus() -> None:
    """So a factor of computing brings less at sizes that exchange much."""
    points = [
        ThroughputPoint(Shape(1, n), 32 * n, speed, float(n), "slow")
        for n, speed in ((1, 100.0), (2, 120.0), (4, 140.0))
    ]
    known = replace(history(1, 4), throughput=tuple(points))
    learner = Learner(gpu_speeds={"slow": 1.0, "fast": 4.0})
    one, four = on(learner, known, 1), on(learner, known, 4)
    assert one["fast"][0] / one["slow"][0] == pytest.approx(4.0, rel=0.01)
    assert four["fast"][0] / four["slow"][0] < 3.0


def test_the_kind_that_a_job_knows_best() -> None:
    """That of most sizes; of old runs nobody noted it."""
    points = [
        ThroughputPoint(Shape(1, n), 32, 10.0, float(n), kind) for n, kind in ((1, "a"), (2, "a"), (4, "b"), (8, ""))
    ]
    assert base_kind(points) == "a" and base_kind(points[3:]) == "" and base_kind(()) == ""
    assert base_kind([points[0], points[2]]) == "b"


def test_without_kinds_nothing_is_different() -> None:
    learner = Learner()
    known = learner.about(ran(1, slow=100.0), kinds=("slow",))
    assert known.on == {"slow": known.throughput}
    assert learner.about(ran(1, slow=100.0)).on == {}
