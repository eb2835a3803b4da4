"""Rounds for the tests of the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ones_db import JobHistory, ResizeRecord
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Observation
from slurm_ones.policy.contract import ClusterView
from slurm_ones.rules.gate import PartitionRules, Round, under_way
from slurm_ones.rules.growth import with_growth
from slurm_ones.rules.views import cluster_view


def round_of(
    seen: Observation,
    *resizes: ResizeRecord,
    histories: Mapping[int, JobHistory] | None = None,
    now: float = 0.0,
    **settings: Any,
) -> Round:
    """What a tick has seen at that time, under these settings."""
    return Round(seen, histories or {}, Settings.model_validate(settings), under_way(resizes), now)


def rules_of(seen: Observation, *resizes: ResizeRecord, **settings: Any) -> PartitionRules:
    return round_of(seen, *resizes, **settings).partition("gpu")


def shown(seen: Observation, *resizes: ResizeRecord, partition: str = "gpu", **settings: Any) -> ClusterView:
    """The partition as its policy sees it."""
    round_ = with_growth(round_of(seen, *resizes, **settings))
    return cluster_view(round_, round_.partition(partition))
