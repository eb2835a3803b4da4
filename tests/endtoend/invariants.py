"""What must hold after each fault, once all is quiet again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from ones_db import ResizeRecord, Store
from ones_wrapper.protocol import (
    Bye,
    Checkpoint,
    Epoch,
    Hello,
    Membership,
    ProtocolError,
    Report,
    decode_report,
    reports_name,
)
from slurm_ones.act.holds import HeldTasks
from slurm_ones.slurm.model import JobState, SlurmJob
from tests.endtoend.fault_site import GUEST, FaultSite, JobExpectation
from tests.endtoend.harness import BlockTask
from tests.endtoend.light import STEPS

FINE = ("None", "", "Resources", "Priority", "BeginTime", "Cleaning")
"""Reasons for which a job may wait."""
UNAVAILABLE = ("ReqNodeNotAvail", "Nodes required for job are DOWN", "PartitionNodeLimit")
WAIT_UNHELD = ("JobArrayTaskLimit", "BeginTime", "Resources", "Priority", "None", "JobHeldAdmin")
"""Why a block may wait that no companion holds."""
WAIT_FOR_ROOM = ("Resources", "Priority", "None")
TIERS = {"gpu": 1, "other": 10, "excl": 10, "high": 20}
"""Partitions over the nodes of guests, and which of them Slurm serves first."""
PAST_REQUEUE = {"reshaping", "parking"}


class Site(Protocol):
    """Where things were broken: `site.Site`, or another place with jobs and a companion."""

    @property
    def expected(self) -> Mapping[int, JobExpectation]: ...

    def jobs(self) -> Mapping[int, SlurmJob]: ...

    def store(self) -> Store: ...

    def directory(self, job_id: int) -> Path: ...

    def tasks(self, job_id: int) -> Mapping[int, BlockTask]: ...

    def pids(self, job_id: int, task: int | None = None) -> list[int]: ...


@dataclass
class Findings:
    """What was found; each in words."""

    lost: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def found(self) -> list[str]:
        return [*self.lost, *self.held, *self.broken]


def check(site: Site) -> Findings:
    """Look at everything. Jobs that ended as they may are marked, and not looked for again."""
    findings, jobs = Findings(), site.jobs()
    with site.store() as store:
        resizes: dict[int, list[ResizeRecord]] = {}
        for resize in store.resizes():
            resizes.setdefault(resize.job_id, []).append(resize)
        for job_id, expected in site.expected.items():
            if expected.done:
                continue
            job = jobs.get(job_id)
            if job is None:
                findings.lost.append(f"job {job_id} is not known to Slurm any more")
                continue
            newest = store.memberships(job_id, 1) if expected.blocks else ()
            members = [task for one in newest for task in one.report.blocks]
            lost, held = _lost(job, expected), left_held(job, expected, members)
            findings.lost += lost
            findings.held += held
            if expected.role != "elastic":
                findings.broken += _untouched(job, expected)
                continue
            if expected.blocks:
                findings.broken += check_blocks(site, job, expected, store)
                expected.done = job.ended
                continue
            findings.broken += _shape(job, expected)
            findings.broken += _opted_out(job, expected)
            findings.broken += _agrees(job, expected, store)
            reports = {
                restart: [report for _, report in reports_of(site, job_id, restart)]
                for restart in range(job.restart + 1)
            }
            findings.broken += _requeues(job, expected, store, resizes.get(job_id, []), reports)
            if _is_light(site, job_id):
                findings.broken += _chain(job, expected, reports)
            expected.done = job.ended
        findings.broken += [f"resize {r.id} of job {r.job_id} is still {r.state}" for r in store.open_resizes()]
        findings.broken += [f"job {job_id} is still deferred" for job_id in store.deferrals()]
    return findings


def check_guests(site: FaultSite) -> list[str]:
    """Check all guests: no job waits for what they hold, no base block was preempted, and none is left held."""
    known = site.records()
    records = known.values()
    taken = [(job, qos) for id_, qos in site.preempted() if (job := known.get(id_)) and job.array_id in site.expected]
    found = [f"base block {job.key} was preempted, in QOS {qos}" for job, qos in taken if qos != GUEST]
    found += waits_for_guests(records, site.usable_nodes())
    with site.store() as store:
        held = HeldTasks(store)
        for job_id, expected in site.elastic().items():
            tasks = [job for job in records if job.array_id == job_id]
            if expected.blocks and not (expected.hold or expected.impossible_request):
                found += guests_of(job_id, tasks, held.of(job_id), expected)
    return found


def waits_for_guests(records: Collection[SlurmJob], nodes: Collection[str]) -> Iterator[str]:
    """The first job of the queue, if it would have room without guests: those behind it wait for it."""
    waiting = [job for job in records if job.pending and job.reason in WAIT_FOR_ROOM and job.qos != GUEST]
    running = [job for job in records if job.running or job.completing]
    for job in sorted(waiting, key=lambda job: (-TIERS.get(job.partition, 1), -job.priority, job.job_id))[:1]:
        free = dict.fromkeys({*nodes} & {*(job.requested_nodes or nodes)}, 4)
        for other in running:
            for node in free.keys() & {*other.node_list} if other.qos != GUEST else ():
                free[node] -= 4 if _whole(job) or _whole(other) else other.gpus_per_node
        holders = {node for other in running if other.qos == GUEST for node in other.node_list}
        room = [node for node, gpus in free.items() if gpus >= (4 if _whole(job) else job.gpus_per_node)]
        if job.partition in TIERS and len(room) >= job.nodes and holders & {*room}:
            yield f"job {job.job_id} waits ({job.reason}) for what guests hold"


def _whole(job: SlurmJob) -> bool:
    return job.exclusive or job.partition == "excl"


def guests_of(job_id: int, tasks: Sequence[SlurmJob], ours: Collection[int], expected: JobExpectation) -> Iterator[str]:
    """Return what is wrong with the blocks of a job that has guests. The companion holds the blocks that are `ours`."""
    known = {*ours} | expected.kept
    running = [job for job in tasks if job.running]
    guests = [job for job in tasks if job.qos == GUEST]
    served = running and not expected.opted_out
    for job in tasks:
        name = f"job {job_id}: its block {job.array_tasks} ({job.state.value})"
        if job in guests and job.pending and job.held and (job.admin_held or not known.issuperset(job.array_tasks)):
            yield f"{name} is a guest in a hold that neither the companion nor its owner set ({job.reason})"
        if job.running and job.held and not (served and job in guests) and expected.kept.isdisjoint(job.array_tasks):
            yield f"{name} is left held"
        # A task that may not be requeued is lost, and of a job that may not the companion requeues none.
        if job.state is JobState.PREEMPTED and job.requeue and served and all(one.requeue for one in running):
            yield f"{name} is not put back"
    spare = any(job.pending and job.held and {*job.array_tasks} & {*ours} - expected.kept for job in tasks)
    waits = any(job.pending and not job.held and job not in guests for job in tasks)
    if served and spare and not waits and all(job in guests for job in running):
        yield f"job {job_id}: guests train without a base"


def _lost(job: SlurmJob, expected: JobExpectation) -> list[str]:
    if job.ended and job.state not in expected.ends:
        return [f"job {job.job_id} ended {job.state.value} (exit {job.exit_code}), which nobody asked for"]
    if job.pending and not job.held and not expected.impossible_request:
        reason = job.reason
        if reason == "BeginTime" and not expected.begin:
            return [f"job {job.job_id} waits for a begin time that its owner did not set"]
        if not reason.startswith((*FINE, *UNAVAILABLE)):
            return [f"job {job.job_id} waits for {reason}"]
    return []


def left_held(job: SlurmJob, expected: JobExpectation, members: Collection[int]) -> list[str]:
    """A hold of the whole job. One of blocks waits in its owner's if a block does that trained last, in `members`."""
    if job.ended or expected.impossible_request or (expected.blocks and job.running):
        return []
    if job.held and not expected.hold and expected.kept.isdisjoint((*members, *job.array_tasks)):
        return [f"job {job.job_id} ({job.state.value}) is held, and neither its owner nor an operator did it"]
    if expected.hold and expected.hold_sure and not job.held:
        return [f"job {job.job_id} was held by its {expected.hold}, and is not any more"]
    return []


