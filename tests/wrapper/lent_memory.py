"""Launchers that lend their node's memory, each a process of its own with a node's memory of its own (emulated)."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path

from ones_wrapper.files.node_memory import MemoryFolder
from ones_wrapper.launch.pieces import LentMemory
from ones_wrapper.process.block import Block
from tests.waiting import until
from tests.wrapper.runs import children


class Lender:
    """A launcher; its job's directory has the secret already."""

    def __init__(self, root: Path, job_dir: Path) -> None:
        root.mkdir(exist_ok=True)
        said = root / "said"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                memory = LentMemory({"ONES_MEMORY": str(root)}, job_dir, Block(4711, 0, 0))
                (root / "new").write_text(memory.text)
                (root / "new").rename(said)
                while not (root / "leave").exists():
                    time.sleep(0.01)
                memory.end(left=True, stopped=(root / "stopped").exists)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        until(said.exists)
        self.text, self.root = said.read_text(), root
        said.unlink()
        self.folder = MemoryFolder.parse(self.text)

    @property
    def server(self) -> int:
        """The process that serves the folder."""
        (found,) = children(self.pid)
        return found

    def leave(self) -> None:
        """Begin to end, as the launcher of a block that left."""
        (self.root / "leave").touch()

    def ended(self) -> bool:
        """Whether it ended by itself."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
