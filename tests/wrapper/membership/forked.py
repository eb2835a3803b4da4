"""Blocks forked from the test's process, which has imported torch: a start takes milliseconds. What runs in them is the
node launcher, as below `ones-run`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ones_wrapper.files.places import make_job_directory
from ones_wrapper.launch import node, serve
from ones_wrapper.network.job_network import STORE
from ones_wrapper.process import hooks as process_hooks
from ones_wrapper.process.hooks import Flags
from ones_wrapper.process.placement import free_port
from tests.wrapper.runs import ranks_of


class ForkedBlock:
    """One block: a node launcher and its ranks."""

    def __init__(self, script: Path, arguments: Sequence[str], ranks: int, env: Mapping[str, str], log: Path) -> None:
        for module in ("ones_wrapper.api", "torch._dynamo"):
            importlib.import_module(module)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
        place = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "ONES_NODES": "1", "ONES_GPUS_PER_NODE": str(ranks),
            "ONES_LAUNCHER": "local", "ONES_LAUNCHED": f"{time.time():.3f}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._log, self._code = log, -1
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # as in `ones_wrapper.testing`
            code = 70
            try:
                self._become(log, clean | place | env)
                make_job_directory(Path(env["ONES_JOB_DIR"]))
                os.environ[STORE] = serve(Path(env["ONES_JOB_DIR"]), {})
                code = node.main([str(script), *arguments])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    @staticmethod
    def _become(log: Path, env: Mapping[str, str]) -> None:
        atexit._clear()  # what the test's process does at its end is not for this one
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(file, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)  # a pool of threads does not survive the fork
        vars(process_hooks.FLAGS).update(vars(Flags()))
        process_hooks._callbacks.clear()
        process_hooks._classifiers.clear()

    @property
    def errors(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def ended(self) -> bool:
        if self.pid and self._code < 0:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = abs(os.waitstatus_to_exitcode(status))
        return self._code >= 0

    def end(self, timeout_s: float = 180.0) -> int:
        """Wait for the end; the exit code, or the number of the signal."""
        until = time.monotonic() + timeout_s
        while not self.ended():
            if time.monotonic() > until:
                stacks = self.stacks()
                self.kill()
                raise AssertionError(f"still running after {timeout_s:g} s\n{stacks}")
            time.sleep(0.02)
        return self._code

    def ranks(self) -> list[int]:
        return ranks_of(self.pid)

    def stacks(self) -> str:
        for pid in self.ranks():
            os.kill(pid, signal.SIGQUIT)
        time.sleep(0.5)
        text = self.errors[-6000:]
        words = ["ps", "-o", "pid,stat,wchan:20,args", "-p", ",".join(map(str, self.ranks()))]
        return text + subprocess.run(words, capture_output=True, text=True).stdout

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, as `ones-run` does."""
        if not self.ended():
            os.kill(self.pid, number)

    def processes(self) -> list[int]:
        """Its launcher and its ranks."""
        return [self.pid, *self.ranks()]

    def kill(self) -> None:
        """End it at once, ranks and all."""
        if not self.ended():
            kill_at_once(self)
            self.end()


def kill_at_once(*blocks: ForkedBlock) -> None:
    """Kill these blocks so that none of their processes sees the end of another."""
    found = [pid for block in blocks for pid in block.processes()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in found:
            with suppress(ProcessLookupError):  # a rank that has ended
                os.kill(pid, number)
