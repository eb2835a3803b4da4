"""A cluster in whose box commands of ours are forked (`tests.endtoend.forks`)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, ClusterError, paths
from tests.cluster.box import START_SECONDS, Box

FORKS = Path(__file__).with_name("forks.py")
SOCKET = "/run/forks"
COMMANDS = frozenset(
    {"run", "jobs", "why", "status", "report", "check", "doctor", "import"}
    | {"resize", "pin", "release", "estimate", "rehearse"}
)
"""Of `slurm-ones`; named by its path, it is the real program."""
PROGRAMS = frozenset({"tests.endtoend.scripted", "tests.endtoend.killed"})
"""As `python -m`."""


class WarmBox(Box):
    """A running box; its first command of ours starts the process that the others are forks of."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.box.folder)
        self._keeper = cluster.box._keeper
        self._python, self._environment = cluster.python, cluster._environment("root")
        self._server: subprocess.Popen[Any] | None = None

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        new_session: bool = True,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        if not (new_session and self._warm(argv)):
            return super().popen(argv, user=user, cwd=cwd, env=env, new_session=new_session, **options)
        self._serve()
        uid, gid, home = self._account(user)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(FORKS), str(self.root) + SOCKET, uid, gid, str(cwd or home), "--", *argv],
            env={"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", **(env or {})},
            cwd="/",
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, "text": True, **options},
        )

    def _warm(self, argv: Sequence[str]) -> bool:
        if argv[0] == "slurm-ones":
            return argv[1] in COMMANDS
        return list(argv[:2]) == [self._python, "-m"] and argv[2] in PROGRAMS

    def _serve(self) -> None:
        if self._server is None:
            command = [self._python, "-m", "tests.endtoend.forks", "serve", SOCKET]
            self._server = super().popen(command, cwd=paths.REPOSITORY, env=self._environment)
            deadline = time.monotonic() + START_SECONDS
            while not (self.root / SOCKET.lstrip("/")).exists():
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise ClusterError("nobody forks commands here")
                time.sleep(0.01)

    def stop(self) -> None:
        super().stop()
        if self._server is not None:
            self._server.wait()
