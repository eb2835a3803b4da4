"""A recorded trace in one form: submission, start, run time and GPUs of each job."""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from slurm_ones.simulate import BadInput
from slurm_ones.text import plain

MOST_JOBS = 1_000_000
"""Jobs of a trace; each takes less than a kilobyte of memory."""
LONGEST_LINE = 65_536
"""Bytes of a line; what is longer is no line of such a file."""
MOST_GPUS = 100_000
MOST_S = 10 * 366 * 86400.0
"""Seconds that a job can have run; a trace's own dates are not held to it."""
SHOWN = 5
"""Bad lines that a trace names."""
NOTHING = {"", "None", "NaT", "nan", "NULL"}
"""Texts of an unknown time."""
NEVER_RAN = "never ran, or ended at once"


class TraceJob(NamedTuple):
    """One job as it was recorded. Times in seconds, of any one beginning."""

    name: str
    submitted: float
    started: float | None
    """None if unknown."""
    run_s: float
    """Time for which it held its GPUs."""
    gpus: int
    nodes: int
    """0 if unknown."""
    limit_s: float
    """Its time limit; 0 if unknown, or if it had none."""

    @property
    def began(self) -> float:
        """Time of its start; if that is unknown, of its submission."""
        return self.submitted if self.started is None else self.started

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.run_s / 3600.0


@dataclass(frozen=True)
class Trace:
    """The jobs that held GPUs, by submission, and what was left out."""

    name: str
    format: str
    jobs: tuple[TraceJob, ...]
    left_out: tuple[tuple[str, int], ...]
    """Reasons for which rows are no job of a study, and the number of such rows."""
    doubts: tuple[str, ...] = ()
    """The first rows that could not be believed, in words."""
    notes: tuple[str, ...] = ()
    """Assumptions of its reader."""
    gpus_per_node: int = 0
    """0 if only the jobs tell."""


class Collector:
    """Gathers a trace's jobs, and counts rows that are none."""

    def __init__(self, name: str, format: str) -> None:
        self.name, self.format = name, format
        self._jobs: list[TraceJob] = []
        self._left_out: Counter[str] = Counter()
        self._doubts: list[str] = []

    def leave_out(self, why: str, line: int | str = "") -> None:
        """Count a row that is no job of a study; name its `line` (or row) if that cannot be believed."""
        self._left_out[why] += 1
        if line and len(self._doubts) < SHOWN:
            place = f"{self.name}: line {line}" if isinstance(line, int) else line
            self._doubts.append(plain(f"{place}: {why}", 300))

    def add(self, job: TraceJob, line: int | str) -> None:
        """Take a job, or leave it out if it cannot be simulated. Raises `BadInput` for one job too many."""
        if job.gpus < 1:
            self.leave_out("no GPUs")
        elif job.run_s <= 0:
            self.leave_out(NEVER_RAN)
        elif job.started is not None and job.started < job.submitted:
            self.leave_out("started before it was submitted", line)
        elif job.gpus > MOST_GPUS or job.run_s > MOST_S:
            self.leave_out(f"more than {MOST_GPUS:,} GPUs or ten years", line)
        elif len(self._jobs) >= MOST_JOBS:
            raise BadInput(f"{self.name}: more than {MOST_JOBS:,} jobs with GPUs; cut it to a shorter span")
        else:
            self._jobs.append(job)

    def add_ended(self, name: str, times: Sequence[float], gpus: int, nodes: int, line: int) -> None:
        """`add` a job whose submission, start and end are known."""
        submitted, started, ended = times
        if ended < started:
            self.leave_out("ended before it started", line)
        else:
            self.add(TraceJob(name[:80], submitted, started, ended - started, gpus, max(nodes, 0), 0.0), line)

    def trace(self, *notes: str, gpus_per_node: int = 0) -> Trace:
        """All jobs in the order of submission. Raises `BadInput` if there are none."""
        if not self._jobs:
            why = ", ".join(f"{count} {reason}" for reason, count in self._left_out.most_common())
            raise BadInput(
                f"{self.name}: no job in it that held GPUs{f' ({why})' if why else ''}; choose a longer span, or check "
                "that accounting counts GPUs"
            )
        jobs = tuple(sorted(self._jobs, key=lambda job: job.submitted))
        said = tuple(note for note in notes if note)
        left_out = tuple(self._left_out.most_common())
        return Trace(self.name, self.format, jobs, left_out, tuple(self._doubts), said, gpus_per_node)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A trace's file for reading, unpacked if its name ends in .gz. Raises `BadInput`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Each line with its number, without its end. Raises `BadInput` for what is no text."""
    with opened(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                bad(path, number, f"is longer than {LONGEST_LINE} bytes", "this is no such file")
            if b"\0" in line:
                bad(
                    path, number, "holds a zero byte", "this is no text file; give the trace itself, unpacked or as .gz"
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                bad(path, number, "is not UTF-8", "convert it with iconv")


def bad(path: Path, line: int, what: str, advice: str) -> NoReturn:
    """Raises `BadInput` with file, line, what is wrong and what to do."""
    raise BadInput(plain(f"{path}: line {line}: {what}; {advice}", 600))


def number(path: Path, line: int, column: str, text: str) -> float:
    """A finite number; raises `BadInput`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        bad(path, line, f"{column}: {text!r:.60} is not a number", "correct or remove that line")
    return value


def instant(path: Path, line: int, column: str, text: str, *, local: bool = False) -> float:
    """Seconds of a date and time such as `2023-03-01 00:18:22+08:00`, or of a number; without a zone it is
    `local`, or UTC if only differences matter. Raises `BadInput`."""
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
