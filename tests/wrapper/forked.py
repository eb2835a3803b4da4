"""Ranks that are forked once and then run many small cases in one gloo group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ones_wrapper.api import join
from ones_wrapper.group import Group

TIMEOUT_S = 240.0

# A server without threads forks them: the test process may have run a backward pass, after which torch cannot fork.
FORKS = multiprocessing.get_context("forkserver")
# What each rank would import otherwise: an optimizer's first step takes half a second for torch._dynamo, and a test's
# module as long. A process has one such server: nothing else may say what it imports.
FORKS.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "ones_wrapper.api",
        "numpy",
        "pytest",
        "hypothesis.strategies",
    ]
)


class Team:
    """`world` ranks. Functions run on all of them at once; they get the rank's `Group` first."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()  # they meet at a file: a port may be taken by others
        meet = f"{self._folder.name}/meet"
        self._ends, others = zip(*(FORKS.Pipe() for _ in range(world)), strict=True)
        self._ranks = [
            FORKS.Process(target=_serve, args=(rank, world, meet, others[rank]), daemon=True) for rank in range(world)
        ]
        for rank in self._ranks:
            rank.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a module's function returns on each rank. Raises AssertionError with the trace where one fails."""
        for end in self._ends:
            end.send((function, arguments))
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(TIMEOUT_S):
                self.close()
                raise AssertionError(f"rank {rank} hangs in {function.__name__}{arguments}")
            answers.append(end.recv())
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [value for value, _ in answers]

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, meet: str, end: Connection[Any, Any]) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meet, world), rank=rank, world_size=world)
    group: Group = join("gloo")
    while True:
        function, arguments = end.recv()
        try:
            answer = (function(group, *arguments), "")
        except Exception:
            answer = (None, traceback.format_exc())
        end.send(answer)
