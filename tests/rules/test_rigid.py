"""Which waiting jobs elastic ones make room for, and what caps bear on a partition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ones_db import ResizeRecord
from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.jobs.elastic import Observation
from slurm_ones.rules.rigid import PendingJob
from slurm_ones.slurm.model import Job
from tests.rules.make import demand_of, rules_of, shown
from tests.rules.test_views import running, seen
from tests.rules.test_views import waiting as waits


def rigid(job_id: int, shape: Shape, **other: Any) -> Job:
    return waits(job_id, shape, **({"comment": "", "priority": 5} | other))


def full(*jobs: Job) -> Observation:
    """An elastic job on all of n1 to n3, and others."""
    elastic = running(1, Shape(3, 4), "n1", "n2", "n3", priority=3)
    return seen(elastic, *jobs, used={"n1": 4, "n2": 4, "n3": 4})


def test_what_a_rigid_job_needs() -> None:
    """Its nodes and GPUs, its place in Slurm's order, how long it may run; and what is free for it."""
    found = demand_of(full(rigid(7, Shape(2, 4))))
    assert found.pending == [PendingJob(7, 2, 4, (-5, 7), 3600.0)]
    asks = [rigid(8, Shape(1, 4), kind="a100"), rigid(9, Shape(1, 4), kind="a100,v100")]
    assert [one.kind for one in demand_of(full(*asks)).pending] == ["a100", ""]
    assert found.free == {"n1": 0, "n2": 0, "n3": 0, "n4": 4}
    assert found.ranks == {1: (-3, 1)}


def test_slurms_order() -> None:
    """By priority, and of equal ones who was submitted first."""
    jobs = [rigid(5, Shape(1, 1)), rigid(6, Shape(1, 1), priority=9), rigid(7, Shape(1, 1), priority=9)]
    assert [pending.job_id for pending in demand_of(full(*jobs)).pending] == [6, 7, 5]


@pytest.mark.parametrize(
    "harmless",
    [
        {"held": True},
        {"reason": "Dependency"},
        {"reason": "BeginTime"},
        {"eligible_time": 60.0},
        {"reason": "QOSMaxGRESPerUser"},
        {"reason": "AssocGrpGRES"},
        {"reason": "BadConstraints"},
        {"reason": "ReqNodeNotAvail, UnavailableNodes:n1"},
        {"reason": "PartitionTimeLimit"},
        {"partitions": ("other",)},
        {"partitions": ("other", "gpu")},
        {"nodes": 5},
        {"gpus_per_node": 5},
        {"gpus_per_node": 0},
        {"comment": "ones: gpus=1-4"},
    ],
)
def test_a_job_that_could_not_start_takes_nothing(harmless: dict[str, Any]) -> None:
    """Held, waiting for something else, larger than the partition, without GPUs, or elastic itself."""
    assert not demand_of(full(replace(rigid(7, Shape(2, 4)), **harmless))).pending


def test_a_job_that_opted_in_and_is_refused_is_rigid() -> None:
    """It waits for room like any other, and nothing grows meanwhile."""
    look = full(rigid(7, Shape(1, 4), comment="ones: gpus=1-4", batch=False))
    assert [pending.job_id for pending in demand_of(look).pending] == [7]
    assert shown(look).gpus == 12


def test_a_job_that_is_trained_within_another_is_not_rigid() -> None:
    """It does not wait for room, though Slurm's reason says so until its deferral shows."""
    look = full(rigid(7, Shape(1, 1), comment="ones: gpus=1 fuse=a"))
    fused = replace(look.elastic[7], refusal=reason("fused", carrier=1, name="a"))
    assert not demand_of(replace(look, elastic={**look.elastic, 7: fused})).pending


def test_gpus_asked_for_in_all() -> None:
    """--gpus=6 on two nodes is three of each."""
    job = rigid(7, Shape(2, 0), gpus_total=6)
    assert [(pending.nodes, pending.gpus_per_node) for pending in demand_of(full(job)).pending] == [(2, 3)]


def test_whole_nodes() -> None:
    """There a job takes all GPUs of its nodes, whether it asks for them or not."""
    look = full(rigid(7, Shape(2, 0)))
    (pending,) = demand_of(look, whole_node_gpus={"gpu": 8}).pending
    assert (pending.nodes, pending.gpus_per_node) == (2, 8)


def test_what_is_being_given_up_is_counted_once() -> None:
    """While a job shrinks from three nodes to one, the two others are as good as free; one that grows takes."""
    base = ResizeRecord(1, 0, Shape(3, 4), None, Shape(1, 4), None, "draining", 0.0, id=1)
    look = full(rigid(7, Shape(2, 4)))
    assert demand_of(look, base).free == {"n1": 0, "n2": 4, "n3": 4, "n4": 4}
    assert demand_of(look, replace(base, new_shape=Shape(0, 4))).free == {"n1": 4, "n2": 4, "n3": 4, "n4": 4}
    assert demand_of(look, replace(base, new_shape=Shape(4, 4))).free == {"n1": 0, "n2": 0, "n3": 0, "n4": 0}
    assert demand_of(look, replace(base, state="waiting", back=True)).free["n4"] == 4


def test_nodes_that_take_no_jobs_are_not_given_up() -> None:
    """A rigid job could not start there."""
    elastic = running(1, Shape(2, 4), "n1", "n2")
    look = seen(elastic, rigid(7, Shape(1, 4)), used={"n1": 4, "n2": 4}, unusable=("n2", "n3", "n4"))
    assert demand_of(look).free == {"n1": 0}


def test_when_running_jobs_end() -> None:
    """By their time limits, as Slurm plans."""
    others = running(3, Shape(1, 4), "n4", comment="", start_time=0.0, time_limit_s=600.0)
    found = demand_of(full(others, rigid(7, Shape(2, 4), time_limit_s=0.0)))
    assert [release.after_s for release in found.releases if "n4" in release.gpus] == [600.0]
    assert found.pending[0].limit_s == math.inf


def test_yielding_is_switched_off() -> None:
    """By its own setting, or with all shrinking of running jobs."""
    look = full(rigid(7, Shape(2, 4)))
    assert not demand_of(look, limits={"yield_to_rigid": False}).pending
    assert not demand_of(look, resize={"shrink": False}).pending
    assert demand_of(look).pending


def test_caps_of_users_accounts_and_partitions() -> None:
    """A name's own comes before the general one, and what it has in other partitions counts."""
    jobs = [
        running(1, Shape(1, 4), "n1", user="alice", account="a"),
        running(2, Shape(1, 2), "n2", user="bob", account="a"),
        running(3, Shape(1, 3), "n3", user="alice", account="b", partitions=("other",)),
    ]
    look = seen(*jobs, used={"n1": 4, "n2": 2, "n3": 3})
    site = {"gpus_per_user": 8, "gpus_of_user": {"bob": 3}, "gpus_of_account": {"a": 6}, "share": 0.5}
    found = {str(cap.reason).split(" grow ")[0]: (cap.gpus, cap.jobs) for cap in rules_of(look, limits=site).caps}
    assert found == {
        "elastic jobs": (8, frozenset({1, 2})),
        "elastic jobs of user alice": (5, frozenset({1})),
        "elastic jobs of user bob": (3, frozenset({2})),
        "elastic jobs of account a": (6, frozenset({1, 2})),
    }
    growing = ResizeRecord(3, 0, Shape(1, 3), None, Shape(2, 4), None, "draining", 0.0, id=1)
    assert {cap.gpus for cap in rules_of(look, growing, limits=site).caps if "alice" in str(cap.reason)} == {0}
    assert rules_of(look).caps == ()
