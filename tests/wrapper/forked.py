"""Ranks that are forked once and then run many small cases in one gloo group."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ones_wrapper.api import join
from ones_wrapper.group import Group
from tests import forks, loaded

TIMEOUT_S = 240.0


class Forked:
    """A process that calls a module's function, which gets the other end of `end` last; it dies with this one.

    It is no fork of this one, which may have run a backward pass, after which torch cannot fork.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.end, theirs = Pipe()
        place = str(loaded.folder() / loaded.ALL)
        files = (theirs.fileno(), 1, 2)
        self.pid, self._life = forks.ask(place, os.getuid(), os.getgid(), str(Path.cwd()), [loaded.RANK], files)
        theirs.close()
        self.end.send((function, arguments))

    def is_alive(self) -> bool:
        return not select.select([self._life], [], [], 0)[0]

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.join()

    def join(self) -> int:
        """Wait for its exit code."""
        return forks.exit_code(self._life)


class Team:
    """`world` ranks. Functions run on all of them at once; they get the rank's `Group` first."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()  # they meet at a file: a port may be taken by others
        meet = f"{self._folder.name}/meet"
        key = bytes(current_process().authkey)
        self._ranks = [Forked(_serve, key, rank, world, meet) for rank in range(world)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a module's function returns on each rank. Raises AssertionError with the trace where one fails."""
        for rank in self._ranks:
            rank.end.send((function, arguments))
        answers = []
        for number, rank in enumerate(self._ranks):
            if not rank.end.poll(TIMEOUT_S):
                self.close()
                raise AssertionError(f"rank {number} hangs in {function.__name__}{arguments}")
            answers.append(rank.end.recv())
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [value for value, _ in answers]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._folder.cleanup()


def _serve(key: bytes, rank: int, world: int, meet: str, end: Connection[Any, Any]) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    current_process().authkey = key  # of who asks for tensors, which may be no fork of the same process
    dist.init_process_group("gloo", store=dist.FileStore(meet, world), rank=rank, world_size=world)
    group: Group = join("gloo")
    while True:
        function, arguments = end.recv()
        try:
            answer = (function(group, *arguments), "")
        except Exception:
            answer = (None, traceback.format_exc())
        end.send(answer)
