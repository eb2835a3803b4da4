"""Microsoft's `cluster_job_log`: one JSON list of jobs with their attempts (Jeon et al., ATC 2019), read job by job."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_ones.simulate.traces.trace import NEVER_RAN, NOTHING, Collector, Trace, TraceJob, bad, instant, opened

CHUNK = 1 << 16
LONGEST_JOB = 4 << 20
"""Characters of one job: one that was tried a thousand times on a hundred nodes takes less."""


def read_philly(path: Path) -> Trace:
    """The trace of a file; raises `BadInput`."""
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
    return found.trace("a job that was tried again is one job, as long as all its attempts, on its last GPUs")


def _said(value: object) -> bool:
    return isinstance(value, str) and value not in NOTHING


def _jobs(path: Path) -> Iterator[tuple[int, Any]]:
    """Each element of the file's list with the line on which it begins; no more of it is in memory than one job."""
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
