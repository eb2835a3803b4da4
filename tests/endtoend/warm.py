"""A cluster in whose box commands of ours are forked (`tests.forks`)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, ClusterError, paths
from tests.cluster.box import START_SECONDS, Box
from tests.waiting import until

FORKS = Path(__file__).parents[1] / "forks.py"
SOCKET = "/run/forks"
COMMANDS = frozenset(
    {"run", "jobs", "why", "status", "report", "check", "doctor", "import", "plugin"}
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

    def _door(self, argv: Sequence[str], new_session: bool) -> list[str]:
        if not (new_session and self._warm(argv)):
            return super()._door(argv, new_session)
        self._serve()
        return [str(FORKS), str(self.root) + SOCKET]

    def _warm(self, argv: Sequence[str]) -> bool:
        if argv[0] == "slurm-ones":
            return argv[1] in COMMANDS
        return list(argv[:2]) == [self._python, "-m"] and argv[2] in PROGRAMS

    def _serve(self) -> None:
        if self._server is None:
            command = [self._python, "-m", "tests.forks", "serve", SOCKET]
            self._server = super().popen(command, cwd=paths.REPOSITORY, env=self._environment)
            listens, server = self.root / SOCKET.lstrip("/"), self._server
            until(lambda: listens.exists() or server.poll() is not None, "forks of commands", START_SECONDS)
            if server.poll() is not None:
                raise ClusterError("nobody forks commands here")

    def stop(self) -> None:
        super().stop()
        if self._server is not None:
            self._server.wait()
