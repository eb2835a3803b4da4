"""Process outside of a container on behalf of the node launcher inside: it forwards signals, and leaves no process
behind.

Container runtimes differ: Apptainer forwards all signals but SIGURG; bubblewrap and `unshare` forward none. A runtime
that is killed may leave its children. So Slurm starts this process on a node. It runs the container, finds the launcher
among its descendants, and signals the launcher itself. After the runtime has ended, it ends all remaining descendants.
Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ones_wrapper.files.job_directory import ExitCodes
from ones_wrapper.launch.batch_shell import status_of
from ones_wrapper.launch.container import PYTHON
from ones_wrapper.launch.rank import end_with_parent
from ones_wrapper.process.exit_codes import STOP_CODE, USAGE_ERROR
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import find_task

_LAUNCHER = [b"-m", b"ones_wrapper.launch.node"]
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
PASSED = (*_STOPS, signal.SIGUSR1, signal.SIGURG)

TIDY_S = 2.0
"""Seconds in which a runtime's helper processes may clean up after it has ended."""
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yield a process's descendants, parents first."""
    level = [pid]
    while level:
        level = [child for parent in level for child in _children(parent)]
        yield from level


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[1:3] == _LAUNCHER


def _catches(pid: int, number: int) -> bool:
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Outside:
    """The runtime of one container, and the processes below it."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._stopped = False
        """True if the launcher was killed before it had ranks."""
        for number in PASSED:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)

    def run(self, argv: Sequence[str]) -> int:
        """Run the container to its end; return its exit code, 128+n after signal n."""
        # Processes that a killed runtime leaves behind become ours.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        parent = os.getpid()
        runtime = os.fork()
        if runtime == 0:
            # Slurm may signal all processes of a step: a runtime that died of the signal would take the ranks along.
            for number in PASSED:
                signal.signal(number, signal.SIG_IGN)
            end_with_parent(parent)
            os.execvp(argv[0], list(argv))
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == runtime:
                break
            if pid == 0:
                self._deliver()
                time.sleep(_POLL_S)
        self._end_the_rest()
        if self._stopped:
            return STOP_CODE
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code

    def _deliver(self) -> None:
        """Signal the launcher as soon as it has handlers. A stop signal kills a launcher without handlers: it has no
        ranks yet."""
        if not self._pending:
            return
        launcher = next(filter(_is_launcher, descendants(os.getpid())), None)
        if launcher is None:
            return
        for number in tuple(self._pending):
            if _catches(launcher, number):
                _signal(launcher, number)
            elif number in _STOPS:  # not by the signal itself, which the first process of a namespace would ignore
                self._stopped = True
                _signal(launcher, signal.SIGKILL)
            else:
                continue
            self._pending.remove(number)

    @staticmethod
    def _end_the_rest() -> None:
        until, end = time.monotonic() + TIDY_S, time.monotonic() + 3 * TIDY_S
        while (left := list(descendants(os.getpid()))) and time.monotonic() < end:
            for pid in left:
                # A helper of the runtime may take its time; ranks must not go on.
                if time.monotonic() > until or _is_launcher(pid):
                    _signal(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(_POLL_S)


def main(argv: Sequence[str]) -> int:
    """Run the container command `argv`, which ends with the launcher's command."""
    env = os.environ
    if env.get("ONES_LAUNCHER", "local") == "local":  # elsewhere the starter's daemon looks after us
        end_with_parent(os.getppid())
    if shutil.which(argv[0]) is None:
        log(f"--container: there is no {argv[0]} on this node; load its module in the batch script", "ones-run")
        code = USAGE_ERROR
    else:
        code = Outside().run(argv)
    node = find_task(env, env.get("ONES_LAUNCHER", "local")).rank
    codes = ExitCodes.of(env)
    if not code or codes.written(node):
        return code
    # The launcher inside was killed, or never began. Without this code, mere consequences on other nodes would count.
    codes.write(node, code)
    if code < 128 and code != USAGE_ERROR:
        log(
            f"the container ended with code {code} and its launcher reported nothing: is {argv[0]}'s image there, and "
            f"ones_wrapper installed for its {PYTHON}?",
            "ones-run",
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
