"""Watch on the shell of the batch script. Slurm's warning signal kills it, unless the script starts `ones-run` by
`exec`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ones_wrapper.launch.slurm import run_slurm

DIES = (
    "ones-run was called without exec, so --signal=B:USR2 kills the batch shell, and Slurm then ends the job: write "
    "`exec ones-run …`, outside of pipes and loops. Until then the job is requeued once its shell is gone, if Slurm "
    "leaves the time for it"
)
_NAME = "slurm_script"
"""Name that Slurm gives to a batch script, and so to the process that runs it."""


class BatchShell:
    """The shell that runs this job's batch script, if SIGUSR2 would kill it; otherwise no process."""

    def __init__(self, process: int | None = None, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.pid = self._find(os.getppid() if process is None else process)

    def _find(self, pid: int) -> int:
        while pid > 1 and (status := status_of(pid, self._proc)):
            if status.get("Name") == _NAME:
                handled = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)
                return 0 if handled >> (signal.SIGUSR2 - 1) & 1 else pid
            pid = int(status["PPid"])
        return 0

    @property
    def died(self) -> bool:
        """True once the shell has ended; then Slurm ends the job."""
        if not self.pid:
            return False
        status = status_of(self.pid, self._proc)
        return status.get("Name") != _NAME or status["State"].startswith(("Z", "X"))


def status_of(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """Return the fields of `/proc/PID/status` by name; empty if the process is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def killed_by_warning(job_id: int) -> bool:
    """Return True if Slurm's record says that SIGUSR2 killed the job's batch shell."""
    answer, _ = run_slurm(["scontrol", "show", "job", str(job_id)])
    return f" ExitCode=0:{signal.SIGUSR2.value}" in answer
