"""A demo from start to end: its processes, the messages about its jobs, and its cleanup."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from ones_db import JobSummary, Store, migrate
from slurm_ones.demo.jobs import CLUSTER, SIMULATED, DemoJob, write_settings
from slurm_ones.demo.local_slurm import LocalSlurm, Processes, Submitted, clean_environment
from slurm_ones.demo.remote import Served
from slurm_ones.show.columns import gpus
from slurm_ones.slurm.client import Refused
from slurm_ones.text import plain, seconds

LOOK_S = 0.1
"""Seconds between two checks of processes and simulated jobs."""
DATABASE_S = 1.0
"""Seconds between two reads of the job database."""
SETTLE_S = 20.0
"""Longest time, in seconds, to wait until the companion notices the last job's end."""
LONGEST_S = 240.0
"""Seconds after which a demo is ended."""
START_S = 30.0
"""Longest time, in seconds, to wait for the page's first answer."""
UNFIT = frozenset('?#%"\\')

Say = Callable[[float, str], None]


class DemoFailed(Refused):
    """Error that ends the demo; its message says why."""


def torch_version() -> str:
    """Return the version of the installed torch; empty if there is none."""
    with suppress(PackageNotFoundError):
        return version("torch") if find_spec("torch") else ""
    return "of an unknown version"


