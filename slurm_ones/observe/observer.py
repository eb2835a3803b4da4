"""One look at the cluster a tick: Slurm's snapshot, what the elastic jobs reported, both stored."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ones_db import (
    BatchRecord,
    ByeRecord,
    CheckpointRecord,
    EpochRecord,
    FirstRecord,
    HelloRecord,
    JobRecord,
    NodeRecord,
    RunRecord,
    RunReports,
    SpecRecord,
    Store,
    ThroughputRecord,
)
from ones_wrapper import protocol
from slurm_ones.config import Settings
from slurm_ones.observe.eligible import Elastic, look
from slurm_ones.observe.files import NotBelieved, directory_of, read_from
from slurm_ones.observe.optin import BadComment, parse_comment
from slurm_ones.observe.reports import Line, Piece, job_directory, read_reports
from slurm_ones.slurm.client import SlurmClient
from slurm_ones.slurm.model import Job, JobState, Node, Snapshot
from slurm_ones.slurm.parse import usable

log = logging.getLogger(__name__)

R = TypeVar("R", HelloRecord, FirstRecord, ThroughputRecord, EpochRecord, CheckpointRecord, BatchRecord, ByeRecord)
N = TypeVar("N", HelloRecord, ByeRecord)


@dataclass(frozen=True)
class Seen:
    """What a tick has seen: the whole queue, and of it the jobs that opted in and have not ended."""

    snapshot: Snapshot
    elastic: dict[int, Elastic]


def job_record(elastic: Elastic, note: str) -> JobRecord:
    """The job as it goes into the database."""
    job = elastic.job
    return JobRecord(
        job_id=job.job_id,
        name=job.name,
        user=job.user,
        submit_time=job.submit_time,
        requested_nodes=job.nodes,
        requested_gpus_per_node=elastic.shape.gpus_per_node,
        account=job.account,
        partition=job.partition,
        comment=job.comment,
        work_dir=job.work_dir,
        restart=job.restart,
        elastic=not elastic.refusal,
        refusal=elastic.refusal,
        state=job.state.value,
        end_time=job.end_time if job.ended else None,
        exit_code=job.exit_code if job.ended else None,
        report_note=note,
    )


class Observer:
    """Reads Slurm and the jobs' reports, and stores what it found.

    It changes nothing outside the database. Positions in report files come from the database, so a new companion
    reads on where the last one stopped.
    """

    def __init__(self, client: SlurmClient, store: Store, settings: Settings) -> None:
        self._client = client
        self._store = store
        self._settings = settings
        self._own_uid = os.geteuid() if settings.scope == "own" else None
        self._finished: set[tuple[int, int]] = set()
        self._notes: dict[int, str] = {}
        self._jobs: dict[int, JobRecord] = {}
        self._runs: dict[int, RunRecord] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._specs: dict[tuple[int, int], SpecRecord] = {}
        """What each run was last stored to say of its job."""

    def look(self) -> Seen:
        """One tick's look. Raises `Unreachable`."""
        snapshot = self._client.snapshot()
        seen: dict[int, Elastic] = {}
        for job in snapshot.jobs.values():
            elastic = look(job, snapshot, self._settings.whole_node_gpus, self._own_uid)
            if elastic is not None and (job.job_id, job.restart) not in self._finished:
                seen[job.job_id] = elastic
        self._see(seen)
        self._see_nodes(snapshot)
        self._close_forgotten(snapshot, seen.keys())
        mine = [elastic.job for elastic in seen.values() if self._own_uid in (None, elastic.job.uid)]
        self.collect(mine, now=snapshot.time)
        self._specs = {key: spec for key, spec in self._specs.items() if key[0] in seen}
        ended = {(id_, e.job.restart) for id_, e in seen.items() if e.job.ended}
        self._finished = {key for key in self._finished if key[0] in snapshot.jobs} | ended
        return Seen(snapshot, {id_: e for id_, e in seen.items() if not e.job.ended})

    def _see(self, seen: Mapping[int, Elastic]) -> None:
        """Store the jobs and runs that are not as they were at the last look."""
        jobs = {id_: job_record(elastic, self._notes.get(id_, "")) for id_, elastic in seen.items()}
        runs = {id_: _run(e) for id_, e in seen.items() if e.job.start_time and not e.job.pending}
        if changed := [job for id_, job in jobs.items() if self._jobs.get(id_) != job]:
            self._store.see_jobs(changed)
        if begun := [run for id_, run in runs.items() if self._runs.get(id_) != run]:
            self._store.see_runs(begun)
        self._jobs, self._runs = jobs, runs

    def _see_nodes(self, snapshot: Snapshot) -> None:
        """Store the nodes where one is not as it was at the last look."""
        nodes = {name: _node(node) for name, node in snapshot.nodes.items()}
        if nodes != self._nodes:
            self._store.see_nodes(snapshot.time, nodes.values())
            self._nodes = nodes

    def _close_forgotten(self, snapshot: Snapshot, seen: Set[int]) -> None:
        """Bring up to date the jobs that are open in the database and that this look did not find.

        Slurm forgets a job MinJobAge after its end; and an owner may have taken the opt-in out of the comment.
        """
        lost = self._store.live_jobs() - seen
        if not lost:
            return
        records = []
        for job_id, record in self._store.jobs(list(lost)).items():
            job = snapshot.jobs.get(job_id)
            if job is None:
                note = "it ended while no companion looked, and Slurm has forgotten how"
                unknown = JobState.UNKNOWN.value
                records.append(replace(record, state=unknown, end_time=snapshot.time, report_note=note))
            else:
                end, refusal = (job.end_time if job.ended else None), "its comment no longer opts in"
                records.append(replace(record, state=job.state.value, end_time=end, elastic=False, refusal=refusal))
        self._store.see_jobs(records)

    def collect(self, jobs: Sequence[Job], *, now: float) -> None:
        """Store what the jobs' newest runs have reported since the last look, in one transaction."""
        positions = self._store.report_positions([job.job_id for job in jobs])
        # The run before may have said its last words after its requeue was seen.
        told = [
            reports
            for job in jobs
            for restart in range(max(0, job.restart - 1), job.restart + 1)
            if (reports := self._read(job, restart, *positions.get((job.job_id, restart), (0, 0)), now)) is not None
        ]
        if told:
            self._store.add_reports(told)
            self._specs.update({(r.job_id, r.restart): r.spec for r in told if r.spec is not None})

    def _read(self, job: Job, restart: int, offset: int, number: int, now: float) -> RunReports | None:
        """What a run has said since the last look; None where that is nothing new."""
        piece = read_reports(job, restart, offset, number, now=now)
        if piece.problem and piece.problem != self._notes.get(job.job_id):
            # The last complaint stays, so that the job's owner finds it.
            self._notes[job.job_id] = piece.problem
            log.warning("job %d: %s", job.job_id, piece.problem)
        spec = SpecRecord(**vars(piece.spec)) if piece.spec is not None and restart == job.restart else None
        if spec is not None and self._specs.get((job.job_id, restart)) == spec:
            spec = None
        if piece.offset == offset and spec is None:
            return None
        return _told(job.job_id, restart, piece, number, spec)

    def may_resize(self, job: Job) -> bool:
        """Whether the job's owner still opts in and nobody stopped the companion's hand."""
        if self._settings.stop_file.exists():
            return False
        try:
            optin = parse_comment(job.comment)
        except BadComment:
            return False
        return optin is not None and optin.resize

    def checkpoint_stands(self, job: Job, name: str) -> bool:
        """Whether the checkpoint that a job reported is there and complete, as far as a look can tell.

        A job that lies about its checkpoint loses its own work; this guards against files that went missing.
        """
        if not name or name.startswith(".") or "/" in name:
            return False
        path = job_directory(job) / protocol.CHECKPOINTS / name
        try:
            with directory_of(path, job.uid) as directory:
                text, size = read_from(directory, protocol.MANIFEST, job.uid, 0, 1)
                return bool(text) and size > 0
        except (FileNotFoundError, NotBelieved):
            return False