def _untouched(job: SlurmJob, expected: JobExpectation) -> list[str]:
    first = expected.first
    assert first is not None
    now, then = (
        (j.state, j.restart, j.nodes, j.gpus_per_node, j.priority, j.start_time, j.comment, j.time_limit_s)
        for j in (job, first)
    )
    return [] if now == then else [f"job {job.job_id} ({expected.role}) was touched: {then} → {now}"]


def _shape(job: SlurmJob, expected: JobExpectation) -> list[str]:
    if expected.impossible_request or job.ended:
        return []
    if job.reason == "BadConstraints" or not (1 <= job.nodes <= 4 and 1 <= job.gpus_per_node <= 4):
        return [f"job {job.job_id} has an impossible shape: {job.nodes}x{job.gpus_per_node}, {job.reason}"]
    return []


def _opted_out(job: SlurmJob, expected: JobExpectation) -> list[str]:
    """A job whose owner has opted out stays as it was when all was quiet for the first time."""
    if not expected.opted_out:
        return []
    if expected.at_opt_out is None:
        expected.at_opt_out, expected.others_at_opt_out = job, expected.others
        return []
    then = expected.at_opt_out
    if job.restart > then.restart + expected.others - expected.others_at_opt_out:
        return [f"job {job.job_id} opted out, and was restarted: {then.restart} → {job.restart}"]
    return []


