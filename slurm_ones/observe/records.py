"""Observed jobs, nodes, runs and reports, as the store's records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
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
    ReasonRecord,
    RunRecord,
    RunReports,
    SpecRecord,
    ThroughputRecord,
)
from ones_wrapper import protocol
from slurm_ones.observe.eligibility import Elastic
from slurm_ones.observe.report_reader import Line, NewReports
from slurm_ones.report.text import plain
from slurm_ones.slurm.model import Node
from slurm_ones.slurm.scontrol import usable

R = TypeVar("R", HelloRecord, FirstRecord, ThroughputRecord, EpochRecord, CheckpointRecord, BatchRecord, ByeRecord)
N = TypeVar("N", HelloRecord, ByeRecord)


def job_record(elastic: Elastic, note: str) -> JobRecord:
    """The job as it goes into the database: its user's texts printable, whatever they are read with there."""
    job = elastic.job
    return JobRecord(
        job_id=job.job_id,
        name=plain(job.name),
        user=plain(job.user),
        submit_time=job.submit_time,
        requested_nodes=job.nodes,
        requested_gpus_per_node=elastic.shape.gpus_per_node,
        account=plain(job.account),
        partition=plain(job.partition),
        comment=plain(job.comment, 1000),
        work_dir=plain(job.work_dir, 4096),
        restart=job.restart,
        elastic=not elastic.refusal,
        refusal=ReasonRecord.of(elastic.refusal),
        state=job.state.value,
        end_time=job.end_time if job.ended else None,
        exit_code=job.exit_code if job.ended else None,
        report_note=note,
    )


def node_record(node: Node) -> NodeRecord:
    """The node as it goes into the database, where jobs that come and go are no change of it."""
    # What a reservation sets aside goes on being idle or busy.
    state = "UP" if node.usable else "RESERVED" if usable(node.state) else node.state
    return NodeRecord(node.name, state, node.usable, node.gpus, ",".join(node.partitions))


def run_record(elastic: Elastic) -> RunRecord:
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


def run_reports(job_id: int, restart: int, new: NewReports, spec: SpecRecord | None) -> RunReports:
    """New reports of a run, for the store."""
    found: dict[type, list[Any]] = defaultdict(list)
    for line in new.lines:
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
        offset=new.offset,
        number=new.last,
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


def _last(reports: Sequence[N]) -> N | None:
    """The last of a run's hellos, or byes, with the notes of all: its ranks may have been started several times."""
    if not reports:
        return None
    notes = dict.fromkeys(report.note for report in reports if report.note)
    return replace(reports[-1], note="; ".join(notes)[-protocol.MAX_TEXT :])


def _as(record: type[R], line: Line, **renamed: object) -> R:
    """A report as the store's record of it: the fields that both have, and those that have another name there."""
    values: dict[str, Any] = {"number": line.number, "time": line.time, **vars(line.report), **renamed}
    return record(**{name: values[name] for name in record.__dataclass_fields__ if name in values})
