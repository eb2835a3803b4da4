"""Reader of jobs' reports: it reads a bounded number of lines at a time, checks each line, and drops bad lines.

A job's user can write anything into its reports. Each line must have the right form, and its time must lie within the
run by Slurm's clock. Report numbers must not rise faster than a job can report. Samples count only as far as the job's
steps and its position in the data confirm them (`confirmed`).

No check here can tell whether a job trains at all. `learn` bounds what a user can gain by consistent lies.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from ones_db import ReportLine, RunReports
from ones_db.reasons import Reason, reason
from ones_wrapper.protocol import (
    CHECKPOINTS,
    MANIFEST,
    MAX_LINE,
    MAX_SPEC,
    SPEC,
    Epoch,
    Hello,
    Membership,
    ProtocolError,
    Spec,
    Throughput,
    decode_report,
    decode_spec,
    reports_name,
)
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.untrusted_files import (
    Found,
    NoAnswer,
    NotBelieved,
    Part,
    check_directory,
    foreign,
    job_directory,
    read_file,
    read_files,
)

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Largest number of bytes read from one job's reports at a time."""
MAX_LINES = 2_000
"""Largest number of lines, good or bad, read from one job in a tick. Further lines wait for the next tick."""
LEAST_LINES = 64
"""Number of lines that are read from any job in a tick. A job writes fewer in a minute."""
ALL_LINES = 100_000
"""Number of lines read from all jobs together in a tick; more if a job would otherwise get less than `LEAST_LINES`."""
BURST = 2_000
PER_S = 2.0
"""Accepted reports per second since the run's start, beyond `BURST`. By default a wrapper reports every 2 s."""
FUTURE_S = 300.0
"""Most seconds by which a report's time may be ahead of the companion's clock."""
SKEW_S = 300.0
"""Largest accepted difference between a node's clock and Slurm's, in seconds."""
LENGTHS = 1.05
"""Largest accepted ratio of a reported duration to the time since the run's start."""
ROUNDING = 1.05
"""Largest accepted ratio of reported samples to steps × batch; ranks round their local batches."""
MAX_PROBLEM = 500
"""Largest number of characters in the description of a problem."""


