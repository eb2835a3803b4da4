"""One look at the cluster a tick: Slurm's snapshot, what the elastic jobs reported, both stored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from ones_db import (
    BatchRecord,
    ByeRecord,
    CheckpointRecord,
    EpochRecord,
    HelloRecord,
    JobRecord,
    RunRecord,
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
from slurm_ones.slurm.model import Job, Snapshot

log = logging.getLogger(__name__)


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

    def look(self) -> Seen:
        """One tick's look. Raises `Unreachable`."""
        snapshot = self._client.snapshot()
        seen: dict[int, Elastic] = {}
        for job in snapshot.jobs.values():
            elastic = look(job, snapshot, self._settings.whole_node_gpus, self._own_uid)
            if elastic is not None and (job.job_id, job.restart) not in self._finished:
                seen[job.job_id] = elastic
        self._store.see_jobs([job_record(e, self._notes.get(id_, "")) for id_, e in seen.items()])
        self._store.see_runs([_run(e) for e in seen.values() if e.job.start_time and not e.job.pending])
        for elastic in seen.values():
            self.collect(elastic.job, now=snapshot.time)
        for job_id, elastic in list(seen.items()):
            if elastic.job.ended:
                self._finished.add((job_id, elastic.job.restart))
                del seen[job_id]
        return Seen(snapshot, seen)

    def collect(self, job: Job, *, now: float) -> None:
        """Store what the job's newest runs have reported since the last look."""
        # The run before may have said its last words after its requeue was seen.
        for restart in range(max(0, job.restart - 1), job.restart + 1):
            offset, number = self._store.report_position(job.job_id, restart)
            piece = read_reports(job, restart, offset, number, now=now)
            if piece.problem != self._notes.get(job.job_id, ""):
                self._notes[job.job_id] = piece.problem
                if piece.problem:
                    log.warning("job %d: %s", job.job_id, piece.problem)
            if piece.spec is not None:
                self._store.set_spec(job.job_id, SpecRecord(**vars(piece.spec)))
            if piece.offset != offset:
                _store(self._store, job.job_id, restart, piece, number)

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


def _of(lines: Iterable[Line], kind: type) -> list[Line]:
    return [line for line in lines if isinstance(line.report, kind)]


def _fields(line: Line, *leave_out: str, **renamed: str) -> dict[str, object]:
    values = {k: v for k, v in vars(line.report).items() if k not in leave_out and k not in renamed}
    values |= {new: getattr(line.report, old) for old, new in renamed.items()}
    return {"number": line.number, "time": line.time, **values}


def _store(store: Store, job_id: int, restart: int, piece: Piece, number: int) -> None:
    lines = piece.lines
    hello = _of(lines, protocol.Hello)
    bye = _of(lines, protocol.Bye)
    not_kept = ("world", "base_batch", "max_batch", "dataset", "epochs")
    store.add_reports(
        job_id,
        restart,
        hello=HelloRecord(**_fields(hello[-1], *not_kept)) if hello else None,  # type: ignore[arg-type]
        throughput=[ThroughputRecord(**_fields(x)) for x in _of(lines, protocol.Throughput)],  # type: ignore[arg-type]
        epochs=[EpochRecord(**_fields(x)) for x in _of(lines, protocol.Epoch)],  # type: ignore[arg-type]
        checkpoints=[
            CheckpointRecord(**_fields(x, order="order_number"))  # type: ignore[arg-type]
            for x in _of(lines, protocol.Checkpoint)
        ],
        batches=[
            BatchRecord(**_fields(x, order="order_number"))  # type: ignore[arg-type]
            for x in _of(lines, protocol.Batch)
        ],
        bye=ByeRecord(**_fields(bye[-1])) if bye else None,  # type: ignore[arg-type]
        offset=piece.offset,
        number=lines[-1].number if lines else number,
    )
