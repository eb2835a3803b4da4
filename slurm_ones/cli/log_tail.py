"""The last lines of a job's log, as far as this process may read it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from slurm_ones.config import Settings
from slurm_ones.report.text import plain
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.connect import connect
from slurm_ones.slurm.model import Job
from slurm_ones.untrusted_files import NotBelieved, read_from

ASK_AGAIN_S = 60.0
"""Seconds for which Slurm's answer holds."""
READ = 1 << 16
"""Bytes at the end of a log that are looked at."""
WIDTH = 500


class Logs:
    """Logs of jobs, whose places are asked of Slurm once a minute at most, however often they are looked at."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._found: dict[int, tuple[float, Job | str | None]] = {}

    def tail(self, job_id: int, most: int) -> list[str]:
        """At most so many of the log's last lines, without control characters; where there is none to show, one line
        that says why."""
        now = self._clock()
        self._found = {id_: found for id_, found in self._found.items() if now - found[0] < ASK_AGAIN_S}
        if job_id not in self._found:
            self._found[job_id] = now, self._ask(job_id)
        found = self._found[job_id][1]
        return [found] if isinstance(found, str) else _tail(found, job_id, most)

    def _ask(self, job_id: int) -> Job | str | None:
        """The job, or why it cannot be had."""
        try:
            return connect(self._settings).details([job_id]).get(job_id)
        except SlurmError as error:
            return f"Slurm cannot be asked where the log of job {job_id} is: {plain(str(error))}"


def _tail(job: Job | None, job_id: int, most: int) -> list[str]:
    if job is None or not job.stdout:
        return [f"Slurm no longer knows where the log of job {job_id} is"]
    if os.geteuid() not in (0, job.uid):
        return [f"the log of job {job_id} is {plain(job.user, 40)}'s, and not yours to see"]
    try:
        _, size = read_from(None, job.stdout, job.uid, 0, 0)
        text, _ = read_from(None, job.stdout, job.uid, max(size - READ, 0), READ)
    except FileNotFoundError:
        return [f"{plain(job.stdout)}: no such file here; it may lie on another machine"]
    except NotBelieved as error:
        return [plain(str(error))]
    # The first may have been cut, and a progress bar writes over its own line.
    found = text.decode("utf-8", "replace").rstrip("\n").split("\n")[1 if size > READ else 0 :]
    shown = [plain(line.rstrip("\r").rsplit("\r", 1)[-1], WIDTH) for line in found]
    return shown[-most:] if size else [f"{plain(job.stdout)} is empty"]
