"""A node launcher's folder in memory, and the process that serves its files to the job's other nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ones_wrapper.files import node_memory
from ones_wrapper.files.node_memory import NodeMemory
from ones_wrapper.launch.rank import end_with_parent
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.network import pieces
from ones_wrapper.network.door import listen
from ones_wrapper.network.job_network import node_name
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.block import Block
from ones_wrapper.process.log import log
from ones_wrapper.protocol import CHECKPOINTS

NAME = "ones-pieces"
"""Name of the process that serves, as `ps -o comm` shows it."""
STAY_S = 30.0
"""Longest time, in seconds, that a launcher keeps files for others after its block has left, besides the time to send
them."""
STAY_BYTES_PER_S = 200e6
_POLL_S = 0.1
_SECRET_S = 60.0
"""Seconds that a launcher waits for the secret, which a network file system may show late."""


class LentMemory:
    """The folder in memory of a block's launcher on one node."""

    def __init__(self, env: Mapping[str, str], job_dir: Path, block: Block) -> None:
        """Fork the process that serves the folder; it ends with this one."""
        self._memory, self._job_dir, self._hot = NodeMemory(env), job_dir, HotFolder(job_dir, block.array)
        self.text = ""
        """Value of the environment variable `FOLDER`; empty without a folder."""
        if self._memory.folder is None:
            return
        try:
            host = node_name(env)
            listener = listen(host)
        except OSError as error:
            log(f"this node's memory is not lent to the job's others ({error})", "ones-run")
            return
        folder, parent = replace(self._memory.folder, host=host, port=listener.getsockname()[1]), os.getpid()
        if os.fork() == 0:
            try:
                end_with_parent(parent)
                Path("/proc/self/comm").write_text(NAME)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
                    signal.signal(number, signal.SIG_IGN)
                pieces.serve(folder.checkpoints, listener, JobSecret.read(self._hot.path, _SECRET_S))
            except Exception as error:
                log(f"this node's memory is not lent any more ({error})", "ones-run")
            finally:
                os._exit(1)
        listener.close()
        self._memory.folder, self.text = folder, folder.text

    def end(self, left: bool, stopped: Callable[[], bool]) -> None:
        """Remove the folder. If the block `left` others that train on, first wait until they have its files. The wait
        ends after a while, at a signal to stop, or when the job has ended."""
        until = time.monotonic() + STAY_S + (self._size() / STAY_BYTES_PER_S if left else 0.0)
        while left and self._needed() and time.monotonic() < until and not stopped():
            time.sleep(_POLL_S)
        self._memory.remove()

    def _size(self) -> int:
        folder = self._memory.folder
        with suppress(OSError):
            return sum(path.stat().st_size for path in folder.path.rglob("*")) if folder else 0
        return 0

    def _needed(self) -> bool:
        held, folder = node_memory.held(self._job_dir / CHECKPOINTS), self._memory.folder
        named = held is not None and folder is not None and folder.text in held.folders
        return named and not self._hot.over()
