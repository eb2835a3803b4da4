"""Faults on a real Slurm where jobs of blocks grow by guests: others come for what those hold, at the worst moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import SlurmJob
from tests.endtoend.fault_site import AGAIN, GUEST, FaultSite
from tests.endtoend.faults import SAVED_S, Inject, blocks_of, in_blocks, kind, later, strike
from tests.faults.kinds import FaultKind

GUEST_KINDS: dict[str, Sequence[str | None]] = {}
"""Kinds that need guests, and at which gates each happens; None for any moment."""
JOINS = (State.OPENING.value, State.JOINING.value)
LEAVES = (State.LEAVING.value,)
MOMENTS = (None, State.PREPARING.value, *JOINS, *LEAVES, "after hold", "after reuse")
PATIENCE_S = 4.0
"""From the fault until a guest is as it has to be; else another one is struck."""
FORGOTTEN_S = 3.0
"""A block that was started so long ago has processes."""
KILLED_S = 10.0
"""KillWait, and some more."""
OFTEN, STARTS_S = 10, 8.0
"""So often one task is preempted, if it starts again within so long each time."""
NEEDS = (
    ("--nodes=1", "--gres=gpu:4"),
    ("--nodes=2", "--gres=gpu:3"),
    ("--nodes=1", "--exclusive"),
    ("--partition=other", "--gres=gpu:1"),
    ("--partition=high", "--gres=gpu:2"),
    ("--partition=excl", "--nodes=1"),
    ("--nodes=1", "--ntasks=16"),
    ("--nodes=2", "--mem=3500"),
)
"""What somebody wants besides GPUs of the same partition."""
Guests = list[SlurmJob]


def guest_kind(
    what: FaultKind | str, gates: Sequence[str | None] = MOMENTS, modes: Sequence[str] = ("cancel", "requeue")
) -> Callable[[Inject], Inject]:
    """Register a kind that needs guests, and one of these PreemptModes."""
    GUEST_KINDS[what.value if isinstance(what, FaultKind) else what] = gates
    return kind(what, lambda site: site.guests in modes)


def _guests(
    site: FaultSite, job_id: int, is_struck: Callable[[int, list[int]], bool] = lambda task, members: True
) -> Guests:
    """Guests of this job, of whose tasks and members that holds; after a while those of any job, and then any guest.
    Meanwhile the companion goes on."""
    until = time.monotonic() + PATIENCE_S
    while True:
        guests = [job for job in site.records().values() if job.running and job.qos == GUEST]
        members = {id_: blocks_of(site, id_)[0] for id_ in {job.array_id for job in guests}}
        struck = [job for job in guests if is_struck(job.array_tasks[0], members[job.array_id])]
        if own := [job for job in struck if job.array_id == job_id]:
            return own
        if time.monotonic() > until:
            return struck or guests
        site.open_gate()
        time.sleep(0.1)


def _comes(site: FaultSite, *options: str) -> int:
    """Somebody who stays until one of the next faults."""
    job_id = site.rigid(*options)
    later(site, lambda: site.scontrol("scancel", str(job_id), user="bob"))
    return job_id


def _come_for(site: FaultSite, guests: Guests, *options: str) -> int:
    """Submit a job that wants all GPUs of a guest's node that are free or held by guests."""
    for node in [guest.node_list[0] for guest in site.random.sample(guests, min(len(guests), 1))]:
        kept = [job for job in site.records().values() if job.running and node in job.node_list and job.qos != GUEST]
        gpus = 4 - sum(job.gpus_per_node for job in kept)
        return _comes(site, f"--nodelist={node}", f"--gres=gpu:{gpus}", *options)
    return _comes(site, "--gres=gpu:1", *options)


def _come_beyond(site: FaultSite, guests: int) -> None:
    """Others come for all that is free, and as many guests."""
    taken = sum(job.nodes * job.gpus_per_node for job in site.records().values() if job.running)
    crowd = site.crowd(max(16 - taken, 0) + guests)
    later(site, lambda: site.scontrol("scancel", str(crowd), user="bob"))


def _signal(site: FaultSite, guests: Guests, number: signal.Signals) -> None:
    for guest in guests:
        for pid in site.pids(guest.array_id, guest.array_tasks[0]):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _deaf(site: FaultSite, job_id: int) -> Guests:
    """A guest that hears no SIGTERM any more, and for whose node somebody comes: Slurm kills it after KillWait."""
    guests = _guests(site, job_id)[:1]
    _signal(site, guests, signal.SIGSTOP)
    _come_for(site, guests)
    site.open_gate()
    return guests


@guest_kind(FaultKind.PREEMPTED_BLOCK)
def _(site: FaultSite, job_id: int) -> None:
    _come_beyond(site, 1)


@guest_kind(FaultKind.PREEMPTED_TWO)
def _(site: FaultSite, job_id: int) -> None:
    _come_beyond(site, 2)


@guest_kind(FaultKind.OTHER_JOB)
def _(site: FaultSite, job_id: int) -> None:
    _comes(site, *site.random.choice(NEEDS))


@guest_kind(FaultKind.PREEMPTED_KILLED)
def _(site: FaultSite, job_id: int) -> None:
    guests = _deaf(site, in_blocks(site, job_id))
    until = time.monotonic() + KILLED_S
    while time.monotonic() < until and any(site.pids(one.array_id, one.array_tasks[0]) for one in guests):
        time.sleep(0.2)
    _signal(site, guests, signal.SIGCONT)


