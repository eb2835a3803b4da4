"""Traces that are tables: Helios, Acme, Alibaba's GPU pods of 2023, and the common cut of Philly and Helios.

Helios: Hu et al., SC 2021. Acme: Hu et al., NSDI 2024. Alibaba: Weng et al., ATC 2023. The cut is that of
Gen-Parallel-Workloads: seconds since the job before, and run times, without a word on waits.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.traces.trace import Collector, Trace, TraceJob, bad, instant, lines, number

Row = Mapping[str, str]

SCHEDULER = ("job_id", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time")
"""Columns of Helios and of Acme, which has a zone in its times and `type` besides."""
CUT = ("u_id", "gpu_num", "node_num", "interval", "run_time", "new_status")
PODS = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")
NOTHING = {"", "None", "NaT", "nan", "NULL"}


def table_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Each row of a CSV file with its line. Raises `BadInput`."""
    texts, line = lines(path), 1
    try:
        _, head = next(texts)
        names = [name.strip() for name in next(csv.reader([head]))]
        for line, text in texts:
            if not text.strip():
                continue
            # One line at a time: none of these traces has a line break in a field.
            values = next(csv.reader([text], strict=True))
            if len(values) != len(names):
                bad(path, line, f"has {len(values)} fields, its header {len(names)}", "correct or remove that line")
            yield line, dict(zip(names, values, strict=True))
    except StopIteration:
        raise BadInput(f"{path}: is empty; give a trace with a header line") from None
    except csv.Error as error:
        bad(path, line, f"is no CSV: {error}", "correct or remove that line")


def _count(path: Path, line: int, row: Row, column: str) -> int:
    return int(number(path, line, column, row[column] or "0"))


def read_scheduler(path: Path) -> Trace:
    """Helios' `cluster_log.csv`, or Acme's `trace_seren.csv` and `trace_kalos.csv`; raises `BadInput`."""
    found = Collector(path.name, "")
    zones = acme = False
    for line, row in table_rows(path):
        acme = acme or "type" in row
        if row["start_time"] in NOTHING or row["end_time"] in NOTHING:
            found.leave_out("never ran, or ended at once")
            continue
        times = [instant(path, line, name, row[name]) for name in ("submit_time", "start_time", "end_time")]
        zones = zones or "+" in row["submit_time"]
        submitted, started, ended = times
        gpus, nodes = _count(path, line, row, "gpu_num"), _count(path, line, row, "node_num")
        if ended < started:
            found.leave_out("ended before it started", f"{path.name}: line {line}")
            continue
        job = TraceJob(row["job_id"][:80], submitted, started, ended - started, gpus, max(nodes, 0), 0.0)
        found.add(job, f"{path.name}: line {line}")
    found.format = "Acme" if acme else "Helios"
    note = "times have no zone: where clocks changed, a job is an hour longer or shorter"
    return found.trace(notes=[] if zones else [note])


def read_cut(path: Path) -> Trace:
    """A cut of Philly or Helios; raises `BadInput`."""
    found, now = Collector(path.name, "cut of Philly or Helios"), 0.0
    for line, row in table_rows(path):
        gap, run = (number(path, line, name, row[name]) for name in ("interval", "run_time"))
        if gap < 0:
            bad(path, line, f"interval: {gap:g} is negative", "it is seconds since the job before")
        now += gap
        gpus, nodes = _count(path, line, row, "gpu_num"), _count(path, line, row, "node_num")
        job = TraceJob(row["u_id"][:80], now, None, run, gpus, max(nodes, 0), 0.0)
        found.add(job, f"{path.name}: line {line}")
    return found.trace(notes=["it records no starts: no wait of it is known"])


def read_pods(path: Path) -> Trace:
    """Alibaba's `openb_pod_list_*.csv`; raises `BadInput`."""
    found, shared = Collector(path.name, "Alibaba GPU v2023"), 0
    for line, row in table_rows(path):
        gpus = _count(path, line, row, "num_gpu")
        if row["scheduled_time"] in NOTHING or row["deletion_time"] in NOTHING:
            found.leave_out("never ran, or ended at once")
            continue
        created, placed, deleted = (
            number(path, line, name, row[name]) for name in ("creation_time", "scheduled_time", "deletion_time")
        )
        shared += gpus == 1 and number(path, line, "gpu_milli", row["gpu_milli"] or "0") < 1000
        if deleted < placed:
            found.leave_out("ended before it started", f"{path.name}: line {line}")
            continue
        found.add(
            TraceJob(row["name"][:80], created, placed, deleted - placed, gpus, 1, 0.0), f"{path.name}: line {line}"
        )
    notes = [f"{shared} pods used a part of a GPU, and are read as one each"] if shared else []
    return found.trace(notes=[*notes, "pods that still ran are read as ended when the record ends"])


TABLES: tuple[tuple[tuple[str, ...], Callable[[Path], Trace]], ...] = (
    (SCHEDULER, read_scheduler),
    (CUT, read_cut),
    (PODS, read_pods),
)
"""Columns by which a table is known, and what reads it."""
