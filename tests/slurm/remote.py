"""Clients that run inside a cluster, used from outside as if they were here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from ones_db.shape import Shape
from slurm_ones.slurm import client as door
from slurm_ones.slurm.model import Job, JobKey, Snapshot, Task
from tests.cluster import Cluster, paths

T = TypeVar("T")
ERRORS = {
    error.__name__: error
    for error in (
        door.Refused,
        door.NotPermitted,
        door.UnknownJob,
        door.NotResizable,
        door.Unreachable,
        door.SlurmMissing,
    )
}


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
        """End the process."""
        self._process.communicate()

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        request = {
            "method": method,
            "arguments": [str(value) if isinstance(value, Task) else value for value in arguments],
            "options": options,
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

    def tell(self, *argv: str) -> str:
        """What a command says there to this user, be it a failure."""
        return str(self._call("tell", *argv))

    def version(self) -> tuple[int, int]:
        major, minor = self._call("version")
        return major, minor

    def config(self) -> dict[str, str]:
        return dict(self._call("config"))

    def snapshot(self) -> Snapshot:
        return TypeAdapter(Snapshot).validate_python(self._call("snapshot"))

    def job(self, job_id: JobKey) -> Job:
        return TypeAdapter(Job).validate_python(self._call("job", job_id))

    def tasks(self, array_id: int) -> tuple[Job, ...]:
        return TypeAdapter(tuple[Job, ...]).validate_python(self._call("tasks", array_id))

    def details(self, job_ids: Collection[int]) -> dict[int, Job]:
        return TypeAdapter(dict[int, Job]).validate_python(self._call("details", list(job_ids)))

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        where = None if directory is None else str(directory)
        return int(self._call("submit", str(script), list(arguments), directory=where))

    def requeue_hold(self, job_id: JobKey) -> None:
        self._call("requeue_hold", job_id)

    def hold(self, job_id: JobKey) -> None:
        self._call("hold", job_id)

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        self._call("hold_waiting", array_id, tasks if tasks is None else list(tasks))

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None) -> None:
        self._call("reshape", job_id, [shape.nodes, shape.gpus_per_node], kind=kind)

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        self._call("release", job_id, start_now=start_now)

    def defer(self, job_id: JobKey, until: float) -> None:
        self._call("defer", job_id, until)

    def few_switches(self, job_id: JobKey, most: int) -> None:
        self._call("few_switches", job_id, most)

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        self._call("signal", job_id, signal, batch=batch)

    def reuse(self, task: Task) -> None:
        self._call("reuse", task)

    def throttle(self, array_id: int, most: int) -> None:
        self._call("throttle", array_id, most)

    def cancel_waiting(self, array_id: int) -> None:
        self._call("cancel_waiting", array_id)
