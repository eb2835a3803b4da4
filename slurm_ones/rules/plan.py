"""From a schedule to the resizes that may begin now.

Nothing here changes anything: it says for each job that the schedule would change whether its resize begins, or why it
does not (yet).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_ones.observe.eligibility import Elastic
from slurm_ones.reasons import SITE_LIMITS, Reason, reason
from slurm_ones.rules.caps import hindering
from slurm_ones.rules.gate import JobRules, PartitionRules
from slurm_ones.schedule.policy import Allocation, Schedule
from slurm_ones.slurm.model import PARKED, Shape, take


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
    outcomes: Mapping[int, Reason]
    deferred: frozenset[int] = frozenset()
    """Waiting jobs that must not start now."""
    queued: frozenset[int] = frozenset()
    """Waiting jobs whose resize waits its turn: those that were deferred stay so until it begins."""
    refused: Mapping[int, Reason] = field(default_factory=dict)
    """Of the outcomes, those that a limit of the site is to blame for."""


def plan(schedule: Schedule, rules: PartitionRules) -> Plan:
    """The resizes to begin now.

    The limits of the site are looked at once more, whatever the policy was shown and has said: caps at every moment
    of the resizes under way, in which a job counts with what it has or is about to have, whichever is more.
    """
    jobs, settings, free = rules.jobs, rules.settings, dict(rules.free)
    # Who waits and may start counts with what it asks for.
    most = {id_: job.gpus for id_, job in jobs.items()}
    most |= {id_: jobs[id_].elastic.shape.gpus for id_ in schedule.allocations.keys() & jobs.keys() if not most[id_]}
    parked = {id_: jobs[id_] for id_ in schedule.parked & jobs.keys() if jobs[id_].elastic.job.pending}
    outcomes = {id_: job.untouchable or reason("kept_waiting") for id_, job in parked.items()}
    deferred = frozenset(id_ for id_, job in parked.items() if job.untouchable is None)
    changes = sorted(
        (
            _change(jobs[id_], schedule.allocations.get(id_))
            for id_ in {*schedule.allocations, *schedule.parked} & jobs.keys() - parked.keys()
        ),
        # Shrinks and stops first: what they free is what growing waits for.
        key=lambda change: (change.new.gpus - change.old.gpus, change.job_id),
    )
    for change in sorted(changes, key=lambda change: change.job_id):
        if change.elastic.job.pending and jobs[change.job_id].target is None:
            take(change.new, free)

    begin: list[Change] = []
    resizes = rules.open_resizes
    queued: set[int] = set()
    for change in changes:
        job_id, job = change.job_id, jobs[change.job_id]
        running = job.elastic.job.running
        if change.old == change.new:
            # An order in the middle of a resize would call its drain off.
            free_to_change = running and not job.elastic.refusal and job.target is None
            if free_to_change and change.old_batch not in (None, change.new_batch):
                begin.append(change)
                outcomes[job_id] = reason("batch_changes")
            continue
        hindrance = _hindrance(change, job, rules, most)
        if hindrance is not None:
            outcomes[job_id] = hindrance
        elif resizes >= settings.max_open:
            outcomes[job_id] = reason("max_open", resizes=settings.max_open)
            queued |= {job_id} if job.elastic.job.pending else set()
        elif running and not take(change.new, free, job.elastic.holdings):
            outcomes[job_id] = reason("gpus_not_free", shape=str(change.new))
        else:
            begin.append(change)
            resizes += 1
            outcomes[job_id] = reason("begins")
            most[job_id] = max(most[job_id], change.new.gpus)
    refused = {id_: outcome for id_, outcome in outcomes.items() if outcome.code in SITE_LIMITS}
    return Plan(tuple(begin), outcomes, deferred, frozenset(queued), refused)


def _change(job: JobRules, allocation: Allocation | None) -> Change:
    """From what the job has to its allocation, or to nothing where it has none: it is parked."""
    batch = job.history.batch if job.history is not None else None
    if allocation is None:
        return Change(job.elastic, job.elastic.shape, PARKED, batch, None)
    return Change(job.elastic, job.elastic.shape, allocation.shape, batch, allocation.batch)


def _hindrance(change: Change, job: JobRules, rules: PartitionRules, most: Mapping[int, int]) -> Reason | None:
    """Why the job is not resized now, None where nothing stands against it."""
    if job.untouchable is not None:
        return job.untouchable
    if job.elastic.job.running:
        if change.parks and not rules.settings.preempt:
            return reason("preempting_off")
        if change.new.gpus < change.old.gpus and not rules.settings.shrink:
            return reason("shrinking_off")
    if job.resting is not None:
        return job.resting
    if change.new.gpus <= job.requested:
        return None
    cap = hindering(rules.caps, change.job_id, change.new.gpus, lambda other: most.get(other, 0))
    return cap.reason if cap is not None else None
