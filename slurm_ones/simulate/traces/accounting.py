"""Slurm's own accounting as a trace: asked of `sacct`, or from a file that it wrote with `--parsable2`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from ones_db.accounting import SAME_JOB_S
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.traces.trace import MOST_JOBS, NEVER_RAN, Collector, Trace, TraceJob, bad, instant, lines
from slurm_ones.slurm.fields import seconds
from slurm_ones.slurm.sacct import ENDS, FIELDS, AccountingRow, BadRow, Rejected, Sacct, parse_row

PIECE_S = 86400.0
"""Accounting is asked for so much time at once."""
COMMAND = (
    "SLURM_TIME_FORMAT=%s sacct --parsable2 --duplicates --allocations --allusers "
    f"--state={ENDS} --starttime=now-30days --endtime=now "
    "--format=JobIDRaw,JobID,Submit,Start,End,State,NNodes,AllocTRES,ReqTRES,TimelimitRaw,User,Partition"
)
"""Command that writes a file with all that is used."""
NEEDED = ("Submit", "Start", "End", "State")
TIMES = ("Submit", "Start", "End")
NEVER = {"", "Unknown", "None", "NONE"}


class _Runs:
    """Jobs from their runs: a requeued one is one job, as long as all its runs, on the GPUs of its last."""

    def __init__(self, name: str) -> None:
        self.found = Collector(name, "sacct")
        self._last: dict[tuple[int, str], tuple[TraceJob, float]] = {}
        """The latest job of each id and user, and when its last run ended."""
        self._merged = 0

    def add(self, row: AccountingRow) -> None:
        """Take one run."""
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
        """All jobs."""
        for job, _ in self._last.values():
            self.found.add(job, f"job {job.name}")
        again = f"{self._merged} runs followed a requeue, and count to the job's first" if self._merged else ""
        return self.found.trace(note, again)


def read_sacct(
    sacct: Sacct,
    since: float,
    until: float,
    partition: str = "",
    on_rows: Callable[[float, int], None] = lambda share, rows: None,
) -> Trace:
    """The jobs that ended in a span of accounting (Unix seconds). `on_rows` hears of the share that is read, and of
    rows so far. Raises `BadInput`, and what `Sacct` raises."""
    # sacct is asked for whole seconds: what ends between two pieces would count with both.
    runs, rows, start = _Runs("sacct"), 0, float(int(since))
    while start < until:
        end = min(start + PIECE_S, until)
        for row in sacct.rows(start, end):
            rows += 1
            if isinstance(row, Rejected):
                runs.found.leave_out("a row that cannot be believed", f"row {row.row} ({row.text[:80]}): {row.why}")
            # Both ends of a piece belong to it: what ended in its last second comes again with the next.
            elif _counts(row, partition) and (row.end is None or row.end < end or end >= until):
                runs.add(row)
        start = end
        on_rows((end - since) / (until - since), rows)
    return runs.trace()


def _counts(row: AccountingRow, partition: str) -> bool:
    return not partition or row.partition == partition


def read_sacct_file(path: Path, partition: str = "") -> Trace:
    """The trace of a file that `sacct --parsable2` wrote with a header; raises `BadInput`."""
    runs = _Runs(path.name)
    zoned = True
    for line, named in _named_rows(path):
        shown = named.get("JobIDRaw") or named["JobID"]
        if "." in shown:
            runs.found.leave_out("a step, not a job")
            continue
        where = f"{path.name}: line {line}"
        try:
            values = dict.fromkeys(FIELDS, "") | {name: text for name, text in named.items() if name in FIELDS}
            for name in TIMES:
                if named[name] not in NEVER:
                    zoned = zoned and named[name].isdigit()
                    values[name] = f"{instant(path, line, name, named[name]):.0f}"
            values["JobIDRaw"] = shown if shown.isdigit() else _number_of(shown)
            values["JobID"] = named.get("JobID") or shown
            values["NodeList"] = named.get("NodeList") or ("" if values["Start"] in NEVER else "unnamed")
            values["TimelimitRaw"] = named.get("TimelimitRaw") or _minutes(path, line, named.get("Timelimit", ""))
            row = parse_row([*(values[name] for name in FIELDS), named.get("Restarts", ""), "", ""], "")
        except BadRow as error:
            runs.found.leave_out("a row that cannot be believed", f"{where}: {error}")
            continue
        if _counts(row, partition):
            runs.add(row)
    note = "times have no zone: where clocks changed, a job is an hour off; write them with SLURM_TIME_FORMAT=%s"
    return runs.trace("" if zoned else note)


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
    """A job id for one such as 12_3, if the file has no `JobIDRaw`."""
    return str(10**15 + int.from_bytes(blake2b(job.encode(), digest_size=6).digest(), "big"))


def _minutes(path: Path, line: int, text: str) -> str:
    """Minutes of a time limit such as 1-02:00:00, as `TimelimitRaw` has them."""
    if text.strip("0:-") and not seconds(text):
        if text not in ("UNLIMITED", "Partition_Limit", "INVALID"):
            bad(path, line, f"Timelimit: {text!r:.40} is no time", "ask sacct for TimelimitRaw")
        return ""
    return f"{math.ceil(seconds(text) / 60)}" if text else ""