def lines_per_job(jobs: int) -> int:
    """Return the number of lines to read from each of `jobs` jobs."""
    return min(max(ALL_LINES // max(jobs, 1), LEAST_LINES), MAX_LINES)


def highest_number(job: WholeJob, restart: int, now: float, others: int = 0) -> int:
    """Return the highest report number that this run can have reached by now. All runs of a job of blocks share one
    bound, so the number of the other runs' reports (`others`) is subtracted."""
    since = job.run_start if restart == job.restart and job.run_start else job.submit_time
    return BURST + int(PER_S * max(now - since, 0.0)) - others


def read_spec(job: WholeJob) -> tuple[Spec | None, str]:
    """Return the spec that the job reported (None without one), and what is wrong with it ("" for nothing). Raises
    `NoAnswer`."""
    try:
        return _spec(read_files(job_directory(job), job.uid, [_SPEC])[0])
    except FileNotFoundError:
        return None, ""
    except NoAnswer:
        raise
    except NotBelieved as error:
        return None, str(error)


_SPEC: Part = (SPEC, 0, MAX_SPEC + 1)
_decoded = lru_cache(maxsize=256)(decode_spec)
"""Decoder of specs with a cache, since specs are read in each tick and seldom change."""


def _spec(found: Found) -> tuple[Spec | None, str]:
    if isinstance(found, FileNotFoundError):
        return None, ""
    try:
        if isinstance(found, NotBelieved):
            raise found
        return _decoded(found[0]), ""
    except (NotBelieved, ProtocolError) as error:
        return None, f"{SPEC}: {error}"


def read_reports(
    job: WholeJob, restart: int, offset: int, after: int, *, now: float, most: int = MAX_LINES, others: int = 0
) -> tuple[RunReports, str]:
    """Return a run's new reports, and what is wrong with them ("" for nothing). New reports are behind byte `offset` of
    the file, with numbers above `after`.

    Lines that are malformed, out of order, repeated, from the future, or cut short in mid-file are dropped. So are
    measurements from outside the run (see `_within_run`). A last line without newline waits for the next read, as do
    lines beyond `most` or `highest_number`. Raises `NoAnswer`.
    """
    data, spec, problem = _piece(job, restart, offset)
    lines, used, number, fault = _lines(data, job, restart, after, now, most, others)
    lines, doubt = _within_run(lines, job, restart, now) if lines else (lines, "")
    problems = "; ".join(filter(None, (problem, fault, doubt)))[:MAX_PROBLEM]
    return RunReports(job.job_id, restart, offset + used, number, spec, lines), problems


def _piece(job: WholeJob, restart: int, offset: int) -> tuple[bytes, Spec | None, str]:
    """Return the next bytes of a run's report file, the job's spec, and what is wrong with both ("" for nothing)."""
    name = reports_name(restart)
    try:
        of_spec, found = read_files(job_directory(job), job.uid, [_SPEC, (name, offset, MAX_BYTES)])
    except FileNotFoundError:
        return b"", None, ""
    except NoAnswer:
        raise
    except NotBelieved as error:
        return b"", None, str(error)
    spec, problem = _spec(of_spec)
    if isinstance(found, FileNotFoundError):
        return b"", spec, problem
    if isinstance(found, NotBelieved):
        return b"", spec, str(found)
    data, size = found
    if size < offset:
        fault = f"{name}: shorter than before ({size} < {offset} bytes)"
        return b"", spec, f"{problem}; {fault}" if problem else fault
    return data, spec, problem


def _within_run(lines: Sequence[ReportLine], job: WholeJob, restart: int, now: float) -> tuple[list[ReportLine], str]:
    """Compare reports with their run's start and end by Slurm's clock. Return the accepted lines, and what is wrong
    with others ("" for nothing).

    A Throughput or Epoch report from outside the run is dropped, and so is a Throughput report of more seconds than the
    run has lasted. Any other report from outside gets the nearest time within the run.
    """
    known = restart == job.restart and not job.pending
    start = job.run_start if known else 0.0
    low, high = start - SKEW_S, (job.end_time if known and job.ended else now) + SKEW_S
    accepted, doubts = [], []
    for line in lines:
        if not low <= line.time <= high:
            where = f"{line.time - high:.0f} s after" if line.time > high else f"{low - line.time:.0f} s before"
            doubts.append(f"report {line.number} is {where} its run, by Slurm's clock")
            if not isinstance(line.report, (Throughput, Epoch)):
                accepted.append(replace(line, time=min(max(line.time, low), high)))
        elif isinstance(line.report, Throughput) and line.report.seconds > LENGTHS * max(line.time - start, 0) + SKEW_S:
            doubts.append(f"report {line.number} makes it {line.report.seconds:.0f} s of training since its run began")
        else:
            accepted.append(line)
    return accepted, f"{len(doubts)} of its reports not believed, the last: {doubts[-1]}" if doubts else ""


Measured: TypeAlias = Hello | Throughput
"""Report with a step number and a position in the data."""


def last_measured(reports: RunReports) -> Measured | None:
    """Return the newest Hello or Throughput report; None if there is none."""
    return next((line.report for line in reversed(reports.lines) if isinstance(line.report, (Hello, Throughput))), None)


def confirmed(reports: RunReports, before: Measured | None) -> tuple[RunReports, str]:
    """Return the reports with plausible numbers of samples, and what was wrong ("" for nothing). Between two reports a
    job cannot use more samples than steps × batch, or than its position in the data moved. `before` is the report
    before the first; without it the first number of samples is believed."""
    dataset = reports.spec.dataset if reports.spec is not None else 0
    lines, doubts = [], []
    for line in reports.lines:
        report = line.report
        if isinstance(report, Throughput) and before is not None:
            most = _most_samples(before, report, dataset)
            if report.samples > ROUNDING * most:
                doubts.append(f"report {line.number} counts {report.samples} samples, and its steps allow {most}")
                line = replace(line, report=replace(report, samples=most))
        before = report if isinstance(report, (Hello, Throughput)) else before
        lines.append(line)
    problem = f"{len(doubts)} of its reports not believed, the last: {doubts[-1]}" if doubts else ""
    return replace(reports, lines=lines), problem


def _most_samples(before: Measured, report: Throughput, dataset: int) -> int:
    """Return the largest possible number of samples between two reports, by steps × batch. It is also bounded by their
    positions in the data if both are in one epoch or the data's length is known."""
    most = (report.step - before.step) * report.batch
    epochs = report.epoch - before.epoch
    if epochs == 0 or dataset:
        most = min(most, epochs * max(dataset, before.cursor) + report.cursor - before.cursor)
    return max(most, 0)


def _check_membership(report: Membership, job: WholeJob) -> None:
    if not job.by_blocks:
        raise ProtocolError("membership: the job is not one of blocks")
    if not report.blocks or len({*report.blocks}) < len(report.blocks) or len(report.restarts) != len(report.blocks):
        raise ProtocolError("membership: blocks must differ, with one restart count for each")
    if not (0 < report.nodes <= report.world and report.gpus_per_node * report.nodes in (0, report.world)):
        raise ProtocolError("membership: nodes and GPUs do not make up its world size")


def _lines(
    data: bytes, job: WholeJob, restart: int, after: int, now: float, most: int, others: int
) -> tuple[list[ReportLine], int, int, str]:
    """Return the good lines in `data`, the number of bytes read, the last report's number, and what is wrong with bad
    lines."""
    end = data.rfind(b"\n") + 1
    if not end:
        # A line longer than MAX_BYTES would be waited for for ever, so it is skipped.
        return [], len(data) if len(data) == MAX_BYTES else 0, after, ""
    lines: list[ReportLine] = []
    bad, place, first_bad, too_fast = 0, 0, "", ""
    highest = highest_number(job, restart, now, others)
    for _ in range(most):
        if place == end:
            break
        begin, place = place, data.index(b"\n", place) + 1
        try:
            number, time, report = decode_report(data[begin : place - 1])
            if time > now + FUTURE_S:
                after = number if after < number <= highest else after
                raise ProtocolError(f"t: {time:.0f} is in the future")
            if isinstance(report, Membership):
                _check_membership(report, job)
            if number <= after:
                raise ProtocolError(f"n: {number} is not above {after}, the last one")
        except ProtocolError as error:
            bad += 1
            first_bad = first_bad or str(error)
            continue
        if number > highest:
            # The line waits until that number is plausible; a run numbers its reports.
            place = begin
            too_fast = (
                f"{reports_name(restart)}: it reports faster than {PER_S:g} times a second; the rest is read later"
            )
            break
        lines.append(ReportLine(number, time, report))
        after = number
    fault = f"{reports_name(restart)}: {bad} unreadable line{'s' * (bad > 1)}, the first: {first_bad}" if bad else ""
    return lines, place, after, "; ".join(filter(None, (too_fast, fault)))


TICKS = 3
"""Number of ticks in which a running job's files may be missing before it gets a refusal."""


class JobDirectories:
    """Check of jobs' directories: if its files are missing, or orders cannot reach it, a job gets a refusal."""

    def __init__(self, spool: Path | None) -> None:
        self._spool = spool
        self._failed: dict[tuple[int, int], int] = {}
        """Number of consecutive ticks in which the files were missing, by job id and restart."""
        self._hellos: dict[tuple[int, int], Hello] = {}

    def forget(self, alive: Container[int]) -> None:
        """Forget all jobs except those in `alive`."""
        self._hellos = {key: hello for key, hello in self._hellos.items() if key[0] in alive}
        self._failed = {key: times for key, times in self._failed.items() if key[0] in alive}

    def refusal(self, job: WholeJob, *, read: bool) -> Reason | None:
        """Return the reason why the job may not be resized, else None. Call it once a tick. `read` is True if the job's
        files have been read before."""
        key = job.job_id, job.restart
        problem = _fault_of_directory(job) if job.running and not read else ""
        self._failed[key] = self._failed.get(key, 0) + 1 if problem else 0
        if self._failed[key] > TICKS:
            return reason("no_files", problem=problem)
        if self._spool is None or not foreign(job):
            return None
        hello, ours = self.hello(job), (os.path.normpath(self._spool), os.path.realpath(self._spool))
        # A job without a hello, or whose hello names no spool, reads the site's.
        if hello is None or not hello.directory or (hello.spool and os.path.normpath(hello.spool) in ours):
            return None
        return reason("spool_not_read", spool=str(self._spool))

    def hello(self, job: WholeJob) -> Hello | None:
        """Return the `Hello` of the job's newest run, or else that of its previous run, whose environment was the same.
        Return None if neither exists."""
        for key in ((job.job_id, job.restart), (job.job_id, job.restart - 1)):
            if key not in self._hellos and key[1] >= 0 and (found := _hello(job, key[1])) is not None:
                self._hellos[key] = found
            if key in self._hellos:
                return self._hellos[key]
        return None


def _fault_of_directory(job: WholeJob) -> str:
    try:
        path = job_directory(job)
        check_directory(path, job.uid)
        return ""
    except FileNotFoundError:
        return f"{path}: no such directory"
    except NotBelieved as error:
        return str(error)


def _hello(job: WholeJob, restart: int) -> Hello | None:
    try:
        text, _ = read_file(job_directory(job), job.uid, reports_name(restart), MAX_LINE + 1)
        report = decode_report(text.split(b"\n", 1)[0])[2]
    except (FileNotFoundError, NotBelieved, ProtocolError):
        return None
    return report if isinstance(report, Hello) else None


def checkpoint_stands(job: WholeJob, name: str) -> bool:
    """Tell whether the checkpoint that a job reported exists, with a manifest. Raises `NoAnswer`."""
    if not name or name.startswith(".") or "/" in name:
        return False
    try:
        text, size = read_file(job_directory(job) / CHECKPOINTS / name, job.uid, MANIFEST, 1)
        return bool(text) and size > 0
    except NoAnswer:
        raise
    except (FileNotFoundError, NotBelieved):
        return False


STAYS_S = 3600.0
"""Seconds for which a note is shown after its problem was last found."""


@dataclass(frozen=True)
class _Note:
    problem: str
    since: float
    seen: float
    """Time, by Slurm's clock, at which the problem was last found."""


class Notes:
    """Problems in each job's reports. Each is shown to the job's owner until `STAYS_S` after it was last found."""

    def __init__(self) -> None:
        self._notes: dict[int, _Note] = {}
        self._read: dict[int, float] = {}

    def add(self, job_id: int, problem: str, now: float) -> None:
        """Record the problem ("" for none) that was found in a job's reports at the time `now`."""
        self._read[job_id] = now
        if not problem:
            return
        known = self._notes.get(job_id)
        if known is None or known.problem != problem:
            log.warning("job %d: %s", job_id, problem)
            known = _Note(problem, now, now)
        self._notes[job_id] = _Note(problem, known.since, now)

    def text(self, job_id: int, now: float) -> str:
        """Return the note to show at `now`; "" for none."""
        note = self._notes.get(job_id)
        if note is None:
            return ""
        if note.seen >= self._read.get(job_id, note.seen):
            return f"{note.problem} (since {_clock(note.since)})"
        if now - note.seen > STAYS_S:
            del self._notes[job_id]
            return ""
        return f"{note.problem} (last seen {_clock(note.seen)})"

    def forget(self, alive: Container[int]) -> None:
        """Forget all jobs except those in `alive`."""
        self._notes = {id_: note for id_, note in self._notes.items() if id_ in alive}
        self._read = {id_: when for id_, when in self._read.items() if id_ in alive}


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
