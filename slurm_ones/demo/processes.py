"""The processes that a demo starts: each in a group of its own, and none that outlives the demo, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurm_ones.demo import reaper
from slurm_ones.slurm.model import Task

SHIMS = ("scontrol", "squeue", "srun")
"""Commands of Slurm that fail here, so that no job of a demo reaches a real Slurm of this machine by its number."""
FAILS = '#!/bin/sh\necho "this is slurm-ones demo: there is no Slurm here" >&2\nexit 1\n'
ASKED = "cancelled"
CANCEL = f"""#!/bin/sh
for last; do :; done
echo "$last" >> "$(dirname "$0")/{ASKED}"
"""
"""Script in place of `scancel --state=PENDING ARRAY`, the only cancellation that a job makes: it notes the array."""

ANNOUNCE = 'echo "+$$"; exec "$@" >&2'
"""A process names its group to the reaper, whose pipe is its output at first, and becomes the command: so none is
unknown where a demo is killed as it starts one."""


class Processes:
    """All processes of a demo; a context, at whose end they end."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", reaper.__file__]
        quiet = subprocess.DEVNULL
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._starter = ThreadPoolExecutor(1, "demo-starter")
        """Ctrl-C interrupts only the main thread, and so no start before its process is known here."""
        # Its thread is there from now on: one that Ctrl-C met as it began would not be waited for.
        self._starter.submit(os.getpid).result()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start one in `folder`, away from the terminal's Ctrl-C; what it prints is added to `log`.

        Raises RuntimeError once these processes end.
        """
        return self._starter.submit(self._start, command, env, folder, log).result()

    def _start(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["sh", "-c", ANNOUNCE, "sh", *command], env=env, cwd=folder, stdin=subprocess.DEVNULL,
                stdout=self._reaper.stdin, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._running[process.pid] = process
        return process

    def poll(self, process: subprocess.Popen[bytes]) -> int | None:
        """Its exit code, 128+n after signal n; None while it runs."""
        code = process.poll()
        if code is None:
            return None
        if self._running.pop(process.pid, None) is not None:
            self._forget(process.pid)
        return 128 - code if code < 0 else code

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """End these; returns once they are gone."""
        for process in processes:
            if self.poll(process) is None:
                reaper.signal_group(process.pid, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(reaper.GRACE_S)
            if self.poll(process) is None:
                reaper.signal_group(process.pid, signal.SIGKILL)
                process.wait()
                self.poll(process)

    def close(self) -> None:
        """End all that run, and the reaper."""
        self._starter.shutdown()
        self.end(*self._running.values())
        if self._reaper.stdin is not None:
            with suppress(OSError):
                self._reaper.stdin.close()
        self._reaper.wait()

    def _forget(self, pid: int) -> None:
        if self._reaper.stdin is not None:
            with suppress(OSError):
                self._reaper.stdin.write(f"-{pid}\n".encode())
                self._reaper.stdin.flush()


def clean_environment() -> dict[str, str]:
    """This process's environment without what is of a job that it may itself be in."""
    stale = ("SLURM_", "ONES_", "SBATCH_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(stale)}


def make_shims(folder: Path) -> str:
    """A PATH on which Slurm's commands are ours, kept in `folder`."""
    folder.mkdir()
    for name, text in {**dict.fromkeys(SHIMS, FAILS), "scancel": CANCEL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def cancelled(folder: Path) -> list[int]:
    """The arrays whose waiting tasks were cancelled by a command of `make_shims`, each time once."""
    asked = folder / ASKED
    if not asked.exists():
        return []
    taken = asked.rename(folder / f"{ASKED}-taken")
    return [int(line) for line in taken.read_text().split() if line.isdigit()]


@dataclass
class ProcessProgram:
    """One task of a job of blocks whose starts are an `ones-run` here: `simulated_job.Program`."""

    task: Task
    command: Callable[[int], Sequence[str]]
    """Command of `ones-run` for a number of ranks."""
    env: Mapping[str, str]
    folder: Path
    """Directory that the job was submitted from; its output goes there, as Slurm names it."""
    processes: Processes
    batch: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        """See `Program`."""
        array, task = self.task.array, self.task.task
        slurm = {
            "SLURM_ARRAY_JOB_ID": str(array),
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_ARRAY_TASK_MIN": "0",
            "SLURM_JOB_ID": str(array + task),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_RESTART_COUNT": str(restart),
        }
        log = self.folder / f"slurm-{array}_{task}.out"
        command = self.command(sum(gpus.values()))
        self._process = self.processes.start(command, {**self.env, **slurm}, self.folder, log)

    def stop(self, *, killed: bool = False) -> float:
        """See `Program`. Returns once the processes are gone."""
        process, self._process = self._process, None
        if process is not None and killed:
            reaper.signal_group(process.pid, signal.SIGKILL)
        if process is not None:
            self.processes.end(process)
        return 0.0

    def ended(self) -> int | None:
        """Exit code of a start that ended by itself, once; None otherwise."""
        code = self.processes.poll(self._process) if self._process is not None else None
        if code is not None:
            self._process = None
        return code
