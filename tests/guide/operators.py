"""Operators at the site: their jobs, which are resized as they come and go."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ones_db import ResizeRecord, Store, StoreError
from ones_wrapper.protocol import directory_name
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.slurm.parse import parse_jobs
from tests.endtoend.fault_site import ELASTIC, JobExpectation
from tests.endtoend.harness import Harness
from tests.guide.host import Host
from tests.guide.install import SPOOL
from tests.guide.place import Place

STOP_FILE = "/etc/slurm-ones/stop"
CROWD = 6
"""GPUs that rigid jobs take and leave."""
RESIZE_S = 60.0
END_S = 120.0


class NotSeen(Exception):
    """What the guide says was not to be seen, or not in time."""


class Operators:
    """Whose jobs there are. `check` (tests/endtoend) reads it as it does a `FaultSite`."""

    def __init__(self, place: Place) -> None:
        self.place, self.cluster, self.harness = place, place.cluster, Harness(place.cluster)
        self.expected: dict[int, JobExpectation] = {}
        self.installed: list[Host] = []
        """Hosts that have the service."""
        self.lost: list[Host] = []
        """Hosts that had it, and are gone."""
        self.since = self.repaired_at = time.time()
        """When the latest thing was broken: what was before is not looked at; and when it was mended."""
        self._crowd: int | None = None

    # -- jobs ----------------------------------------------------------------------------------------------------

    def populate(self) -> None:
        """Four elastic jobs that train, and two that are nobody's to touch."""
        if not self.expected:
            rigid = self._rigid("--nodelist=n1", "--gres=gpu:1")
            stranger = self._light("--comment=gpus=1-16, but not for ones", "--nodelist=n1")
            for job_id, expected in (
                (rigid, JobExpectation("rigid", "bob")),
                (stranger, JobExpectation("stranger", "alice")),
            ):
                expected.first = self.harness.wait(job_id, lambda job: job.running, "running")
                self.expected[job_id] = expected
        while len(self.elastic()) < 4:
            self.expected[self._light(f"--comment={ELASTIC}")] = JobExpectation("elastic", "alice")

    def on_small_disk(self) -> int:
        """One more elastic job, whose directory lies on a disk that is soon full."""
        self.cluster.box.run(["install", "-d", "-o", "alice", "/full/alice"])
        job_id = self._light(f"--comment={ELASTIC}", "--chdir=/full/alice", "--output=/dev/null")
        self.expected[job_id] = JobExpectation("elastic", "alice", full=True)
        return job_id

    def _light(self, *options: str) -> int:
        env = {"LIGHT_AGAIN": "1", "LIGHT_STEP_S": "0.2", "ONES_SPOOL": SPOOL}
        return self.harness.light(*options, "--time=1-0", **env)

    def _rigid(self, *options: str) -> int:
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--time=1-0", "--wrap", "exec sleep 86400"]
        return int(self.cluster.run(command, user="bob").stdout)

    def elastic(self) -> dict[int, JobExpectation]:
        return {
            id_: expected for id_, expected in self.expected.items() if expected.role == "elastic" and not expected.done
        }

    def jobs(self) -> dict[int, SlurmJob]:
        command = ["squeue", "--json", "--states=all"]
        return parse_jobs(json.loads(self.cluster.run(command, user="root", timeout=30).stdout))

    def directory(self, job_id: int) -> Path:
        """This machine's name of a job's directory."""
        expected = self.expected[job_id]
        home = self.place.disk("/full") / "alice" if expected.full else self.cluster.home(expected.user)
        return home / directory_name(job_id)

    def store(self) -> Store:
        """What the companion remembers, as the database's administrator."""
        url = f"postgresql://postgres@/ones?host={self.place.folder / 'sockets'}"
        return Store.open(url, self.cluster.name, read_only=True)

    # -- resizes -------------------------------------------------------------------------------------------------

    def cause_resize(self, states: Collection[str] = ()) -> ResizeRecord:
        """Have people come and go until a resize is under way, in one of these states where some are given."""
        self.set_quiet(False)
        deadline = time.monotonic() + RESIZE_S * 2
        with self.store() as store:
            while time.monotonic() < deadline:
                self._come_or_go()
                until = time.monotonic() + RESIZE_S / 4
                while time.monotonic() < until:
                    for resize in store.open_resizes():
                        if not states or resize.state in states:
                            return resize
                    time.sleep(0.02)
        raise NotSeen(f"no resize {'in ' + '/'.join(states) if states else 'at all'} within {RESIZE_S * 2:.0f} s")

    def wait_failed_resize(self, words: str, job_id: int | None = None) -> ResizeRecord:
        """Have people come and go until a resize that was begun since the latest break (of that job) ended with these
        words."""
        self.set_quiet(False)
        deadline, moved = time.monotonic() + RESIZE_S * 3, float("-inf")
        with self.store() as store:
            while time.monotonic() < deadline:
                if time.monotonic() - moved > RESIZE_S / 4:
                    self._come_or_go()
                    moved = time.monotonic()
                for resize in store.resizes():
                    if resize.started > self.since and words in str(resize.outcome) and job_id in (None, resize.job_id):
                        return resize
                time.sleep(0.5)
        raise NotSeen(f"no resize ended with {words!r}")

    def ended(self, resize: ResizeRecord) -> ResizeRecord:
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            with suppress(StoreError), self.store() as store:
                for now in store.resizes(resize.job_id):
                    if now.id == resize.id and now.ended is not None:
                        return now
            time.sleep(0.2)
        raise NotSeen(f"resize {resize.id} of job {resize.job_id} has not ended")

    def _come_or_go(self) -> None:
        if self._crowd is None:
            self._crowd = self._rigid("--gres=gpu:1", f"--array=1-{CROWD}")
        else:
            self.scontrol("scancel", str(self._crowd), user="bob")
            self._crowd = None

    def set_quiet(self, on: bool) -> None:
        """By the guide's stop file: nothing is begun while it is there."""
        for host in self.installed:
            if host.alive:
                host.sh(f"touch {STOP_FILE}" if on else f"rm -f {STOP_FILE}")

    def scontrol(self, *arguments: str, user: str = "alice") -> bool:
        """What a person types; whether Slurm took it."""
        with suppress(subprocess.TimeoutExpired):
            return self.cluster.run([*arguments], user=user, check=False, timeout=30).returncode == 0
        return False
