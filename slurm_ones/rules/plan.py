"""From a schedule to the resizes that may begin now.

Nothing here changes anything: it says for each job that the schedule would change whether its resize begins, or in
words for its owner why it does not (yet).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ones_db import JobHistory, ResizeRecord
from slurm_ones.config import LimitSettings, ResizeSettings
from slurm_ones.observe.eligibility import Elastic
from slurm_ones.rules.caps import Cap, hindering
from slurm_ones.rules.dwell import near_limit, resized_enough, rested_at
from slurm_ones.rules.reserved import holdings, set_aside, target_of
from slurm_ones.schedule.policy import Allocation, Schedule
from slurm_ones.slurm.gpus import take
from slurm_ones.slurm.model import PARKED, Shape

DEFERRED = "it is kept from starting"
"""Outcome of a waiting job that the schedule parks."""


@dataclass(frozen=True)
class Change:
    """A resize; where the shapes are equal a change of batch alone, and where the new one is `PARKED` a stop."""

    elastic: Elastic
    old: Shape
    new: Shape
    old_batch: int | None
    new_batch: int | None
    """None leaves the job's own."""

    @property
    def job_id(self) -> int:
        return self.elastic.job.job_id

    @property
    def parks(self) -> bool:
        return self.new == PARKED

    def __str__(self) -> str:
        return f"{self.old} → {'parked' if self.parks else self.new}"


@dataclass(frozen=True)
class Plan:
    """What begins now, and for each job of the schedule what became of it."""

    begin: tuple[Change, ...]
    outcomes: Mapping[int, str]
    deferred: frozenset[int] = frozenset()
    """Waiting jobs that must not start now."""
    queued: frozenset[int] = frozenset()
    """Waiting jobs whose resize waits its turn: those that were deferred stay so until it begins."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Of the outcomes, those that a limit of the site is to blame for: words that stay as long as it holds."""


def plan(
    schedule: Schedule,
    elastic: Mapping[int, Elastic],
    histories: Mapping[int, JobHistory],
    open_resizes: Iterable[ResizeRecord],
    free: dict[str, int],
    settings: ResizeSettings,
    now: float,
    limits: LimitSettings = LimitSettings(),
    caps: Sequence[Cap] = (),
) -> Plan:
    """The resizes to begin now. `free` is what Slurm could hand out (`free_gpus`) and is used up.

    The limits of the site are looked at once more, whatever the policy was told and has said: `caps` at every moment
    of the resizes under way, in which a job counts with what it has or is about to have, whichever is more.
    """
    under_way = {r.job_id: r for r in open_resizes}
    most = {id_: _most(one, under_way.get(id_)) for id_, one in elastic.items()}
    most |= {id_: elastic[id_].shape.gpus for id_ in schedule.allocations.keys() & elastic.keys() if not most[id_]}
    set_aside(under_way.values(), elastic, free)
    outcomes = {id_: _wait(elastic[id_], id_ in under_way) for id_ in schedule.parked if _waits(elastic.get(id_))}
    deferred = frozenset(id_ for id_, outcome in outcomes.items() if outcome == DEFERRED)
    changes = sorted(
        (
            _change(elastic[id_], histories.get(id_), schedule.allocations.get(id_))
            for id_ in {*schedule.allocations, *schedule.parked} & elastic.keys() - outcomes.keys()
        ),
        # Shrinks and stops first: what they free is what growing waits for.
        key=lambda change: (change.new.gpus - change.old.gpus, change.job_id),
    )
    for change in sorted(changes, key=lambda change: change.job_id):
        if _waits(change.elastic) and change.job_id not in under_way:
            take(change.new, free)

    begin: list[Change] = []
    resizes = len(under_way)
    queued: set[int] = set()
    refused: dict[int, str] = {}
    for change in changes:
        job, job_id = change.elastic, change.job_id
        if change.old == change.new:
            # An order in the middle of a resize would call its drain off.
            free_to_change = job.job.running and not job.refusal and job_id not in under_way
            if free_to_change and change.old_batch not in (None, change.new_batch):
                begin.append(change)
                outcomes[job_id] = "its batch changes"
            continue
        history = histories.get(job_id)
        outcomes[job_id] = _hindrance(change, history, job_id in under_way, settings, now) or ""
        if not outcomes[job_id]:
            outcomes[job_id] = _limit(change, history, limits, caps, most, now)
            refused |= {job_id: outcomes[job_id]} if outcomes[job_id] else {}
        if outcomes[job_id]:
            continue
        if resizes >= settings.max_open:
            outcomes[job_id] = f"waits its turn: {settings.max_open} resizes are under way"
            queued |= {job_id} if _waits(job) else set()
        elif job.job.running and not take(change.new, free, holdings(job)):
            outcomes[job_id] = f"waits until {change.new} GPUs are free"
        else:
            begin.append(change)
            resizes += 1
            outcomes[job_id] = "begins"
            most[job_id] = max(most[job_id], change.new.gpus)
    return Plan(tuple(begin), outcomes, deferred, frozenset(queued), refused)


