"""Reading what jobs report: bounded pieces, each line checked, a bad one costing itself alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ones_wrapper.protocol import (
    MAX_LINE,
    SPEC,
    ProtocolError,
    Report,
    Spec,
    decode_report,
    decode_spec,
    reports_name,
)
from slurm_ones.job_files import NotBelieved, directory_of, job_directory, read_from
from slurm_ones.slurm.model import Job

MAX_PIECE = 1 << 20
"""Most bytes taken from one job in one look."""
MAX_LINES = 2_000
"""Most lines, good or bad, taken from one job in one look; the others wait for the next."""
LEAST_LINES = 64
"""So many are taken however many jobs there are: more than a job says in a minute."""
ALL_LINES = 100_000
"""Lines taken from all jobs in one look, as far as `LEAST_LINES` each leave it so."""
BURST = 2_000
PER_S = 2.0
"""A run's reports are believed up to number `BURST` and `PER_S` for each second since it began by Slurm's clock: so
much a run can put into the database, and no more. A wrapper left to itself reports every 2 s."""
FUTURE_S = 300.0
"""A report that is further ahead of the companion's clock is not believed."""
MAX_PROBLEM = 500
"""Characters of a complaint."""


@dataclass(frozen=True)
class Line:
    """One report line, as numbered and timed by the job."""

    number: int
    time: float
    report: Report


@dataclass(frozen=True)
class NewReports:
    """What one look at a job's directory found."""

    lines: tuple[Line, ...]
    offset: int
    """Where to read on."""
    spec: Spec | None
    problem: str
    """What could not be believed, for people; empty when nothing."""
    last: int = 0
    """Number of the last report so far. One from the future counts: by whichever clock, the job said something."""


def lines_per_job(jobs: int) -> int:
    """How many lines of each may be taken, with so many jobs to look at."""
    return min(max(ALL_LINES // max(jobs, 1), LEAST_LINES), MAX_LINES)


def highest_number(job: Job, restart: int, now: float) -> int:
    """The highest number that a report of this run may have by now."""
    since = job.start_time if restart == job.restart and job.start_time else job.submit_time
    return BURST + int(PER_S * max(now - since, 0.0))


def read_reports(job: Job, restart: int, offset: int, after: int, *, now: float, most: int = MAX_LINES) -> NewReports:
    """The complete lines of one run's reports from `offset` on whose number is above `after`.

    Lines out of order, repeated, from the future, cut short in mid-file or malformed are dropped and named in
    `problem`. A last line without its newline is left for the next look; so is what comes after `most` lines, and
    after more reports than `highest_number`.
    """
    piece = _read(job, restart, offset, after, now, most)
    return replace(piece, problem=piece.problem[:MAX_PROBLEM]) if len(piece.problem) > MAX_PROBLEM else piece


def _read(job: Job, restart: int, offset: int, after: int, now: float, most: int) -> NewReports:
    path = job_directory(job)
    name = reports_name(restart)
    spec: Spec | None = None
    problems: list[str] = []
    try:
        with directory_of(path, job.uid) as directory:
            try:
                text, _ = read_from(directory, SPEC, job.uid, 0, MAX_LINE + 1)
                spec = decode_spec(text)
            except FileNotFoundError:
                pass
            except (NotBelieved, ProtocolError) as error:
                problems.append(f"{SPEC}: {error}")
            data, size = read_from(directory, name, job.uid, offset, MAX_PIECE)
    except FileNotFoundError:
        return NewReports((), offset, spec, "; ".join(problems), after)
    except NotBelieved as error:
        return NewReports((), offset, spec, str(error), after)
    if size < offset:
        problems.append(f"{name}: shorter than before ({size} < {offset} bytes)")
        return NewReports((), offset, spec, "; ".join(problems), after)
    end = data.rfind(b"\n") + 1
    if not end:
        # A line longer than a whole piece would be waited for for ever: step over it.
        over = offset + len(data) if len(data) == MAX_PIECE else offset
        return NewReports((), over, spec, "; ".join(problems), after)
    lines: list[Line] = []
    bad = place = 0
    first_bad = ""
    highest = highest_number(job, restart, now)
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
        lines.append(Line(number, time, report))
        after = number
    if bad:
        problems.append(f"{name}: {bad} unreadable line{'s' * (bad > 1)}, the first: {first_bad}")
    return NewReports(tuple(lines), offset + place, spec, "; ".join(problems), after)