def check_blocks(site: Site, job: SlurmJob, expected: JobExpectation, store: Store) -> list[str]:
    """A job of blocks: one membership at a time, of which Slurm, the job and the database have the same."""
    terms = len(list(site.directory(job.job_id).glob("reports-*.jsonl")))
    told = {term: list(reports_of(site, job.job_id, term)) for term in range(terms)}
    found = _chain(job, expected, {term: [report for _, report in reports] for term, reports in told.items()})
    memberships = [report for reports in told.values() for _, report in reports if isinstance(report, Membership)]
    generations = [m.generation for m in memberships]
    if generations != sorted({*generations}):
        found.append(f"job {job.job_id}: generations {generations}")
    spans = [(reports[0][0], reports[-1][0]) for reports in told.values() if reports]
    for (_, end), (begin, _) in pairwise(spans):
        if end > begin:
            found.append(f"job {job.job_id}: a term goes on for {end - begin:.2f} s after the next has begun")
    found += _agrees(job, expected, store)
    tasks = site.tasks(job.job_id)
    running = {task for task, seen in tasks.items() if seen.state == "RUNNING"}
    if job.running and memberships and not expected.opted_out and not expected.hold:
        members = {*memberships[-1].blocks}
        # A killed slurmctld forgets the last ends of tasks. It believes that they run until their node registers again.
        running -= {task for task in running - members if not site.pids(job.job_id, task)}
        if running != members:
            found.append(f"job {job.job_id}: {memberships[-1].blocks} train, {sorted(running)} run")
        stored = store.memberships(job.job_id, 1)
        if not stored or stored[0].report.generation != memberships[-1].generation:
            found.append(f"job {job.job_id}: the database has {stored}, the job {memberships[-1]}")
    for task, seen in tasks.items():
        # Slurm itself holds what can never start, and where the owner made it so it is no fault of ours.
        impossible = expected.impossible_request and seen.reason in ("BadConstraints", "PartitionNodeLimit")
        if seen.state == "PENDING" and not (seen.held or impossible) and seen.reason not in WAIT_UNHELD:
            found.append(f"job {job.job_id}: its task {task} waits for {seen.reason}")
    return found