def _most(one: Elastic, resize: ResizeRecord | None) -> int:
    """GPUs that the job has, or is about to have through a resize, whichever is more."""
    return max(one.shape.gpus if one.job.running else 0, target_of(resize).gpus if resize is not None else 0)


def _limit(
    change: Change,
    history: JobHistory | None,
    limits: LimitSettings,
    caps: Sequence[Cap],
    most: Mapping[int, int],
    now: float,
) -> str:
    """Which limit of the site stands against the resize, in words; empty where none does."""
    job = change.elastic.job
    if said := near_limit(job, limits, now) or resized_enough(job, history, limits, now):
        return said
    asked = change.elastic.shape.gpus
    if history is not None:
        asked = max(asked, history.job.requested_nodes * history.job.requested_gpus_per_node)
    if change.new.gpus <= asked:
        return ""
    cap = hindering(caps, change.job_id, change.new.gpus, lambda other: most.get(other, 0))
    return cap.words if cap is not None else ""


def _waits(job: Elastic | None) -> bool:
    return job is not None and job.job.pending


def _change(job: Elastic, history: JobHistory | None, allocation: Allocation | None) -> Change:
    """From what the job has to its allocation, or to nothing where it has none: it is parked."""
    batch = history.batch if history else None
    if allocation is None:
        return Change(job, job.shape, PARKED, batch, None)
    return Change(job, job.shape, allocation.shape, batch, allocation.batch)


def _wait(job: Elastic, under_way: bool) -> str:
    """What becomes of a waiting job that must not start."""
    if under_way:
        return "a resize is under way"
    if job.refusal:
        return job.refusal
    if job.job.held:
        return "it is held by its owner"
    if job.job.completing:
        return "it is completing"
    return DEFERRED


def _hindrance(
    change: Change, history: JobHistory | None, under_way: bool, settings: ResizeSettings, now: float
) -> str | None:
    """Why the job is not resized now, None where nothing stands against it."""
    job = change.elastic.job
    if under_way:
        return "a resize is under way"
    if change.elastic.refusal:
        return change.elastic.refusal
    rested = rested_at(job, history, settings.dwell_s)
    if job.pending and job.held:
        return "it is held by its owner"
    if now < rested and (job.pending or job.running):
        return f"it may be resized in {rested - now:.0f} s (dwell time {settings.dwell_s:.0f} s)"
    if job.pending:
        return None
    if not job.running or job.completing:
        return f"it is {job.state.value.lower()}"
    if change.parks and not settings.preempt:
        return "it runs on: pre-empting is switched off"
    if change.new.gpus < change.old.gpus and not settings.shrink:
        return "shrinking is switched off"
    if history is None or history.spec is None:
        return "it has not reported what it can do: is it started by ones-run?"
    return None
