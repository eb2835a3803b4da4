"""Readers of traces in several formats: SWF, CSV tables, Philly's JSON and sacct's output. The beginning of a file
determines its format.

SWF is the Standard Workload Format of the Parallel Workloads Archive (Feitelson et al., JPDC 74(10), 2014). It has 18
numbers per line; lines of the header and comments begin with `;`. CSV tables are those of Helios (Hu et al., SC 2021),
Acme (Hu et al., NSDI 2024) and Alibaba's GPU pods (Weng et al., ATC 2023). Gen-Parallel-Workloads has tables of
excerpts of Philly and Helios. Philly's own `cluster_job_log` is a JSON list of jobs with their attempts (Jeon et al.,
ATC 2019); it is read one job at a time. A site's own CSV table needs the columns `PLAIN`.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ones_db.site import SAME_JOB_S
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.workloads.trace import (
    MOST_JOBS,
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
    table,
)
from slurm_ones.slurm.fields import seconds
from slurm_ones.slurm.sacct import ENDS, FIELDS, OWN, RESTARTS, AccountingRow, BadRow, Rejected, Sacct, parse_row

KNOWN = (
    "sacct --parsable2 with its header line; SWF; Philly's cluster_job_log. Helios' cluster_log.csv; Acme's "
    "trace_*.csv; Alibaba's openb_pod_list_*.csv; cuts of Philly and Helios. CSV with the columns submit_time, "
    "start_time, end_time and gpus"
)
PLAIN = ("submit_time", "start_time", "end_time", "gpus")
"""Columns that a plain CSV must have. `nodes` and `job_id` are read if they exist; other columns are ignored."""
SWF_FIELDS = (
    "job number", "submit time", "wait time", "run time", "allocated processors", "average CPU time", "used memory",
    "requested processors", "requested time", "requested memory", "status", "user", "group", "executable", "queue",
    "partition", "preceding job", "think time",
)  # fmt: skip
SWF_PARTIAL = (2, 3, 4)
"""Status numbers of SWF lines that describe a part of a job. Another line describes the whole job."""
_SWF_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs)\s*:\s*(\d{1,9})")


def read_trace(path: Path, partition: str = "") -> Trace:
    """Return the trace in a file of any supported format. Raises `BadInput`.

    If `partition` is given, only jobs of this Slurm partition are read; the file must be in sacct's format.
    """
    if path.is_dir() or not path.exists():
        raise BadInput(f"{path}: no such file; give a trace, or none to ask this site's sacct")
    if not path.is_file():
        raise BadInput(f"{path}: is no regular file; write the trace to a file first")
    read = _reader_of(path)
    if read is None:
        return read_sacct_file(path, partition)
    trace = read(path)
    if partition:
        raise BadInput(f"--partition: {trace.name} is of the format {trace.format}, which has no Slurm partitions")
    return trace


def _reader_of(path: Path) -> Callable[[Path], Trace] | None:
    """Return the reader for the file's format; None for sacct's format."""
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
        raise BadInput(f"{path}: line 1: {first!r:.100} begins no known format of traces; known are: {KNOWN}")
    return None


def read_swf(path: Path) -> Trace:
    """Return the trace in an SWF file. Each processor counts as a GPU. Raises `BadInput`."""
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


def _count(path: Path, line: int, row: Mapping[str, str], column: str) -> int:
    return int(number(path, line, column, row[column] or "0"))


def read_scheduler(path: Path) -> Trace:
    """Return the trace in Helios' `cluster_log.csv`, Acme's `trace_*.csv`, or a plain CSV; raises `BadInput`."""
    found, zones = Collector(path.name, "Helios"), False
    for line, row in table(path):
        if "gpu_num" not in row:
            found.format = "CSV"
            row = {
                **row,
                "gpu_num": row["gpus"],
                "node_num": row.get("nodes", ""),
                "job_id": row.get("job_id", f"{line}"),
            }
        elif "type" in row:
            found.format = "Acme"
        if row["start_time"] in NOTHING or row["end_time"] in NOTHING:
            found.leave_out(NEVER_RAN)
            continue
        zones = zones or "+" in row["submit_time"]
        times = [instant(path, line, name, row[name]) for name in ("submit_time", "start_time", "end_time")]
        gpus, nodes = _count(path, line, row, "gpu_num"), _count(path, line, row, "node_num")
        found.add_ended(row["job_id"], times, gpus, nodes, line)
    return found.trace(
        "" if zones else "times have no time zone: a job that ran while clocks changed is an hour too long or too short"
    )


def read_cut(path: Path) -> Trace:
    """Return the trace in an excerpt of Philly or Helios. It has run times and the gaps between submissions, but no
    starts. Raises `BadInput`."""
    found, now = Collector(path.name, "cut of Philly or Helios"), 0.0
    for line, row in table(path):
        gap, run = (number(path, line, name, row[name]) for name in ("interval", "run_time"))
        if gap < 0:
            bad(path, line, f"interval: {gap:g} is negative", "it is seconds since the job before")
        now += gap
        gpus, nodes = _count(path, line, row, "gpu_num"), _count(path, line, row, "node_num")
        found.add(TraceJob(row["u_id"][:80], now, None, run, gpus, max(nodes, 0), 0.0), line)
    return found.trace("it records no starts, so waits are unknown")


def read_pods(path: Path) -> Trace:
    """Return the trace in Alibaba's `openb_pod_list_*.csv`; raises `BadInput`."""
    found, shared = Collector(path.name, "Alibaba GPU v2023"), 0
    for line, row in table(path):
        gpus = _count(path, line, row, "num_gpu")
        if row["scheduled_time"] in NOTHING or row["deletion_time"] in NOTHING:
            found.leave_out(NEVER_RAN)
            continue
        times = [number(path, line, name, row[name]) for name in ("creation_time", "scheduled_time", "deletion_time")]
        shared += gpus == 1 and number(path, line, "gpu_milli", row["gpu_milli"] or "0") < 1000
        found.add_ended(row["name"], times, gpus, 1, line)
    return found.trace(
        f"{shared} pods used a part of a GPU, and are read as using a whole one" if shared else "",
        "pods that still ran are read as ended when the record ends",
    )


