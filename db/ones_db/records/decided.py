"""What was decided, and what was done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ones_db.records.reason import NO_REASON, ReasonRecord

RESIZE_DONE = "done"
"""State in which a resize ends that took effect; in every other one the job kept its old shape."""
RESIZE_ROLLED_BACK = "rolled_back"
"""State in which one ends that interrupted its job for nothing."""


class AlternativeRecord(NamedTuple):
    """A size that a decision weighed for a job."""

    nodes: int
    """0 for waiting."""
    gpus_per_node: int
    batch: int
    worth: float
    """What it is worth by itself, in the policy's own unit; more is better."""


@dataclass(frozen=True)
class DecisionJobRecord:
    """What a decision gives one job: a shape and batch, or None (it waits)."""

    job_id: int
    nodes: int | None
    gpus_per_node: int | None
    batch: int | None
    reason: ReasonRecord
    from_nodes: int | None = None
    """What it held when the decision was made; None where it waited."""
    from_gpus_per_node: int | None = None
    from_batch: int | None = None
    acted: bool = False
    outcome: ReasonRecord = NO_REASON
    alternatives: tuple[AlternativeRecord, ...] = ()
    """The best few for this job, best first, what it got among them or not; where the policy tells."""


@dataclass(frozen=True)
class DecisionRecord:
    """One schedule of a policy. `score` is None (or NaN, stored as None) where the policy has none."""

    time: float
    policy: str
    mode: str
    """advise or act."""
    seconds: float
    """What it took to decide."""
    score: float | None = None
    generations: int | None = None
    jobs: tuple[DecisionJobRecord, ...] = ()
    id: int = 0
    """Set by the store."""


@dataclass(frozen=True)
class ResizeRecord:
    """A resize of one job, from the moment it was meant."""

    job_id: int
    restart: int
    """The run it leaves; -1 where the job waited."""
    old_nodes: int
    old_gpus_per_node: int
    old_batch: int | None
    new_nodes: int
    """0 where the job is parked: taken to zero GPUs."""
    new_gpus_per_node: int
    new_batch: int | None
    state: str
    started: float
    decision_id: int | None = None
    order_number: int | None = None
    deadline: float | None = None
    """When the present state is given up."""
    ended: float | None = None
    """None while it is open."""
    outcome: ReasonRecord = NO_REASON
    pause_s: float | None = None
    """From the last step at the old shape to the first at the new one, where it is known."""
    id: int = 0
    """Set by the store."""


@dataclass(frozen=True)
class ResizeStepRecord:
    """One step of a resize; sequence 0 is its beginning."""

    resize_id: int
    sequence: int
    state: str
    time: float
    detail: ReasonRecord
