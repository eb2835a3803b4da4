"""Files in the job's directory for `ones-run` and node launchers: checkpoints, reports and exit codes."""

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
from ones_wrapper.protocol import CHECKPOINTS, MANIFEST, Bye, Checkpoint, Hello, Membership, reports_name

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
    """Return the path of the newest complete checkpoint; None if there is none."""
    return next(iter(checkpoints(job_dir)), None)


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run's reports so far."""

    checkpoints: frozenset[str]
    """Names of the checkpoints that the run loaded or made."""
    drained: bool
    """True if a drain ended the run; the companion then requeues the job."""
    tasks: tuple[int, ...] = ()
    """Tasks of the last reported membership, in a job of blocks."""
    ended: bool = False
    """True if training finished, or was stopped by the owner or the script."""


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
    """Return the number of the newest run, at most `most`, that has reports; `most` if there is none."""
    try:
        names = [found for entry in job_dir.iterdir() if (found := _REPORTS.fullmatch(entry.name))]
    except OSError:
        return most
    return max((number for name in names if (number := int(name[1])) <= most), default=most)


class ExitCodes:
    """Files with the exit codes of the node launchers in one start (with MPI: of the ranks), for `ones-run`.

    They preserve the script's own code. `srun` returns the highest code of all tasks, and 137 for tasks that it kills
    after another has failed; other launchers have other rules.
    """

    def __init__(self, job_dir: Path, restart: int, task: int | None = None) -> None:
        """`task` is the array task of a block, since all blocks share a directory; None in a plain job."""
        self._job_dir, self._own = job_dir, "" if task is None else f"block{task}-"
        self._start = f".exit-{self._own}{restart}-"

    @classmethod
    def of(cls, env: Mapping[str, str]) -> ExitCodes:
        """Return the exit codes of the start to which this process belongs."""
        block = own_block(env)
        return cls(Path(env["ONES_JOB_DIR"]), number(env, "SLURM_RESTART_COUNT") or 0, block.task if block else None)

    def write(self, who: int, code: int) -> bool:
        """Write the exit code of a node launcher or rank. Return False if the file could not be written; `ones-run`
        then uses the launcher's own code."""
        try:
            replace_small(self._job_dir / f"{self._start}{who}", f"{time.time():.6f} {code}".encode(), sync=False)
        except OSError:
            return False
        return True

    def written(self, who: int) -> bool:
        """Return True if this node launcher or rank has written its code."""
        return (self._job_dir / f"{self._start}{who}").is_file()

    def explaining(self) -> int:
        """Return the exit code that caused the others (`explaining_code`); 0 if there are no files."""
        left = []
        for path in self._job_dir.glob(f"{self._start}*"):
            with suppress(OSError, ValueError):
                when, written = path.read_text().split()
                left.append((float(when), int(written)))
        return explaining_code([written for _, written in sorted(left)])

    def remove(self) -> None:
        """Remove the exit codes of this block's earlier starts."""
        for kind in (".exit-", ".new-exit-"):
            for path in [*self._job_dir.glob(f"{kind}{self._own}*")]:
                path.unlink(missing_ok=True)

    def error_file(self, env: Mapping[str, str]) -> Path:
        """Return the path of the file with the error of the rank that failed first."""
        return self._job_dir / f"{self._start}error-{env.get('ONES_ATTEMPT') or 0}-{env.get('ONES_FORK') or 0}"
