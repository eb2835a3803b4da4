"""A client of Slurm at the far end of a pipe: `python -m tests.slurm.probe pyslurm|command|package.module:Class`.

It runs inside a cluster, where libslurm and the commands are. Each line of its input is a call in JSON, each line
of its output the result or the name of the typed error; it lives until its input ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import reshape_command
from slurm_ones.slurm.client import SlurmClient
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.model import Queue, SlurmJob, Task


def client_of(name: str) -> SlurmClient:
    """The client of that name, made anew."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        made: SlurmClient = getattr(import_module(module), attribute)(timeout_s=20, keepalive=lambda: None)
        return made
    if name == "pyslurm":
        from slurm_ones.slurm.pyslurm import PySlurmClient

        return PySlurmClient(timeout_s=20)
    return CommandClient(timeout_s=20)


def _nodes_alone(self: CommandClient, job: SlurmJob, shape: Shape, queue: Queue) -> None:
    """An update that Slurm takes only in part, the nodes without the GPUs; the way back is taken whole."""
    command = reshape_command(job.key, shape, whole_nodes=False, kind=job.kind)
    back = shape == Shape(job.nodes, job.gpus_per_node)
    self.run([word for word in command if back or not word.startswith("Gres=")])


def plain(value: Any) -> Any:
    """What JSON can carry of a dataclass of the model."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        return [plain(item) for item in value]
    return value


def answer(client: SlurmClient, request: dict[str, Any]) -> Any:
    """The result of one call, or with `tell` what a command says, which is quicker so than to enter the cluster anew.

    `environment` holds for this call alone; `partial` breaks the update of a reshape.
    """
    method, arguments, options = request["method"], request["arguments"], request["options"]
    if method == "tell":
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        return (done.stdout + done.stderr).strip()
    if method != "submit" and arguments and isinstance(arguments[0], str):
        arguments[0] = Task(*map(int, arguments[0].split("_")))
    if method == "reshape":
        arguments[1] = Shape(*arguments[1])
        options["queue"] = Queue(*options.get("queue", ()))
    if method == "submit":
        arguments[0] = Path(arguments[0])
        if options.get("directory") is not None:
            options["directory"] = Path(options["directory"])
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, request["environment"]))
        if request["environment"]:
            client = client_of(sys.argv[1])
        if request["partial"]:
            stack.enter_context(mock.patch.object(CommandClient, "update_shape", _nodes_alone))
        return plain(getattr(client, method)(*arguments, **options))


def main() -> None:
    """Answer until the input ends."""
    client = client_of(sys.argv[1])
    for line in sys.stdin:
        try:
            reply = {"result": answer(client, json.loads(line))}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