def prepare(folder: Path) -> None:
    """Create the demo's folder. Raises `DemoFailed` if it exists with files in it."""
    if not UNFIT.isdisjoint(str(folder)) or not str(folder).isprintable():
        raise DemoFailed(f"{folder!s:.200}: a database's address cannot have ? # % \" \\ in it; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DemoFailed(f"{folder} is not empty: name a folder that is new or empty with --directory")
        folder.chmod(0o700)
    except OSError as error:
        raise DemoFailed(f"{folder}: cannot be used ({error.strerror}); name another with --directory") from None


def address_in(log: str) -> str:
    """Return the live page's URL from the log of `slurm-ones web`; empty if it is not printed yet."""
    found = re.search(r"^The live page: (\S+)\n", log, flags=re.MULTILINE)
    return found[1] if found else ""


def page_file(folder: Path, address: str) -> Path:
    """Write a file that redirects a browser to the address, and return its path.

    The address contains a token. All users could read it on a command line; only the owner can read this file.
    """
    path = folder / "page.html"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        to = escape(address)
        file.write('<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">')
        file.write(f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">The live page</a>\n')
    return path


SIMULATED_EVERY_S = 10.0
"""Seconds between two lines about the simulated jobs."""


class DemoProgress:
    """Reader of the job database, which reports each change in a line."""

    def __init__(self, say: Callable[[float, str], None], began: float) -> None:
        self._say, self._began = say, began
        self._reported: dict[int, int] = {}
        """Number of each training's memberships that are already reported, by job id."""
        self._ended: set[int] = set()
        self.states: dict[int, str] = {}
        """State of each job when it was last read, by job id."""
        self._next = SIMULATED_EVERY_S
        self.grown = False
        """True once a training has grown without a restart."""

    def look(self, store: Store, submitted: Sequence[Submitted], now: float) -> list[JobSummary]:
        """Report the changes since the last call; return all jobs that the companion knows. `now` is Unix seconds."""
        jobs = store.job_summaries()
        by_id = {job.job_id: job for job in jobs}
        self.states = {job.job_id: job.state for job in jobs}
        for one in submitted:
            if one.job_id in by_id:
                self._changes(store, by_id[one.job_id])
        simulated = [job for job in jobs if job.user == SIMULATED]
        if any(job.end_time is None for job in simulated) and now - self._began >= self._next:
            self._next = now - self._began + SIMULATED_EVERY_S
            running = [f"{plain(job.name, 40)} on {gpus(job)}" for job in simulated if job.running]
            waiting = sum(not job.running and job.end_time is None for job in simulated)
            ended = sum(job.end_time is not None for job in simulated)
            self._say(now, f"simulated jobs: {'; '.join([*running, f'{waiting} wait, {ended} have ended'])}")
        return jobs

    def _changes(self, store: Store, job: JobSummary) -> None:
        name = plain(job.name, 40)
        found = [record for record in reversed(store.memberships(job.job_id)) if record.report.world]
        sizes = [0, *(record.report.world for record in found)]
        changes = list(zip(found, sizes, sizes[1:], strict=False))
        for record, before, now in changes[self._reported.get(job.job_id, 0) :]:
            if not before:
                self._say(record.time, f"{name} trains on {now} GPU{'s' * (now > 1)}")
            elif now != before:
                self.grown = self.grown or now > before
                size = f"{'grew' if now > before else 'shrank'} from {before} to {now} GPU{'s' * (now != 1)}"
                self._say(record.time, f"{name} {size} while it trained; a pause of {record.report.pause_s:.2f} s")
        self._reported[job.job_id] = len(found)
        if job.end_time is not None and job.job_id not in self._ended:
            self._ended.add(job.job_id)
            after = f"{seconds(job.jct_s)} after its submission"
            accuracy = f", accuracy {job.accuracy:.3f}" if job.accuracy is not None else ""
            self._say(job.end_time, f"{name} has ended: {job.state} {after}{accuracy}")


def samples_line(one: Submitted, folder: Path) -> tuple[bool, str]:
    """Read the ranks' trace files. Return whether each sample was used once in each epoch, and a sentence about it."""
    used: Counter[tuple[int, int]] = Counter()
    for path in sorted((folder / f"ones-{one.job_id}").glob("trace-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            used.update((line["epoch"], sample) for sample in line.get("samples", ()))
    known = set(product(range(one.job.epochs), range(one.job.samples)))
    missing, others = len(known - used.keys()), sum(count > 1 or key not in known for key, count in used.items())
    if not missing and not others:
        each = f"each of {one.job.samples} samples was used once in each of {one.job.epochs} epochs"
        return True, f"{one.job.name}: {each}"
    return False, (
        f"{one.job.name}: of {len(known)} samples over all epochs {missing} were not used, and {others} more than "
        "once; after a crash a training begins again at its last checkpoint"
    )


class Demo(AbstractContextManager["Demo"]):
    """Context in which a demo runs. After it, only the demo's folder is left."""

    def __init__(self, folder: Path, jobs: Sequence[DemoJob], simulated: int, say: Say) -> None:
        """Prepare a demo with these real and `simulated` simulated jobs. `say` is called with a Unix time and a
        line."""
        self.folder, self._say = folder, say
        self.url = f"sqlite:///{folder / 'ones.sqlite'}"
        self.settings = write_settings(folder, self.url)
        migrate.upgrade(self.url)
        self.processes = Processes()
        try:
            self.slurm = LocalSlurm(folder, self.processes, jobs, simulated)
            self._served = Served(self.slurm.client, self.slurm.lock)
            self._companion = self._program("run", self._served.env)
        except BaseException:
            self.processes.close()
            raise
        self.progress = DemoProgress(say, self.slurm.world.began)

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C would leave the rest to the reaper.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.processes.close()
            self._served.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def serve_page(self, port: int = 0) -> str:
        """Start the live page, and return its address once it answers. Port 0 means any free port."""
        page = self._program("web", {"SLURM_ONES_WEB_TOKEN": secrets.token_urlsafe(16)}, f"--port={port}")
        until = time.monotonic() + START_S
        while True:
            self._look()
            # It listens before it says where.
            if address := address_in((self.folder / "web.log").read_text(errors="replace")):
                return address
            if self.processes.poll(page) is not None or time.monotonic() > until:
                raise DemoFailed(f"the live page did not start: {self._tail('web.log')}")

    def run(self) -> bool:
        """Run until the companion has noticed that all jobs have ended. Return False at the time limit."""
        began, over_since, database_at = time.monotonic(), 0.0, 0.0
        while time.monotonic() - began < LONGEST_S:
            self._look()
            if time.monotonic() < database_at:
                continue
            database_at = time.monotonic() + DATABASE_S
            # Opened again each time: at first it knows of no cluster.
            with Store.open(self.url, CLUSTER, read_only=True) as store:
                jobs = self.progress.look(store, self.slurm.submitted, time.time())
            self.slurm.grown = self.progress.grown
            if not self.slurm.over:
                continue
            over_since = over_since or time.monotonic()
            if all(job.end_time is not None for job in jobs) or time.monotonic() - over_since > SETTLE_S:
                return True
        return False

    def wait(self, seconds: float) -> None:
        """Keep serving the page for this many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()

    def _look(self) -> None:
        self.slurm.look()
        if self.processes.poll(self._companion) is not None:
            raise DemoFailed(f"the companion has ended: {self._tail('run.log')}")
        time.sleep(LOOK_S)

    def _program(self, name: str, env: dict[str, str], *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "slurm_ones.cli", name, f"--config={self.settings}", *more]
        return self.processes.start(command, clean_environment() | env, self.folder, self.folder / f"{name}.log")

    def _tail(self, name: str) -> str:
        lines = (self.folder / name).read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it printed nothing"
