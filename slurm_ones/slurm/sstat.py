"""GPU use of running jobs from `sstat`: one call starts the query, the next reads its result.

`sstat` reportedly answers only root, SlurmUser and the jobs' owner (not tested here). Others get no use of such jobs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import IO

from slurm_ones.slurm.model import GpuUse

MOST = 4 << 20
"""Most bytes read of an answer."""
MOST_MEMORY = 1 << 60
"""Largest accepted GPU memory in bytes: more would not fit the database."""
_STEP = re.compile(r"(\d{1,10})\.[^|\n]*\|(.*)", re.ASCII)
_USE = re.compile(r"(?:^|,)gres/gpuutil=(\d{1,9})(?:,|$)", re.ASCII)
_MEMORY = re.compile(r"(?:^|,)gres/gpumem=(\d{1,15})([KMGT]?)", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_gpu_use(text: str) -> dict[int, GpuUse]:
    """Parse GPU use by job from `sstat -nPa --format=JobID,TRESUsageInTot`; steps without it are skipped."""
    found: dict[int, GpuUse] = {}
    for line in text.splitlines():
        step = _STEP.fullmatch(line)
        use = _USE.search(step[2]) if step else None
        if step and use:
            memory = _MEMORY.search(step[2])
            size = int(memory[1]) * _UNITS[memory[2]] if memory else 0
            before = found.get(int(step[1]), GpuUse())
            whole = min(before.memory_bytes + size, MOST_MEMORY)
            found[int(step[1])] = GpuUse(before.gpus + int(use[1]) / 100, whole)
    return found


class Sstat:
    """Runner of `sstat` in the background, one query at a time."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._asked: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    def ask(self, job_ids: Collection[int]) -> dict[int, GpuUse]:
        """Return the previous query's result, if any, and start the next query. An unfinished query is killed."""
        found = self._answer()
        if job_ids:
            command = ["sstat", "-nPa", "--format=JobID,TRESUsageInTot", f"--jobs={','.join(map(str, job_ids))}"]
            output = tempfile.TemporaryFile()  # noqa: SIM115
            try:
                null = subprocess.DEVNULL
                self._asked = subprocess.Popen(command, stdin=null, stdout=output, stderr=null, env=self._env), output
            except OSError:  # there is none, or there are more jobs than an argument holds
                output.close()
        return found

    def _answer(self) -> dict[int, GpuUse]:
        if self._asked is None:
            return {}
        (process, output), self._asked = self._asked, None
        with output:
            if process.poll() is None:
                process.kill()
                # One that hangs in the kernel is not waited for.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                return {}
            output.seek(0)
            return parse_gpu_use(output.read(MOST).decode("utf-8", "replace"))
