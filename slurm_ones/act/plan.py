"""From a schedule to the resizes that may begin now.

Nothing here changes anything: it says for each job that the schedule would change whether its resize begins, or in
words for its owner why it does not (yet).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ones_db import JobHistory, ResizeRecord
from slurm_ones.config import ResizeSettings
from slurm_ones.decide.policy import Schedule
from slurm_ones.observe.dwell import rested_at
from slurm_ones.observe.eligible import Elastic
from slurm_ones.observe.reserve import holdings, set_aside
from slurm_ones.slurm.free import take
from slurm_ones.slurm.model import Shape


@dataclass(frozen=True)
class Change:
    """A resize, or where the shapes are equal a change of batch alone."""

    elastic: Elastic
    old: Shape
    new: Shape
    old_batch: int | None
    new_batch: int | None

    @property
    def job_id(self) -> int:
        return self.elastic.job.job_id


@dataclass(frozen=True)
class Plan:
    """What begins now, and for each job of the schedule what became of it."""

    begin: tuple[Change, ...]
    outcomes: Mapping[int, str]


def plan(
    schedule: Schedule,
    elastic: Mapping[int, Elastic],
    histories: Mapping[int, JobHistory],
    open_resizes: Iterable[ResizeRecord],
    free: dict[str, int],
    settings: ResizeSettings,
    now: float,
) -> Plan:
    """The resizes to begin now. `free` is what Slurm could hand out (`free_gpus`) and is used up."""
    under_way = {r.job_id: r for r in open_resizes}
    set_aside(under_way.values(), elastic, free)
    waiting = {id_: a for id_, a in schedule.allocations.items() if id_ in elastic and elastic[id_].job.pending}
    for job_id, allocation in sorted(waiting.items()):
        if job_id not in under_way:
            take(allocation.shape, free)

    begin: list[Change] = []
    outcomes: dict[int, str] = {}
    # Shrinks first: what they free is what growing waits for.
    order = sorted(
        (id_ for id_ in schedule.allocations if id_ in elastic),
        key=lambda id_: (schedule.allocations[id_].shape.gpus - elastic[id_].shape.gpus, id_),
    )
    for job_id in order:
        job, allocation = elastic[job_id], schedule.allocations[job_id]
        history = histories.get(job_id)
        change = Change(job, job.shape, allocation.shape, history.batch if history else None, allocation.batch)
        if change.old == change.new:
            # An order in the middle of a resize would call its drain off.
            free_to_change = job.job.running and not job.refusal and job_id not in under_way
            if free_to_change and change.old_batch not in (None, change.new_batch):
                begin.append(change)
                outcomes[job_id] = "its batch changes"
            continue
        outcomes[job_id] = _hindrance(change, history, job_id in under_way, settings, now) or ""
        if outcomes[job_id]:
            continue
        if len(under_way) + sum(c.old != c.new for c in begin) >= settings.max_open:
            outcomes[job_id] = f"waits its turn: {settings.max_open} resizes are under way"
        elif job.job.running and not take(change.new, free, holdings(job)):
            outcomes[job_id] = f"waits until {change.new} GPUs are free"
        else:
            begin.append(change)
            outcomes[job_id] = "begins"
    return Plan(tuple(begin), outcomes)


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
    if change.new.gpus < change.old.gpus and not settings.shrink:
        return "shrinking is switched off"
    if history is None or history.spec is None:
        return "it has not reported what it can do: is it started by ones-run?"
    if job.time_limit_s and job.start_time + job.time_limit_s - now < settings.dwell_s:
        return "it is near its time limit"
    return None
