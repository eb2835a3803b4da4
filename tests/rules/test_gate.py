"""The gate: of each job one answer a tick, which a policy is shown and the plan keeps to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db import JobHistory, ResizeRecord
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.learn.learner import Learner
from slurm_ones.policy.contract import Allocation, Schedule
from slurm_ones.rules.blocks import REQUEUE
from slurm_ones.rules.gate import UnderWay
from slurm_ones.rules.plan import plan
from slurm_ones.rules.views import cluster_view, job_models, job_views
from slurm_ones.slurm.model import JobState, Partition
from tests.act.make import history
from tests.rules.make import round_of, rules_of
from tests.rules.test_views import running, seen, waiting

NOW = 10_000.0
GROWING = ResizeRecord(1, 0, Shape(1, 1), None, Shape(2, 4), None, "draining", 0.0, id=1)


@pytest.mark.parametrize(
    ("changes", "known", "resizes", "code"),
    [
        ({}, {}, [], None),
        ({"held": True}, {}, [GROWING], "resize_under_way"),
        ({"held": True, "batch": False}, {}, [], "interactive"),
        ({"held": True, "start_time": NOW - 1}, {}, [], "held_by_owner"),
        ({"held": True, "admin_held": True}, {}, [], "held_by_operator"),
        ({"flags": frozenset({"COMPLETING"})}, {}, [], "completing"),
        ({"state": JobState.SUSPENDED}, {}, [], "not_running"),
        ({"start_time": NOW - 1}, {"spec": None}, [], "dwell_time"),
        ({}, {"spec": None}, [], "nothing_reported"),
        ({}, {"misfit": (2, 4)}, [], "gpus_idle"),
        ({"comment": "ones: gpus=1-4 batch=512-1024"}, {"spec": Spec(32, 256, 64, 1000, 5)}, [], "batch_misses"),
        (
            {"comment": "ones: gpus=1-4 batch=512-1024", "start_time": NOW - 1},
            {"spec": Spec(32, 256, 64, 1000, 5)},
            [],
            "batch_misses",  # it does not pass, as the dwell time does
        ),
        ({"start_time": NOW - 1}, {"misfit": (2, 4)}, [], "gpus_idle"),
        ({"comment": "ones: gpus=1-4 batch=256-1024"}, {"spec": Spec(32, 256, 64, 1000, 5)}, [], None),
        ({"state": JobState.PENDING}, {"misfit": (2, 4)}, [], "gpus_idle"),
        ({}, {"misfit": (2, 1)}, [], "gpus_shared"),
        ({"time_limit_s": NOW + 1}, {"interrupted": (1.0,)}, [], "near_time_limit"),
        ({}, {"interrupted": (1.0,)}, [], "resizes_per_job"),
    ],
)
def test_view_and_plan_agree(
    changes: dict[str, Any], known: dict[str, Any], resizes: list[ResizeRecord], code: str | None
) -> None:
    """Whatever stands against a job first, its policy is shown it, and a schedule that asks all the same has it as its
    outcome."""
    job = running(1, Shape(1, 1), "n1", **({"start_time": 1.0, "time_limit_s": 0.0} | changes))
    histories: dict[int, JobHistory] = {1: history(1, **known)}
    settings = {"limits": {"resizes_per_job": 1, "near_end_s": 0}, "resize": {"dwell_s": 300}}
    round_ = round_of(seen(job, used={"n1": 1}), *resizes, histories=histories, now=NOW, **settings)
    rules = round_.partition("gpu")
    (view,) = job_views(round_, rules, cluster_view(round_, rules), job_models(round_, Learner()))
    made = plan(Schedule({1: Allocation(Shape(1, 2), 32)}), rules)
    assert (view.fixed.code if view.fixed else None) == code
    assert made.outcomes[1] == (view.fixed or made.outcomes[1]) and len(made.begin) == (code is None)


def test_what_is_begun_counts_at_once() -> None:
    """Partitions are planned one after the other: what the first begins counts for the caps and the turns of the
    next."""
    jobs = [
        running(1, Shape(1, 1), "n1", user="alice"),
        running(2, Shape(1, 1), "n2", user="alice", partitions=("other",)),
    ]
    look = seen(*jobs, used={"n1": 1, "n2": 1})
    both = replace(
        look.snapshot,
        partitions={name: Partition(name, True, ("n1", "n2"), 0.0, 0, False) for name in ("gpu", "other")},
    )
    round_ = round_of(replace(look, snapshot=both), limits={"gpus_per_user": 8})
    assert [cap.gpus for cap in round_.partition("gpu").caps] == [7]
    after = round_.begun({2: UnderWay(Shape(1, 3))})
    rules = after.partition("gpu")
    assert ([cap.gpus for cap in rules.caps], rules.open) == ([5], {REQUEUE: 1})
    assert (dict(round_.partition("gpu").free), dict(rules.free)) == ({"n1": 3, "n2": 3}, {"n1": 0, "n2": 3})
    assert after.begun({}) is after


def test_resizes_of_a_partition_with_other_nodes_take_nothing_here() -> None:
    """A job of another partition finds its GPUs there."""
    held = waiting(1, Shape(1, 4), partitions=("other",), held=True)
    assert sum(rules_of(seen(held), replace(GROWING, new_shape=Shape(1, 4))).free.values()) == 16
