"""Clients that run inside a cluster, used from outside as if they were here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from ones_db.shape import Shape
from slurm_ones.slurm import client as door
from slurm_ones.slurm.model import Task
from tests.cluster import Cluster, paths

ERRORS = {
    name: error
    for name, error in vars(door).items()
    if isinstance(error, type) and issubclass(error, door.SlurmError) and error is not door.SlurmError
}
RESULTS = {
    name: TypeAdapter(get_type_hints(method)["return"])
    for name, method in vars(door.SlurmClient).items()
    if callable(method) and not name.startswith("_")
}
"""Types of what the protocol's methods return."""


class ProbeFailed(AssertionError):
    """The client raised what the protocol does not know."""


class Remote:
    """A `SlurmClient` whose calls are made inside the cluster, as one user, by one long-lived process."""

    def __init__(self, cluster: Cluster, name: str, user: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.user = user
        self.environment: dict[str, str] = {}
        """Changes to the environment of the next calls, each then made by a client of its own."""
        self.partial = False
        """Whether updates of a shape are taken only in part."""
        self._process = cluster.popen(
            [cluster.python, "-m", "tests.slurm.probe", name],
            user=user,
            cwd=paths.REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        self._process.communicate()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the protocol."""
        if name not in RESULTS:
            raise AttributeError(name)
        return lambda *arguments, **options: RESULTS[name].validate_python(self._call(name, *arguments, **options))

    def tell(self, *argv: str) -> str:
        """What a command says there to this user, be it a failure."""
        return str(self._call("tell", *argv))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        request = {
            "method": method,
            "arguments": [_plain(value) for value in arguments],
            "options": {key: _plain(value) for key, value in options.items()},
            "environment": self.environment,
            "partial": self.partial,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ProbeFailed(f"the {self.name} client of {self.user} died in {method}")
        reply = json.loads(line)
        if "error" in reply:
            raise ERRORS.get(reply["error"], ProbeFailed)(f"{reply['error']}: {reply['message']}")
        return reply["result"]


def _plain(value: Any) -> Any:
    if isinstance(value, (Task, Path)):
        return str(value)
    if isinstance(value, Shape):
        return [value.nodes, value.gpus_per_node]
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else value