def _agrees(job: SlurmJob, expected: JobExpectation, store: Store) -> list[str]:
    record = store.jobs([job.job_id]).get(job.job_id)
    if record is None:
        return [f"job {job.job_id} is not in the database"]
    found = []
    # Without the opt-in no report is read, and a term is what a report says.
    restart = record.restart if expected.blocks and expected.opted_out else job.restart
    if (record.state, record.restart) != (job.state.value, restart):
        found.append(
            f"job {job.job_id} is {job.state.value} in run {job.restart}, the database has {record.state} in run "
            f"{record.restart}"
        )
    runs = {run.restart: run for run in store.runs(job.job_id)}
    if job.running and not expected.opted_out and not expected.blocks:
        run = runs.get(job.restart)
        if run is None or (run.shape.nodes, run.shape.gpus_per_node) != (job.nodes, job.gpus_per_node):
            found.append(f"job {job.job_id} runs at {job.nodes}x{job.gpus_per_node}, the database has {run}")
    return found


def _requeues(
    job: SlurmJob, expected: JobExpectation, store: Store, resizes: list[ResizeRecord], reports: dict[int, list[Report]]
) -> list[str]:
    """Each requeue of ours has a checkpoint behind it that answers its drain; all others have another reason."""
    found, ours = [], set()
    for resize in resizes:
        states = {step.state for step in store.resize_steps(resize.id)}
        # Its owner may have released or cancelled it before anything else was done.
        ways = ("it was released", "it started before", "the job is")
        cut_short = "requeuing" in states and str(resize.outcome).startswith(ways)
        if resize.restart < 0 or not (states & PAST_REQUEUE or cut_short):
            continue
        ours.add(resize.restart)
        answers = [
            report
            for report in reports.get(resize.restart, [])
            if isinstance(report, Checkpoint) and report.order == resize.order_number
        ]
        if not answers:
            found.append(f"job {job.job_id}: resize {resize.id} requeued run {resize.restart} without a checkpoint")
    unexplained = job.restart - len(ours)
    if unexplained > expected.others:
        found.append(
            f"job {job.job_id} was restarted {job.restart} times, {len(ours)} of them by resizes, "
            f"{expected.others} by others"
        )
    return found


def _is_light(site: Site, job_id: int) -> bool:
    return not any(site.directory(job_id).glob("checkpoints/step-*/*.safetensors"))


def reports_of(site: Site, job_id: int, restart: int) -> Iterator[tuple[float, Report]]:
    path = site.directory(job_id) / reports_name(restart)
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n"):
                yield decode_report(line)[1:]
        except ProtocolError:
            continue  # torn where the disk was full


def _chain(job: SlurmJob, expected: JobExpectation, reports: dict[int, list[Report]]) -> list[str]:
    """Every start goes on from the newest checkpoint, and every epoch is reported once along the way."""
    found, newest, handed = [], 0, -1
    for restart, told in sorted(reports.items()):
        step = -1
        for report in told:
            if isinstance(report, Hello):
                named = int(report.checkpoint.removeprefix("step-")) if report.checkpoint else max(handed, 0)
                handed = -1
                if report.step != named or report.step < newest:
                    found.append(
                        f"job {job.job_id}: run {restart} goes on at step {report.step} with {report.checkpoint!r}, "
                        f"the newest checkpoint has {newest}"
                    )
                step = report.step
            elif isinstance(report, Checkpoint):
                if report.step < step:
                    found.append(f"job {job.job_id}: run {restart} went back from step {step} to {report.step}")
                step = newest = report.step
            elif isinstance(report, Bye) and report.reason == "moved":
                # The next leader goes on from what this one had in memory.
                handed = report.step
            elif isinstance(report, Epoch):
                next_end = (step // STEPS + 1) * STEPS
                if report.step != next_end and not expected.full:
                    found.append(f"job {job.job_id}: run {restart} skipped from step {step} to {report.step}")
                step = report.step
    return found
