"""Last lines of jobs' logs, for readers who may see these logs."""

from __future__ import annotations

import os
import re
import time

from ones_wrapper.protocol import MAX_TEXT, RUN_URL, directory_name
from slurm_ones.config import Settings
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.connect import connect
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.text import plain
from slurm_ones.untrusted_files import NotBelieved, read_from

ASK_AGAIN_S = 60.0
"""Seconds for which Slurm's answer about a job is used."""
READ = 1 << 16
"""Number of bytes that are read at the end of a log."""
WIDTH = 500
ADDRESS = re.compile(r"https?://[!-~]+")


class Logs:
    """Reader of jobs' logs. It asks Slurm for the path of a log at most once a minute."""

    def __init__(self, settings: Settings, *, own_only: bool = False) -> None:
        """Show logs of jobs of this process's user; if the user is root and not `own_only`, logs of all jobs."""
        self._settings, self._own_only = settings, own_only
        self._found: dict[int, tuple[float, SlurmJob | str]] = {}

    def tail(self, job_id: int, most: int, work_dir: str = "") -> list[str]:
        """Return the last `most` lines of a job's log without control characters, or a line that says why not.

        If Slurm does not answer, look in `work_dir` for a log with Slurm's default name.
        """
        now = time.monotonic()
        self._found = {id_: found for id_, found in self._found.items() if now - found[0] < ASK_AGAIN_S}
        if job_id not in self._found:
            self._found[job_id] = now, self._ask(job_id)
        found = self._found[job_id][1]
        if isinstance(found, SlurmJob):
            if os.geteuid() != found.uid and (self._own_only or os.geteuid()):
                return [f"the log of job {job_id} is {plain(found.user, 40)}'s, and not yours to see"]
            return _lines(found.stdout, found.uid, most)
        for name in (f"slurm-{job_id}.out", f"slurm-{job_id}_0.out"):
            # The directory may be closed to this process.
            if work_dir and os.access(path := f"{work_dir}/{name}", os.F_OK):
                return _lines(path, os.geteuid(), most)
        return [found]

    def address(self, job_id: int, work_dir: str) -> str:
        """Return the URL of the job's run in W&B or MLflow; empty if unknown, or if another user owns the job."""
        try:
            text, _ = read_from(None, f"{work_dir}/{directory_name(job_id)}/{RUN_URL}", os.geteuid(), 0, MAX_TEXT)
        except (FileNotFoundError, NotBelieved):
            return ""
        found = text.decode("utf-8", "replace").strip()
        return found if ADDRESS.fullmatch(found) else ""

    def _ask(self, job_id: int) -> SlurmJob | str:
        """Return the job with the path of its log, or a line that says why there is none."""
        try:
            job = connect(self._settings).details([job_id]).get(job_id)
        except SlurmError as error:
            return f"Slurm cannot be asked where the log of job {job_id} is: {plain(str(error))}"
        return job if job and job.stdout else f"Slurm no longer knows where the log of job {job_id} is"


def _lines(path: str, uid: int, most: int) -> list[str]:
    try:
        _, size = read_from(None, path, uid, 0, 0)
        text, _ = read_from(None, path, uid, max(size - READ, 0), READ)
    except FileNotFoundError:
        return [f"{plain(path)}: no such file here; it may lie on another machine"]
    except NotBelieved as error:
        return [plain(str(error))]
    # The first may have been cut, and a progress bar writes over its own line.
    found = text.decode("utf-8", "replace").rstrip("\n").split("\n")[1 if size > READ else 0 :]
    shown = [plain(line.rstrip("\r").rsplit("\r", 1)[-1], WIDTH) for line in found]
    return shown[-most:] if size else [f"{plain(path)} is empty"]
