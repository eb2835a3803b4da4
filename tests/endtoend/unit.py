"""What systemd does for the unit, as far as one can without it: start its command, listen to it, and signal it."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import paths
from tests.endtoend.harness import WAIT_S, Harness
from tests.waiting import until

UNIT = paths.REPOSITORY / "slurm_ones/service/units/slurm-ones.service"
WATCHDOG_S = 8.0
# As NoNewPrivileges, UMask and MemoryDenyWriteExecute (PR_SET_MDWE, since Linux 6.3; older ones refuse it) would be.
CONFINED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
libc.prctl(65, 1, 0, 0, 0)
os.umask(0o077)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def arguments(settings: str) -> list[str]:
    """The unit's ExecStart, with these settings."""
    found = re.search(r"^ExecStart=(\S+) (.*)$", UNIT.read_text(), flags=re.MULTILINE)
    assert found is not None and Path(found[1]).name == "slurm-ones"
    return ["slurm-ones", *found[2].replace("/etc/slurm-ones/config.toml", settings).split()]


class Unit:
    """The unit's command under a service manager of ours, as an unprivileged user of the cluster."""

    def __init__(self, harness: Harness, settings: str, user: str, **env: str) -> None:
        self.harness, self.settings, self.user, self.env = harness, settings, user, env
        self.folder = harness.cluster.scratch / Path(settings).parent.name
        path = self.folder / "notify"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        path.chmod(0o777)
        self.words: list[tuple[float, str]] = []
        """All that was heard, each with when (monotonic)."""
        self.process: subprocess.Popen[Any] | None = None

    def start(self, *options: str) -> subprocess.Popen[Any]:
        """Start it, and wait until it is ready."""
        env = {"NOTIFY_SOCKET": f"/scratch/{self.folder.name}/notify", "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}
        command = [self.harness.cluster.python, "-c", CONFINED, *arguments(self.settings), *options]
        heard = len(self.words)
        with (self.folder / "companion.log").open("a") as log:
            self.process = self.harness.cluster.popen(
                command, user=self.user, env=env | self.env, stdout=log, stderr=subprocess.STDOUT
            )
        self.harness.kill_at_end(self.process)
        self.until(lambda: any("READY=1" in word for _, word in self.heard()[heard:]), "READY=1")
        return self.process

    def heard(self) -> list[tuple[float, str]]:
        while True:
            try:
                self.words.append((time.monotonic(), self._socket.recv(8192).decode()))
            except BlockingIOError:
                return self.words

    def count(self, word: str) -> int:
        """How often it was said."""
        return sum(word in said for _, said in self.heard())

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:

        def missing() -> str:
            alive = self.process is None or self.process.poll() is None
            return f"{what} (runs: {alive}): {self.log()}"

        until(holds, missing, timeout_s, 0.1)

    def log(self) -> str:
        return (self.folder / "companion.log").read_text()

    def close(self) -> None:
        self._socket.close()
