"""Processes of a demo, each in its own process group; none outlives the demo, however it ends."""

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
"""Commands of Slurm replaced by failing scripts, so that no demo job id reaches a real Slurm."""
FAILS = '#!/bin/sh\necho "this is slurm-ones demo: there is no Slurm here" >&2\nexit 1\n'
ASKED = "cancelled"
CANCEL = f"""#!/bin/sh
for last; do :; done
echo "$last" >> "$(dirname "$0")/{ASKED}"
"""
"""Script in place of `scancel --state=PENDING ARRAY`, the only cancellation by a job: it records the array's id."""

ANNOUNCE = 'echo "+$$"; exec "$@" >&2'
"""Shell script that reports its process group to the reaper through stdout, then execs the command. So the reaper knows
every process, even if the demo is killed while it starts one."""


class Processes:
    """Context manager of a demo's processes; at its end it ends them all."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", reaper.__file__]
        quiet = subprocess.DEVNULL
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._starter = ThreadPoolExecutor(1, "demo-starter")
        """Thread that starts processes: Ctrl-C interrupts only the main thread, so no start is cut off before its
        process is registered."""
        # Its thread is there from now on: one that Ctrl-C met as it began would not be waited for.
        self._starter.submit(os.getpid).result()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a process in `folder`, shielded from the terminal's Ctrl-C; its output is appended to `log`.

        Raises RuntimeError after `close`.
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
        """Return the process's exit code (128+n after signal n); None while it runs."""
        code = process.poll()
        if code is None:
            return None
        if self._running.pop(process.pid, None) is not None:
            self._forget(process.pid)
        return 128 - code if code < 0 else code

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """End these processes, and return once they are gone."""
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
        """End all running processes and the reaper."""
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
    """This process's environment without variables of a surrounding job."""
    stale = ("SLURM_", "ONES_", "SBATCH_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(stale)}


def make_shims(folder: Path) -> str:
    """Write the scripts that replace Slurm's commands into `folder`, and return a PATH that begins with it."""
    folder.mkdir()
    for name, text in {**dict.fromkeys(SHIMS, FAILS), "scancel": CANCEL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def cancelled(folder: Path) -> list[int]:
    """Ids of arrays whose pending tasks were cancelled by the `scancel` of `make_shims`; each is returned once."""
    asked = folder / ASKED
    if not asked.exists():
        return []
    taken = asked.rename(folder / f"{ASKED}-taken")
    return [int(line) for line in taken.read_text().split() if line.isdigit()]


@dataclass
class ProcessProgram:
    """A simulated job's block (`simulated_job.Program`) that runs `ones-run` on this machine at each start."""

    task: Task
    command: Callable[[int], Sequence[str]]
    """Returns the `ones-run` command for a number of ranks."""
    env: Mapping[str, str]
    folder: Path
    """Directory of the job's submission; output files are written there under Slurm's names."""
    processes: Processes
    batch: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
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
        """Exit code of a start that ended by itself, returned once; None otherwise."""
        code = self.processes.poll(self._process) if self._process is not None else None
        if code is not None:
            self._process = None
        return code