def _node(node: Node) -> NodeRecord:
    """The node as it goes into the database, where jobs that come and go are no change of it."""
    # What a reservation sets aside goes on being idle or busy.
    state = "UP" if node.usable else "RESERVED" if usable(node.state) else node.state
    return NodeRecord(node.name, state, node.usable, node.gpus, ",".join(node.partitions))


def _run(elastic: Elastic) -> RunRecord:
    job = elastic.job
    return RunRecord(
        job_id=job.job_id,
        restart=job.restart,
        nodes=job.nodes,
        gpus_per_node=elastic.shape.gpus_per_node,
        node_list=job.node_list,
        start_time=job.start_time,
        end_time=job.end_time if job.ended else None,
    )


def _as(record: type[R], line: Line, **renamed: object) -> R:
    """A report as the store's record of it: the fields that both have, and those that have another name there."""
    values: dict[str, Any] = {"number": line.number, "time": line.time, **vars(line.report), **renamed}
    return record(**{name: values[name] for name in record.__dataclass_fields__ if name in values})


def _told(job_id: int, restart: int, piece: Piece, number: int, spec: SpecRecord | None) -> RunReports:
    """What one look found, for the store; `number` is that of the last report stored before."""
    found: dict[type, list[Any]] = defaultdict(list)
    for line in piece.lines:
        match line.report:
            case protocol.Hello():
                found[HelloRecord].append(_as(HelloRecord, line))
            case protocol.First():
                found[FirstRecord].append(_as(FirstRecord, line))
            case protocol.Throughput():
                found[ThroughputRecord].append(_as(ThroughputRecord, line))
            case protocol.Epoch():
                found[EpochRecord].append(_as(EpochRecord, line))
            case protocol.Checkpoint(order=order):
                found[CheckpointRecord].append(_as(CheckpointRecord, line, order_number=order))
            case protocol.Batch(order=order):
                found[BatchRecord].append(_as(BatchRecord, line, order_number=order))
            case protocol.Bye():
                found[ByeRecord].append(_as(ByeRecord, line))
    return RunReports(
        job_id,
        restart,
        offset=piece.offset,
        number=piece.lines[-1].number if piece.lines else number,
        spec=spec,
        hello=_last(found[HelloRecord]),
        begun=found[HelloRecord][0].time if found[HelloRecord] else None,
        first=found[FirstRecord][-1] if found[FirstRecord] else None,
        throughput=found[ThroughputRecord],
        epochs=found[EpochRecord],
        checkpoints=found[CheckpointRecord],
        batches=found[BatchRecord],
        bye=_last(found[ByeRecord]),
    )


def _last(said: Sequence[N]) -> N | None:
    """The last of a run's hellos, or byes, with the notes of all: its ranks may have been started several times."""
    if not said:
        return None
    notes = dict.fromkeys(report.note for report in said if report.note)
    return replace(said[-1], note="; ".join(notes)[-protocol.MAX_TEXT :])
