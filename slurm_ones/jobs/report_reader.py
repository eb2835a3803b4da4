"""Reading what jobs report: a bounded part at a time, each line checked, a bad one costing itself alone.

A job's reports are its user's word, so what is checked is what guards the database and the clocks: the form of each
line, numbers that rise no faster than a job reports, and times that lie within the run by Slurm's clock. Nothing here
can tell that a job trains at all; what a lie about speed or progress gains is bounded in `learn`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ones_db import ReportLine
from ones_wrapper.protocol import (
    MAX_SPEC,
    SPEC,
    Epoch,
    Membership,
    ProtocolError,
    Spec,
    Throughput,
    decode_report,
    decode_spec,
    reports_name,
)
from slurm_ones.jobs.blocks import is_whole
from slurm_ones.slurm.model import Job
from slurm_ones.untrusted_files import NotBelieved, directory_of, job_directory, read_from

MAX_BYTES = 1 << 20
"""Most bytes read of one job at a time."""
MAX_LINES = 2_000
"""Most lines, good or bad, read of one job at a time; the others wait for the next tick."""
LEAST_LINES = 64
"""So many are read however many jobs there are: more than a job reports in a minute."""
ALL_LINES = 100_000
"""Lines read of all jobs at a time, as far as `LEAST_LINES` each leave it so."""
BURST = 2_000
PER_S = 2.0
"""A run's reports are accepted up to number `BURST` and `PER_S` for each second since it began by Slurm's clock: so
much a run can put into the database, and no more. A wrapper left to itself reports every 2 s."""
FUTURE_S = 300.0
"""A report that is further ahead of the companion's clock is not accepted."""
SKEW_S = 300.0
"""How far a node's clock may be from Slurm's."""
LENGTHS = 1.05
"""Measured lengths may be longer than the time they were measured in by this factor."""
MAX_PROBLEM = 500
"""Characters of a complaint."""


@dataclass(frozen=True)
class NewReports:
    """What a job's directory holds that was not read before."""

    lines: tuple[ReportLine, ...]
    offset: int
    """Where to read on."""
    spec: Spec | None
    problem: str
    """What was not accepted, for people; empty when nothing."""
    last: int = 0
    """Number of the last report so far. One from the future counts: by whichever clock, the job said something."""


