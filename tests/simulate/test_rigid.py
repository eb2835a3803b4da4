"""Rigid jobs beside elastic ones, with the whole companion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_ones.simulate.outcome import JobOutcome
from slurm_ones.simulate.run import AT_ONCE, run
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload

LONG = build(KINDS["bert-glue"], name="long")
BRIEF = build(replace(KINDS["resnet18-cifar10"], epochs=8), name="brief")
AT = 400.0
"""When the rigid job comes."""


def outcomes(asked: int, priority: int, **limits: Any) -> tuple[JobOutcome, JobOutcome]:
    """An elastic job of so many GPUs, alone on 4 of them, and a rigid one of 2 that comes later."""
    jobs = (
        Submission("elastic", 0.0, "long", asked, LONG.base_batch),
        Submission("rigid", AT, "brief", 2, BRIEF.base_batch, elastic=False, priority=priority),
    )
    work = Workload("two", jobs, {"long": LONG, "brief": BRIEF})
    elastic, rigid = run("ones", {}, work, ClusterSpec(1, 4), settings={**AT_ONCE, "limits": limits}).jobs
    return elastic, rigid


def waited(rigid: JobOutcome) -> float:
    assert rigid.started is not None
    return rigid.started - rigid.submitted


@pytest.mark.parametrize(("asked", "priority"), [(4, 2), (1, 1)])
def test_a_rigid_job_starts_soon(asked: int, priority: int) -> None:
    """One of higher priority, and one that only wants what the elastic job has grown into: after a tick, a drain and a
    look of the scheduler. Without that it waits for the elastic job's end."""
    elastic, rigid = outcomes(asked, priority)
    assert waited(rigid) < 60 + 60
    assert elastic.ended is not None and elastic.resizes >= 1
    alone, late = outcomes(asked, priority, yield_to_rigid=False)
    assert alone.ended is not None and waited(late) >= alone.ended - AT > 240


def test_what_a_job_asked_for_is_not_given_to_one_behind_it() -> None:
    """Of equal priority, the first come is first served."""
    elastic, rigid = outcomes(4, 1)
    assert elastic.ended is not None and elastic.resizes == 0
    assert waited(rigid) >= elastic.ended - AT


def test_a_job_grows_within_its_share() -> None:
    """Alone on four GPUs, of which elastic jobs may grow into half."""
    elastic, _ = outcomes(1, 1, share=0.5, yield_to_rigid=False)
    assert elastic.gpu_s <= 2 * elastic.running_s


def test_resizes_of_a_job_are_counted() -> None:
    """It is interrupted so often in its life and no more, though it would grow, shrink, and grow again."""
    assert outcomes(1, 1)[0].resizes > 1
    assert outcomes(1, 1, resizes_per_job=1)[0].resizes == 1