@guest_kind(FaultKind.PREEMPTED_AGAIN)
def _(site: FaultSite, job_id: int) -> None:
    guests = _deaf(site, in_blocks(site, job_id))
    until, completing = time.monotonic() + KILLED_S, False
    while time.monotonic() < until and not completing:
        now = site.records()
        completing = all(one.job_id not in now or now[one.job_id].completing for one in guests)
    for guest in guests:
        site.scontrol("scontrol", "requeue", str(guest.key), user="root")
    _signal(site, guests, signal.SIGCONT)


@guest_kind(FaultKind.PREEMPTED_LEADER)
def _(site: FaultSite, job_id: int) -> None:
    """Of a job that a base block leads that one's rank dies first: a guest takes its place."""
    job_id = in_blocks(site, job_id)
    members = blocks_of(site, job_id)[0]
    guests = {job.array_tasks[0] for job in _guests(site, job_id) if job.array_id == job_id}
    if len(members) > 1 and members[0] not in guests:
        strike(site, job_id, members, signal.SIGKILL)
    _come_for(site, _guests(site, job_id, lambda task, members: [task] == members[:1]))


@guest_kind(FaultKind.PREEMPTED_NEWCOMER, JOINS)
@guest_kind(FaultKind.PREEMPTED_LEAVING, LEAVES)
def _(site: FaultSite, job_id: int) -> None:
    _come_for(site, _guests(site, in_blocks(site, job_id), lambda task, members: task not in members))


@guest_kind(FaultKind.PREEMPTED_ALONE)
def _(site: FaultSite, job_id: int) -> None:
    for companion in site.companions:
        companion.kill(absent_s=site.random.uniform(2, 6))
    _come_for(site, _guests(site, in_blocks(site, job_id)))


@guest_kind(FaultKind.PREEMPTED_DOWN)
def _(site: FaultSite, job_id: int) -> None:
    rigid = _come_for(site, _guests(site, in_blocks(site, job_id)), "--hold")
    # What Slurm has started and not saved it starts once more.
    for companion in site.companions:
        companion.signal(signal.SIGSTOP)
    time.sleep(SAVED_S)
    site.scontrol("scontrol", "release", str(rigid), user="root")
    for companion in site.companions:
        companion.signal(signal.SIGCONT)
    time.sleep(site.random.uniform(0, 1))
    site.cluster.kill_slurmctld()
    site.open_gate()
    time.sleep(site.random.choice([0, 0.5, 2, 6]))
    site.cluster.start_slurmctld()
    _cancel_forgotten(site)


def _cancel_forgotten(site: FaultSite) -> None:
    """Cancel blocks that had ended before slurmctld was killed, and that it shows as running. The documents say so."""
    time.sleep(FORGOTTEN_S)
    old = [job for job in site.records().values() if job.running and job.start_time < time.time() - FORGOTTEN_S]
    for job in old:
        if job.array_id in site.expected and not site.pids(job.array_id, job.array_tasks[0]):
            site.scontrol("scancel", str(job.key), user="root")


@guest_kind(FaultKind.PREEMPTED_OFTEN, (None,), modes=("requeue",))
def _(site: FaultSite, job_id: int) -> None:
    """Its owner releases it each time, so that Slurm starts it again."""
    for guest in _guests(site, in_blocks(site, job_id))[:1]:
        for _ in range(OFTEN):
            site.scontrol("scontrol", "release", str(guest.key))
            if (now := _await(site, guest, lambda now: now.running)) is None:
                return
            rigid = _come_for(site, [now])
            _await(site, guest, lambda now: not now.running)
            site.scontrol("scancel", str(rigid), user="bob")


def _await(site: FaultSite, guest: SlurmJob, seen: Callable[[SlurmJob], bool]) -> SlurmJob | None:
    """Its task, once that is so of it; None if it is not before long."""
    until = time.monotonic() + STARTS_S
    while time.monotonic() < until:
        now = site.records().get(guest.job_id)
        if now is not None and seen(now):
            return now
        time.sleep(0.1)
    return None


@guest_kind(FaultKind.PREEMPTED_ENDED)
def _(site: FaultSite, job_id: int) -> None:
    guests = _guests(site, in_blocks(site, job_id))[:1]
    for guest in guests:
        site.scontrol("scontrol", "update", f"JobId={guest.key}", "Requeue=0")
    _come_for(site, guests)


@guest_kind(FaultKind.PREEMPTED_EXIT, modes=("cancel",))
def _(site: FaultSite, job_id: int) -> None:
    for guest in _guests(site, in_blocks(site, job_id))[:1]:
        strike(site, guest.array_id, [*guest.array_tasks], AGAIN)


@guest_kind("owner cancels a guest")
def _(site: FaultSite, job_id: int) -> None:
    for guest in _guests(site, in_blocks(site, job_id))[:1]:
        if blocks_of(site, guest.array_id)[0] == [*guest.array_tasks]:
            site.expected[guest.array_id].ends |= {guest.state.CANCELLED}
        site.scontrol("scancel", str(guest.key))


@guest_kind("owner holds a guest")
def _(site: FaultSite, job_id: int) -> None:
    for guest in _guests(site, in_blocks(site, job_id))[:1]:
        site.expected[guest.array_id].kept.add(guest.array_tasks[0])
        site.scontrol("scontrol", "hold", str(guest.key))
