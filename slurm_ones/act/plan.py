"""From a schedule to the resizes that may begin now.

Nothing here changes anything: it says for each job that the schedule would change whether its resize begins, or in
words for its owner why it does not (yet).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ones_db import JobHistory, ResizeRecord

from slurm_ones.act.states import State
from slurm_ones.config import ResizeSettings
from slurm_ones.decide.policy import Schedule
from slurm_ones.observe.eligible import Elastic
from slurm_ones.slurm.model import Shape, Snapshot


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


def free_gpus(snapshot: Snapshot, whole_node_gpus: Mapping[str, int], partition: str) -> dict[str, int]:
    """GPUs that Slurm could hand out now on each node of the partition."""
    found: dict[str, int] = {}
    part = snapshot.partitions.get(partition)
    for name in part.node_names if part is not None else ():
        node = snapshot.nodes.get(name)
        if node is None or not node.usable:
            continue
        if partition in whole_node_gpus:
            found[name] = whole_node_gpus[partition] if node.idle else 0
        elif part is not None and part.whole_nodes:
            found[name] = node.gpus if node.idle else 0
        else:
            found[name] = node.gpus - node.gpus_used
    return found


def take(shape: Shape, free: dict[str, int], own: Mapping[str, int] | None = None) -> bool:
    """Set the shape's GPUs aside from `free`, counting the job's `own` GPUs as free; False where it does not fit.

    The fullest nodes that are free enough are taken first, as Slurm does.
    """
    own = own or {}
    room = {name: free.get(name, 0) + own.get(name, 0) for name in {*free, *own}}
    fitting = sorted((name for name in room if room[name] >= shape.gpus_per_node), key=lambda n: (room[n], n))
    if len(fitting) < shape.nodes:
        return False
    for name in fitting[: shape.nodes]:
        free[name] = room[name] - shape.gpus_per_node
    for name in set(own) - set(fitting[: shape.nodes]):
        # What a job gives up is offered to others once it is free, not before.
        free.setdefault(name, 0)
    return True


def _own(elastic: Elastic) -> dict[str, int]:
    return dict.fromkeys(elastic.job.node_list, elastic.shape.gpus_per_node)


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
    for resize in under_way.values():
        job = elastic.get(resize.job_id)
        back = State(resize.state).value.endswith("_back")
        shape = (
            Shape(resize.old_nodes, resize.old_gpus_per_node)
            if back
            else Shape(resize.new_nodes, resize.new_gpus_per_node)
        )
        running = job is not None and job.job.running
        if job is not None and not (running and job.shape == shape):
            take(shape, free, _own(job) if running else None)
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
            if job.job.running and change.old_batch not in (None, change.new_batch):
                begin.append(change)
                outcomes[job_id] = "its batch changes"
            continue
        outcomes[job_id] = _hindrance(change, history, job_id in under_way, settings, now) or ""
        if outcomes[job_id]:
            continue
        if len(under_way) + sum(c.old != c.new for c in begin) >= settings.max_open:
            outcomes[job_id] = f"waits its turn: {settings.max_open} resizes are under way"
        elif job.job.running and not take(change.new, free, _own(job)):
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
    if job.pending:
        return "it is held by its owner" if job.held else None
    if not job.running or job.completing:
        return f"it is {job.state.value.lower()}"
    if change.new.gpus < change.old.gpus and not settings.shrink:
        return "shrinking is switched off"
    last = max(job.start_time, (history.last_resize_end if history else None) or 0.0)
    if now < last + settings.dwell_s:
        return f"it may be resized in {last + settings.dwell_s - now:.0f} s (dwell time {settings.dwell_s:.0f} s)"
    if history is None or history.spec is None:
        return "it has not reported what it can do: is it started by ones-run?"
    if job.time_limit_s and job.start_time + job.time_limit_s - now < settings.dwell_s:
        return "it is near its time limit"
    return None