TABLES: Mapping[tuple[str, ...], Callable[[Path], Trace]] = {
    ("job_id", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time"): read_scheduler,
    ("u_id", "gpu_num", "node_num", "interval", "run_time", "new_status"): read_cut,
    ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"): read_pods,
    PLAIN: read_scheduler,
}
"""Reader of each table format. The key has the columns that identify the format."""


CHUNK = 1 << 16
LONGEST_JOB = 4 << 20
"""Largest number of characters of one job, enough for a thousand attempts on a hundred nodes."""


def read_philly(path: Path) -> Trace:
    """Return the trace in Philly's `cluster_job_log`; raises `BadInput`."""
    found = Collector(path.name, "Philly")
    for line, job in _jobs(path):
        if not isinstance(job, dict) or not isinstance(job.get("attempts"), list) or "submitted_time" not in job:
            bad(path, line, "is no job of Philly", "each has submitted_time and attempts")
        submitted = instant(path, line, "submitted_time", str(job["submitted_time"]))
        tried = [one for one in job["attempts"] if isinstance(one, dict)]
        runs = [one for one in tried if _said(one.get("start_time")) and _said(one.get("end_time"))]
        if not runs:
            found.leave_out(NEVER_RAN)
            continue
        times = [
            (instant(path, line, "start_time", one["start_time"]), instant(path, line, "end_time", one["end_time"]))
            for one in runs
        ]
        if any(end < start for start, end in times):
            found.leave_out("ended before it started", line)
            continue
        detail = runs[-1].get("detail")
        on = [one for one in detail if isinstance(one, dict)] if isinstance(detail, list) else []
        gpus = sum(len(one["gpus"]) for one in on if isinstance(one.get("gpus"), list))
        ran_s = sum(end - start for start, end in times)
        name = str(job.get("jobid", line))[:80]
        found.add(TraceJob(name, submitted, min(times)[0], ran_s, gpus, len(on), 0.0), line)
    return found.trace(
        "a job with several attempts is one job: its run time is that of all attempts, its GPUs are those of the last"
    )


def _said(value: object) -> bool:
    return isinstance(value, str) and value not in NOTHING


def _jobs(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each element of the file's JSON list, with the line on which it begins."""
    decoder, line, text, begun = json.JSONDecoder(), 1, "", False
    with opened(path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
        more = True
        while True:
            stripped = text.lstrip(" \t\r\n," if begun else " \t\r\n\ufeff")
            line += text.count("\n", 0, len(text) - len(stripped))
            text = stripped
            if text and not begun:
                if text[0] != "[":
                    bad(path, line, "does not begin with [", "Philly's cluster_job_log is one JSON list")
                begun, text = True, text[1:]
                continue
            if text.startswith("]"):
                return
            job = None
            # An incomplete object is read to its end first.
            if text:
                try:
                    job, end = decoder.raw_decode(text)
                except RecursionError:
                    bad(path, line, "is nested too deeply", "this is no job of Philly")
                except ValueError as error:
                    if not more or len(text) > LONGEST_JOB:
                        bad(path, line, f"is no JSON: {error}", "is the file whole?")
                else:
                    yield line, job
                    line += text.count("\n", 0, end)
                    text = text[end:]
                    continue
            if not more:
                bad(path, line, "the list has no end", "is the file whole?")
            piece = file.read(CHUNK)
            more = bool(piece)
            text += piece


PIECE_S = 86400.0
"""Seconds of accounting records in one query."""
COMMAND = (
    "SLURM_TIME_FORMAT=%s sacct --parsable2 --duplicates --allocations --allusers "
    f"--state={ENDS} --starttime=now-30days --endtime=now "
    "--format=JobIDRaw,JobID,Submit,Start,End,State,NNodes,AllocTRES,ReqTRES,TimelimitRaw,User,Partition"
)
"""sacct command whose output has all fields that the reader uses."""
NEEDED = ("Submit", "Start", "End", "State")
TIMES = ("Submit", "Start", "End")
NEVER = {"", "Unknown", "None", "NONE"}


class _Runs:
    """Collector that merges the runs of a requeued job into one job. It gets the sum of their run times, and the GPUs
    of the last run."""

    def __init__(self, name: str) -> None:
        self.found = Collector(name, "sacct")
        self._last: dict[tuple[int, str], tuple[TraceJob, float]] = {}
        """Newest job of each (id, user), with the end of its last run."""
        self._merged = 0

    def add(self, row: AccountingRow) -> None:
        """Add a run. It is merged into the job with the same id and user that ended shortly before, if there is one."""
        if row.start is None or row.end is None:
            self.found.leave_out(NEVER_RAN if row.end is not None else "had not ended")
            return
        key = row.job_id, row.user
        job = TraceJob(
            str(row.job_id), row.submit, row.start, row.end - row.start, row.gpus or row.requested_gpus, row.nodes,
            row.time_limit_s or 0.0,
        )  # fmt: skip
        before, ended = self._last.get(key, (None, 0.0))
        if before is not None and -SAME_JOB_S < row.submit - ended <= SAME_JOB_S:
            self._merged += 1
            job = job._replace(
                submitted=min(before.submitted, job.submitted),
                started=min(before.began, job.began),
                run_s=before.run_s + job.run_s,
            )
        elif before is not None:
            self.found.add(before, f"job {before.name}")
        if before is None and len(self._last) >= MOST_JOBS:
            raise BadInput(f"{self.found.name}: more than {MOST_JOBS:,} jobs; choose a shorter span")
        self._last[key] = job, max(row.end, ended)

    def trace(self, note: str = "") -> Trace:
        """Return the trace of all jobs."""
        for job, _ in self._last.values():
            self.found.add(job, f"job {job.name}")
        again = (
            f"{self._merged} runs followed a requeue, and are merged with the job's earlier runs"
            if self._merged
            else ""
        )
        return self.found.trace(note, again)


def read_sacct(
    sacct: Sacct,
    since: float,
    until: float,
    partition: str = "",
    on_rows: Callable[[float, int], None] = lambda share, rows: None,
) -> Trace:
    """Return the jobs that ended between `since` and `until` (Unix seconds) according to Slurm's accounting.

    `on_rows` is called with the share of the time span that has been read, and the number of rows so far. Raises
    `BadInput` and the errors of `Sacct`.
    """
    runs, rows = _Runs("sacct"), 0
    for start, end in days(since, until):
        for row in sacct.rows(start, end):
            rows += 1
            if isinstance(row, Rejected):
                runs.found.leave_out("an implausible row", f"row {row.row} ({row.text[:80]}): {row.why}")
            # Both ends of a piece belong to it: what ended in its last second comes again with the next.
            elif _counts(row, partition) and (row.end is None or row.end < end or end >= until):
                runs.add(row)
        on_rows((end - since) / (until - since), rows)
    return runs.trace()


def days(since: float, until: float) -> Iterator[tuple[float, float]]:
    """Yield start and end (Unix seconds) of each query's time span."""
    # sacct is asked for whole seconds: what ends between two pieces would count with both.
    start = float(int(since))
    while start < until:
        yield start, min(start + PIECE_S, until)
        start += PIECE_S


def _counts(row: AccountingRow, partition: str) -> bool:
    return not partition or row.partition == partition


def read_sacct_file(path: Path, partition: str = "") -> Trace:
    """Return the trace in a file written by `sacct --parsable2` with its header; raises `BadInput`."""
    runs, zoned = _Runs(path.name), list[bool]()
    for row in sacct_rows(path, zoned.append):
        if isinstance(row, Rejected) and row.why == STEP:
            runs.found.leave_out(STEP)
        elif isinstance(row, Rejected):
            runs.found.leave_out("an implausible row", f"{path.name}: line {row.row}: {row.why}")
        elif _counts(row, partition):
            runs.add(row)
    note = "times have no time zone: a job that ran while clocks changed is an hour off; use SLURM_TIME_FORMAT=%s"
    return runs.trace("" if all(zoned) else note)


STEP = "a step, not a job"


def sacct_rows(
    path: Path, on_time: Callable[[bool], None] = lambda unix: None, cluster: str = "", *, local: bool = False
) -> Iterator[AccountingRow | Rejected]:
    """Yield the rows of a file written by `sacct --parsable2` with its header. Raises `BadInput`.

    If `cluster` is given, rows of other clusters are rejected. Otherwise all rows must be of one cluster, because
    several clusters use the same job ids. `on_time` is called with True for each time in Unix seconds, and with False
    for each date. A date without a time zone is local time if `local`, else UTC.
    """
    before = ""
    for line, named in _named_rows(path):
        its = named.get("Cluster", "")
        if not cluster and before not in ("", its):
            advice = "write a file for each cluster; an import also takes --cluster"
            bad(path, line, f"is of cluster {its!r:.60}, the line before of {before!r:.60}", advice)
        before = its
        shown = named.get("JobIDRaw") or named["JobID"]
        if "." in shown:
            yield Rejected(line, STEP, "")
            continue
        try:
            values = dict.fromkeys(FIELDS, "") | {name: text for name, text in named.items() if name in FIELDS}
            for name in TIMES:
                if named[name] not in NEVER:
                    on_time(named[name].isdigit())
                    values[name] = f"{instant(path, line, name, named[name], local=local):.0f}"
            values["JobIDRaw"] = shown if shown.isdigit() else _number_of(shown)
            values["JobID"] = named.get("JobID") or shown
            values["NodeList"] = named.get("NodeList") or ("" if values["Start"] in NEVER else "unnamed")
            values["TimelimitRaw"] = named.get("TimelimitRaw") or _minutes(path, line, named.get("Timelimit", ""))
            values["Cluster"] = values["Cluster"] or cluster
            own = (named.get(name, "") for name in (RESTARTS, *OWN))
            yield parse_row([*(values[name] for name in FIELDS), *own], cluster)
        except BadRow as error:
            yield Rejected(line, str(error), shown[:200])


def _named_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    names: list[str] = []
    for line, text in lines(path):
        if not text.strip():
            continue
        words = text.split("|")
        if not names:
            names = [word.strip() for word in words]
            gpus = {"AllocTRES", "ReqTRES"} & set(names)
            missing = [name for name in NEEDED if name not in names]
            missing += [] if {"JobIDRaw", "JobID"} & set(names) else ["JobIDRaw"]
            missing += [] if gpus else ["AllocTRES"]
            if missing:
                bad(path, line, f"has no column {', '.join(missing)}", f"write the file by: {COMMAND}")
            continue
        if len(words) != len(names):
            advice = f"leave out free text such as JobName and Comment, as in: {COMMAND}"
            bad(path, line, f"has {len(words)} fields, its header {len(names)}", advice)
        yield line, dict(zip(names, words, strict=True))


def _number_of(job: str) -> str:
    """Return a made-up number for a job id such as 12_3, for files without the column `JobIDRaw`."""
    return str(10**15 + int.from_bytes(blake2b(job.encode(), digest_size=6).digest(), "big"))


def _minutes(path: Path, line: int, text: str) -> str:
    """Convert a time limit such as 1-02:00:00 to minutes, the format of `TimelimitRaw`."""
    if text.strip("0:-") and not seconds(text):
        if text not in ("UNLIMITED", "Partition_Limit", "INVALID"):
            bad(path, line, f"Timelimit: {text!r:.40} is no time", "ask sacct for TimelimitRaw")
        return ""
    return f"{math.ceil(seconds(text) / 60)}" if text else ""
