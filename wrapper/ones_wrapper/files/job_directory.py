"""Access of `ones-run` and node launchers to the job's directory: checkpoints, reports and exit codes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ones_wrapper.files.job_io import read_reports
from ones_wrapper.files.small_files import replace_small
from ones_wrapper.process.block import own_block
from ones_wrapper.process.exit_codes import explaining_code
from ones_wrapper.process.placement import number
from ones_wrapper.protocol import (
    CHECKPOINTS,
    MANIFEST,
    Bye,
    Checkpoint,
    Hello,
    Membership,
    reports_name,
)

TAKEN, LEFT, RESULT = "taken.json", "left", "result.json"
MEMORY = ".memory.json"
"""File with the measured memory of the job's GPUs; see `ones_wrapper.run.memory`."""
STEP_NAME = re.compile(r"step-\d{9,}")
_REPORTS = re.compile(r"reports-(\d{1,9})\.jsonl", re.ASCII)


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in this folder, newest first. Raises OSError."""
    names = [entry.name for entry in folder.iterdir() if STEP_NAME.fullmatch(entry.name)]
    return sorted(names, key=lambda name: int(name[5:]), reverse=True)


def checkpoints(job_dir: Path) -> list[Path]:
    """Return the paths of the complete checkpoints, newest first."""
    try:
        paths = [job_dir / CHECKPOINTS / name for name in checkpoint_names(job_dir / CHECKPOINTS)]
    except OSError:
        return []
    return [path for path in paths if (path / MANIFEST).is_file()]


def newest_checkpoint(job_dir: Path) -> Path | None:
    """Return the path of the newest complete checkpoint; None for none."""
    return next(iter(checkpoints(job_dir)), None)


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run's reports so far."""

    checkpoints: frozenset[str]
    """Names of the checkpoints that the run loaded or made."""
    drained: bool
    """True if an order to drain ended the run: the companion then requeues the job."""
    tasks: tuple[int, ...] = ()
    """Tasks of the last reported membership, in a job of blocks."""
    ended: bool = False
    """True if the script reached its end, or left by itself."""


def summarize_reports(job_dir: Path, restart: int) -> RunSummary:
    """Return the summary of a run's reports; malformed lines are skipped."""
    names, drained, ended = set(), False, False
    tasks: tuple[int, ...] = ()
    for _, report in read_reports(job_dir / reports_name(restart)):
        if isinstance(report, (Hello, Checkpoint)):
            names.add(report.checkpoint if isinstance(report, Hello) else report.name)
            drained = ended = False
        elif isinstance(report, Bye):
            drained, ended = report.reason == "drained", report.reason in ("finished", "stopped")
        elif isinstance(report, Membership):
            tasks = report.blocks
    return RunSummary(frozenset(names - {""}), drained, tasks, ended)


def newest_run(job_dir: Path, most: int) -> int:
    """Return the number of the newest run, up to `most`, that left reports; `most` if no run did."""
    try:
        names = [found for entry in job_dir.iterdir() if (found := _REPORTS.fullmatch(entry.name))]
    except OSError:
        return most
    return max((number for name in names if (number := int(name[1])) <= most), default=most)


def _start(restart: int, task: int | None) -> str:
    """Name of a start, with the block's task if any: the blocks of a job share its directory."""
    return str(restart) if task is None else f"block{task}-{restart}"


def write_exit_code(job_dir: Path, restart: int, who: int, code: int, task: int | None = None) -> bool:
    """Write the exit code of a node launcher (with MPI, of a rank) to a file for `ones-run`.

    `srun` returns the highest code of all tasks, and 137 for the tasks that it kills because one failed. Other
    launchers have other rules. So the script's own code would be lost. `task` is the block's task, in a job of blocks.
    Returns False if the file could not be written: `ones-run` then uses the launcher's own code.
    """
    start = _start(restart, task)
    try:
        replace_small(job_dir / f".exit-{start}-{who}", f"{time.time():.6f} {code}".encode(), sync=False)
    except OSError:
        return False
    return True


def has_exit_code(job_dir: Path, restart: int, who: int, task: int | None = None) -> bool:
    """Tell whether `write_exit_code` wrote a code for these arguments."""
    return (job_dir / f".exit-{_start(restart, task)}-{who}").is_file()


def exit_code(job_dir: Path, restart: int, code: int, task: int | None = None) -> int:
    """Return the exit code that explains the end of the ranks, from the files that they left; without files, the
    launcher's `code`."""
    left = []
    for path in job_dir.glob(f".exit-{_start(restart, task)}-*"):
        with suppress(OSError, ValueError):
            when, written = path.read_text().split()
            left.append((float(when), int(written)))
    return explaining_code([written for _, written in sorted(left)]) or code


def remove_exit_codes(job_dir: Path, task: int | None = None) -> None:
    """Remove the exit codes of earlier starts before a new start; other blocks' files stay."""
    own = "*" if task is None else f"block{task}-*"
    for path in [*job_dir.glob(f".exit-{own}"), *job_dir.glob(f".new-exit-{own}")]:
        path.unlink(missing_ok=True)


def error_file(job_dir: Path, env: Mapping[str, str]) -> Path:
    """Path of the file with the error of the rank whose script failed first in this start. Other ranks then need not
    show the same error."""
    block = own_block(env)
    start = _start(number(env, "SLURM_RESTART_COUNT") or 0, block.task if block else None)
    return job_dir / f".exit-{start}-error-{env.get('ONES_ATTEMPT') or 0}-{env.get('ONES_FORK') or 0}"
