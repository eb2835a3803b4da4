"""Recorded trace in one form for all file formats: submission, start, run time and GPUs of each job."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from slurm_ones.simulate import BadInput
from slurm_ones.text import plain

MOST_JOBS = 1_000_000
"""Largest number of jobs of a trace. Each takes less than a kilobyte of memory."""
LONGEST_LINE = 65_536
"""Largest number of bytes of a line. A file with longer lines is no trace."""
MOST_GPUS = 100_000
MOST_S = 10 * 366 * 86400.0
"""Longest run time of a job in seconds. A longer one is implausible."""
SHOWN = 5
"""Number of implausible rows that are described to the user."""
NOTHING = {"", "None", "NaT", "nan", "NULL"}
"""Texts that mean an unknown time."""
NEVER_RAN = "never ran, or ended at once"


class TraceJob(NamedTuple):
    """A recorded job. Its times are in seconds since a moment that is the same for the whole trace."""

    name: str
    submitted: float
    started: float | None
    """Time of the first start; None if unknown."""
    run_s: float
    """Seconds for which the job held its GPUs."""
    gpus: int
    nodes: int
    """Number of nodes; 0 if unknown."""
    limit_s: float
    """Time limit in seconds; 0 if unknown or unlimited."""

    @property
    def began(self) -> float:
        """Time of the first start; time of the submission if the start is unknown."""
        return self.submitted if self.started is None else self.started

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.run_s / 3600.0


@dataclass(frozen=True)
class Trace:
    """Jobs of a trace that held GPUs, in order of submission. Rows of other jobs are only counted."""

    name: str
    format: str
    jobs: tuple[TraceJob, ...]
    left_out: tuple[tuple[str, int], ...]
    """Pairs of a reason why rows were left out, and the number of these rows."""
    doubts: tuple[str, ...] = ()
    """Descriptions of the first implausible rows."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about assumptions of the reader."""
    gpus_per_node: int = 0
    """GPUs of a node; 0 if the file does not state them."""


class Collector:
    """Collector of the jobs of a trace. It also counts the rows that are left out."""

    def __init__(self, name: str, format: str) -> None:
        self.name, self.format = name, format
        self._jobs: list[TraceJob] = []
        self._left_out: Counter[str] = Counter()
        self._doubts: list[str] = []

    def leave_out(self, why: str, line: int | str = "") -> None:
        """Count a row as left out. The `line` of an implausible row is given, so that it is described to the user."""
        self._left_out[why] += 1
        if line and len(self._doubts) < SHOWN:
            place = f"{self.name}: line {line}" if isinstance(line, int) else line
            self._doubts.append(plain(f"{place}: {why}", 300))

    def add(self, job: TraceJob, line: int | str) -> None:
        """Add a job, or leave it out if it cannot be simulated. Raises `BadInput` for more than `MOST_JOBS` jobs."""
        if job.gpus < 1:
            self.leave_out("no GPUs")
        elif job.run_s <= 0:
            self.leave_out(NEVER_RAN)
        elif job.started is not None and job.started < job.submitted:
            self.leave_out("started before it was submitted", line)
        elif max(job.gpus, job.nodes) > MOST_GPUS or job.run_s > MOST_S:
            self.leave_out(f"more than {MOST_GPUS:,} GPUs or nodes, or longer than ten years", line)
        elif len(self._jobs) >= MOST_JOBS:
            raise BadInput(f"{self.name}: more than {MOST_JOBS:,} jobs with GPUs; cut it to a shorter span")
        else:
            self._jobs.append(job)

    def add_ended(self, name: str, times: Sequence[float], gpus: int, nodes: int, line: int) -> None:
        """Add a job whose submission, start and end are known."""
        submitted, started, ended = times
        if ended < started:
            self.leave_out("ended before it started", line)
        else:
            self.add(TraceJob(name[:80], submitted, started, ended - started, gpus, max(nodes, 0), 0.0), line)

    def trace(self, *notes: str, gpus_per_node: int = 0) -> Trace:
        """Return the trace. Raises `BadInput` if it has no jobs."""
        if not self._jobs:
            why = ", ".join(f"{count} {reason}" for reason, count in self._left_out.most_common())
            raise BadInput(
                f"{self.name}: no job of it held GPUs{f' ({why})' if why else ''}; choose a longer span, or check "
                "that accounting counts GPUs"
            )
        jobs = tuple(sorted(self._jobs, key=lambda job: job.submitted))
        said = tuple(note for note in notes if note)
        left_out = tuple(self._left_out.most_common())
        return Trace(self.name, self.format, jobs, left_out, tuple(self._doubts), said, gpus_per_node)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Context with the file open for reading, unpacked if its name ends in .gz. Raises `BadInput`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without its line break. Raises `BadInput` if the file is not text."""
    with opened(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                bad(path, number, f"is longer than {LONGEST_LINE} bytes", "this is no trace")
            if b"\0" in line:
                bad(
                    path, number, "holds a zero byte", "this is no text file; give the trace itself, unpacked or as .gz"
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                bad(path, number, "is not UTF-8", "convert it with iconv")


def table(path: Path, columns: Collection[str] = ()) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield line number and values of each row of a CSV file. Raises `BadInput`, also if one of `columns` is
    missing."""
    texts, line = lines(path), 1
    try:
        _, head = next(texts)
        names = [name.strip() for name in next(csv.reader([head]))]
        if missing := [name for name in columns if name not in names]:
            bad(path, 1, f"no column {', '.join(missing)}", f"it has {', '.join(names)}")
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


def bad(path: Path, line: int, what: str, advice: str) -> NoReturn:
    """Raise `BadInput` that names file, line and error, and gives advice."""
    raise BadInput(plain(f"{path}: line {line}: {what}; {advice}", 600))


def number(path: Path, line: int, column: str, text: str) -> float:
    """Return the finite number in `text`; raises `BadInput`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        bad(path, line, f"{column}: {text!r:.60} is not a number", "correct or remove that line")
    return value


def instant(path: Path, line: int, column: str, text: str, *, local: bool = False) -> float:
    """Return a time in seconds, from a number or from a date such as `2023-03-01 00:18:22+08:00`. Raises `BadInput`.

    A date without a time zone is local time if `local`, else UTC. UTC suffices if only differences of times matter.
    """
    # A number first: eight digits would pass for a date.
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    try:
        at = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return (at if at.tzinfo or local else at.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        bad(path, line, f"{column}: {text!r:.60} is no date and time", "write 2023-03-01 00:18:22 or Unix seconds")