def lines_per_job(jobs: int) -> int:
    """How many lines of each may be read, with so many jobs to read."""
    return min(max(ALL_LINES // max(jobs, 1), LEAST_LINES), MAX_LINES)


def highest_number(job: Job, restart: int, now: float, others: int = 0) -> int:
    """The highest number that a report of this run may have by now. How many runs a job of blocks has is its own word:
    so all share in what one may have, and `others` is the number of reports of its other runs."""
    if is_whole(job):
        return BURST + int(PER_S * max(now - job.submit_time, 0.0)) - others
    since = job.start_time if restart == job.restart and job.start_time else job.submit_time
    return BURST + int(PER_S * max(now - since, 0.0))


def read_spec(job: Job) -> tuple[Spec | None, str]:
    """What the job says that it can do, and what is wrong with it, in words; None where it says nothing, or that."""
    try:
        with directory_of(job_directory(job), job.uid) as directory:
            return _spec(directory, job.uid)
    except FileNotFoundError:
        return None, ""
    except NotBelieved as error:
        return None, str(error)


_decoded = lru_cache(maxsize=256)(decode_spec)
"""A spec is read at each look, and changes seldom."""


def _spec(directory: int, uid: int) -> tuple[Spec | None, str]:
    try:
        text, _ = read_from(directory, SPEC, uid, 0, MAX_SPEC + 1)
        return _decoded(text), ""
    except FileNotFoundError:
        return None, ""
    except (NotBelieved, ProtocolError) as error:
        return None, f"{SPEC}: {error}"


def read_reports(
    job: Job, restart: int, offset: int, after: int, *, now: float, most: int = MAX_LINES, others: int = 0
) -> NewReports:
    """The complete lines of one run's reports from `offset` on whose number is above `after`.

    Lines out of order, repeated, from the future, outside their run, cut short in mid-file or malformed are dropped and
    named in `problem`. A last line without its newline is left for the next time; so is what comes after `most` lines,
    and after more reports than `highest_number`.
    """
    found = _read(job, restart, offset, after, now, most, others)
    lines, doubt = _within_run(found.lines, job, restart, now)
    problem = "; ".join(filter(None, (found.problem, doubt)))
    return replace(found, lines=lines, problem=problem[:MAX_PROBLEM])


def _within_run(
    lines: tuple[ReportLine, ...], job: Job, restart: int, now: float
) -> tuple[tuple[ReportLine, ...], str]:
    """The lines that lie within their run by Slurm's clock, and what is wrong with the others, in words.

    A measurement outside its run is dropped; of any other report only the time is corrected.
    """
    known = restart == job.restart and not job.pending
    # Of a term Slurm does not know when it began: in one of the job's blocks.
    start = (job.submit_time if is_whole(job) else job.start_time) if known else 0.0
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
    return tuple(accepted), f"{len(doubts)} of its reports not believed, the last: {doubts[-1]}" if doubts else ""


def _check_membership(report: Membership, job: Job) -> None:
    """Raise `ProtocolError` for what no membership of this job can be. At which sizes other jobs run, Slurm says."""
    if not is_whole(job):
        raise ProtocolError("membership: the job is not one of blocks")
    if not report.blocks or len({*report.blocks}) < len(report.blocks) or len(report.restarts) != len(report.blocks):
        raise ProtocolError("membership: blocks and restarts are not one for each block")
    if not (0 < report.nodes <= report.world and report.gpus_per_node * report.nodes in (0, report.world)):
        raise ProtocolError("membership: nodes and GPUs do not make up its world size")


def _read(job: Job, restart: int, offset: int, after: int, now: float, most: int, others: int) -> NewReports:
    name = reports_name(restart)
    spec: Spec | None = None
    problems: list[str] = []
    try:
        with directory_of(job_directory(job), job.uid) as directory:
            spec, problem = _spec(directory, job.uid)
            problems += [problem] if problem else []
            data, size = read_from(directory, name, job.uid, offset, MAX_BYTES)
    except FileNotFoundError:
        return NewReports((), offset, spec, "; ".join(problems), after)
    except NotBelieved as error:
        return NewReports((), offset, spec, str(error), after)
    if size < offset:
        problems.append(f"{name}: shorter than before ({size} < {offset} bytes)")
        return NewReports((), offset, spec, "; ".join(problems), after)
    end = data.rfind(b"\n") + 1
    if not end:
        # A line longer than what is read at a time would be waited for for ever: step over it.
        over = offset + len(data) if len(data) == MAX_BYTES else offset
        return NewReports((), over, spec, "; ".join(problems), after)
    lines: list[ReportLine] = []
    bad = place = 0
    first_bad = ""
    highest = highest_number(job, restart, now, others)
    for _ in range(most):
        if place == end:
            break
        begin, place = place, data.index(b"\n", place) + 1
        raw = data[begin : place - 1]
        try:
            number, time, report = decode_report(raw)
            if time > now + FUTURE_S:
                after = number if after < number <= highest else after
                raise ProtocolError(f"t: {time:.0f} is in the future")
            if isinstance(report, Membership):
                _check_membership(report, job)
            if number <= after:
                raise ProtocolError(f"n: {number} comes after {after}")
            if number > highest:
                # It waits until it is due; a run's numbers count its reports.
                place = begin
                problems.append(f"{name}: it reports faster than {PER_S:g} times a second; the rest is read later")
                break
        except ProtocolError as error:
            bad += 1
            first_bad = first_bad or str(error)
            continue
        lines.append(ReportLine(number, time, report))
        after = number
    if bad:
        problems.append(f"{name}: {bad} unreadable line{'s' * (bad > 1)}, the first: {first_bad}")
    return NewReports(tuple(lines), offset + place, spec, "; ".join(problems), after)
