"""What policies decide."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_ones.policy.contract import ClusterView, JobView, Policy, Schedule
from slurm_ones.testing.policies import check, seeded


def decide(policy: Policy, view: ClusterView, jobs: Sequence[JobView], now: float = 0.0, seed: int = 0) -> Schedule:
    schedule = policy.decide(view, jobs, now, seeded(seed))
    check(view, jobs, schedule)
    return schedule


def gpus(schedule: Schedule) -> dict[int, int]:
    return {job_id: got.shape.gpus for job_id, got in schedule.allocations.items()}
