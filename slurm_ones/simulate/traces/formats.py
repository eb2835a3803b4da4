"""Formats of traces: SWF, tables of clusters, and sacct's; the beginning of a file tells its format.

SWF is the Standard Workload Format of the Parallel Workloads Archive (Feitelson et al., JPDC 74(10), 2014): 18 numbers
a line, `;` before header and comments. Tables: Helios (Hu et al., SC 2021), Acme (Hu et al., NSDI 2024), Alibaba's GPU
pods (Weng et al., ATC 2023), and the common cut of Philly and Helios by Gen-Parallel-Workloads.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.traces.accounting import read_sacct_file
from slurm_ones.simulate.traces.philly import read_philly
from slurm_ones.simulate.traces.trace import (
    NEVER_RAN,
    NOTHING,
    Collector,
    Trace,
    TraceJob,
    bad,
    instant,
    lines,
    number,
    opened,
)

KNOWN = (
    "sacct --parsable2 with its header line, SWF, Philly's cluster_job_log, Helios' cluster_log.csv, Acme's "
    "trace_*.csv, Alibaba's openb_pod_list_*.csv, and cuts of Philly and Helios"
)
SWF_FIELDS = (
    "job number", "submit time", "wait time", "run time", "allocated processors", "average CPU time", "used memory",
    "requested processors", "requested time", "requested memory", "status", "user", "group", "executable", "queue",
    "partition", "preceding job", "think time",
)  # fmt: skip
SWF_PARTIAL = (2, 3, 4)
"""Status of a line that is a part of a job with a line of its own."""
_SWF_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs)\s*:\s*(\d{1,9})")


def read_trace(path: Path, partition: str = "") -> Trace:
    """The trace of a file. `partition` is for `sacct` alone. Raises `BadInput`."""
    if path.is_dir() or not path.exists():
        raise BadInput(f"{path}: no such file; give a trace, or none to ask this site's sacct")
    if not path.is_file():
        raise BadInput(f"{path}: is no regular file; write the trace to a file first")
    read = _reader_of(path)
    if read is None:
        return read_sacct_file(path, partition)
    trace = read(path)
    if partition:
        raise BadInput(f"--partition: {trace.name} is of the format {trace.format}, which names none that Slurm has")
    return trace


def _reader_of(path: Path) -> Callable[[Path], Trace] | None:
    """None for sacct's format."""
    with opened(path) as file:
        if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{"):
            return read_philly
    first = next((text for _, text in lines(path) if text.strip()), "")
    names = {name.strip() for name in first.split(",")}
    for columns, read in TABLES.items():
        if names.issuperset(columns):
            return read
    words = first.split()
    if first.lstrip().startswith(";") or (len(words) == len(SWF_FIELDS) and words[0].lstrip("-").isdigit()):
        return read_swf
    if "|" not in first:
        raise BadInput(f"{path}: line 1: {first!r:.100} begins no trace that is known; there are {KNOWN}")
    return None


def read_swf(path: Path) -> Trace:
    """An SWF file; raises `BadInput`. A processor is read as a GPU."""
    found, header = Collector(path.name, "SWF"), dict[str, int]()
    for line, text in lines(path):
        if not text.strip() or text.lstrip().startswith(";"):
            if match := _SWF_HEADER.match(text.lstrip()):
                header[match[1]] = int(match[2])
            continue
        words = text.split()
        if len(words) != len(SWF_FIELDS):
            bad(path, line, f"has {len(words)} fields, not {len(SWF_FIELDS)}", "a line of SWF has 18 numbers")
        values = [number(path, line, SWF_FIELDS[i], word) for i, word in enumerate(words)]
        job, submitted, wait, run, allocated, _, _, requested, limit, _, status = values[:11]
        if int(status) in SWF_PARTIAL:
            found.leave_out("part of a job that has a line of its own")
            continue
        gpus = int(allocated if allocated > 0 else requested)
        started = submitted + wait if wait >= 0 else None
        found.add(TraceJob(f"{job:.0f}", submitted, started, run, gpus, 0, max(limit, 0.0)), line)
    nodes, most = header.get("MaxNodes", 0), header.get("MaxProcs", 0)
    each = most // nodes if nodes and most and most % nodes == 0 else 0
    return found.trace("each processor is read as a GPU: SWF knows no GPUs", gpus_per_node=each)


def _table(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
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


def _count(path: Path, line: int, row: Mapping[str, str], column: str) -> int:
    return int(number(path, line, column, row[column] or "0"))


def read_scheduler(path: Path) -> Trace:
    """Helios' `cluster_log.csv`, or Acme's `trace_seren.csv` and `trace_kalos.csv`; raises `BadInput`."""
    found, zones = Collector(path.name, "Helios"), False
    for line, row in _table(path):
        if "type" in row:
            found.format = "Acme"
        if row["start_time"] in NOTHING or row["end_time"] in NOTHING:
            found.leave_out(NEVER_RAN)
            continue
        zones = zones or "+" in row["submit_time"]
        times = [instant(path, line, name, row[name]) for name in ("submit_time", "start_time", "end_time")]
        gpus, nodes = _count(path, line, row, "gpu_num"), _count(path, line, row, "node_num")
        found.add_ended(row["job_id"], times, gpus, nodes, line)
    return found.trace("" if zones else "times have no zone: where clocks changed, a job is an hour longer or shorter")


def read_cut(path: Path) -> Trace:
    """A cut of Philly or Helios, seconds since the job before and run times; raises `BadInput`."""
    found, now = Collector(path.name, "cut of Philly or Helios"), 0.0
    for line, row in _table(path):
        gap, run = (number(path, line, name, row[name]) for name in ("interval", "run_time"))
        if gap < 0:
            bad(path, line, f"interval: {gap:g} is negative", "it is seconds since the job before")
        now += gap
        gpus, nodes = _count(path, line, row, "gpu_num"), _count(path, line, row, "node_num")
        found.add(TraceJob(row["u_id"][:80], now, None, run, gpus, max(nodes, 0), 0.0), line)
    return found.trace("it records no starts: no wait of it is known")


def read_pods(path: Path) -> Trace:
    """Alibaba's `openb_pod_list_*.csv`; raises `BadInput`."""
    found, shared = Collector(path.name, "Alibaba GPU v2023"), 0
    for line, row in _table(path):
        gpus = _count(path, line, row, "num_gpu")
        if row["scheduled_time"] in NOTHING or row["deletion_time"] in NOTHING:
            found.leave_out(NEVER_RAN)
            continue
        times = [number(path, line, name, row[name]) for name in ("creation_time", "scheduled_time", "deletion_time")]
        shared += gpus == 1 and number(path, line, "gpu_milli", row["gpu_milli"] or "0") < 1000
        found.add_ended(row["name"], times, gpus, 1, line)
    return found.trace(
        f"{shared} pods used a part of a GPU, and are read as one each" if shared else "",
        "pods that still ran are read as ended when the record ends",
    )


TABLES: Mapping[tuple[str, ...], Callable[[Path], Trace]] = {
    ("job_id", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time"): read_scheduler,
    ("u_id", "gpu_num", "node_num", "interval", "run_time", "new_status"): read_cut,
    ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"): read_pods,
}
"""Reader of a table, by columns that tell it."""
