"""Stands outside a container for the node's launcher inside: hands on signals, and leaves nothing behind.

Container runtimes differ. Apptainer hands on all signals but SIGURG, bubblewrap and `unshare` none; and one that is
killed may leave what it started. So the process that Slurm starts on a node is this one, outside: it runs the
container, finds the launcher among its descendants, signals that itself, and ends what is left when the runtime has
ended. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ones_wrapper.job_io import log
from ones_wrapper.launch.job_directory import write_exit_code
from ones_wrapper.launch.rank_placement import LaunchError
from ones_wrapper.launch.restart_policy import USAGE_ERROR

NODE = "ones_wrapper.launch.node"
PYTHON = "python3"
"""The image's, by its own PATH: ours outside need not be there."""

CONTAINER, CWD, VERSION = "ONES_CONTAINER", "ONES_CWD", "ONES_OUTSIDE_VERSION"
"""What the launcher inside is told of outside: the container's command, the working directory, our version."""

PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)

TIDY_S = 2.0
"""How long a runtime's helpers may tidy up after its end."""
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


# -- for ones-run ------------------------------------------------------------------------------------------------------


def words_of(text: str | None) -> list[str]:
    """A container's command as it is given, in words. Raises `LaunchError`."""
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise LaunchError(f"--container {text!r}: {error}") from None
    if text is not None and not words:
        raise LaunchError("--container: give the words that stand before a command, such as 'apptainer exec IMAGE'")
    return words


def command(words: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """What to start on a node, so that `launcher`, a module and its arguments, runs in the container."""
    return [sys.executable, "-m", __name__, *words, PYTHON, "-m", *launcher]


def outside(words: Sequence[str]) -> dict[str, str]:
    """What the launcher inside is told."""
    return {CONTAINER: shlex.join(words), CWD: str(Path.cwd()), VERSION: own_version()}


def own_version() -> str:
    """Of this package; empty where it is not installed but found by PYTHONPATH."""
    from importlib.metadata import PackageNotFoundError, version  # not at the top: it takes longer than all else here

    try:
        return version("ones-wrapper")
    except PackageNotFoundError:
        return ""


# -- inside ------------------------------------------------------------------------------------------------------------


def arrive(env: Mapping[str, str]) -> None:
    """Called first by a node's launcher: in a container, look whether what it needs came along.

    Changes to the directory that `ones-run` was started in. Raises `LaunchError` with what to do.
    """
    if "ONES_JOB_DIR" not in env:
        raise LaunchError(
            "ONES_JOB_DIR is not set: in a container, let the environment of the job pass (Apptainer: no --cleanenv or "
            "--containall; podman: --env-host)"
        )
    if not env.get(CONTAINER):
        return
    for path in (env["ONES_JOB_DIR"], env.get(CWD) or "."):
        if not Path(path).is_dir():
            raise LaunchError(f"{path} is not there in the container: bind it (Apptainer: --bind {path})")
    os.chdir(env.get(CWD) or ".")
    outside, inside = env.get(VERSION, ""), own_version()
    if outside and inside and outside != inside:
        log(f"ones-wrapper is {inside} in the container and {outside} outside: install the same in both", "ones-run")


# -- outside -----------------------------------------------------------------------------------------------------------


def _children(pid: int) -> list[int]:
    """Also those that other threads of the process started."""
    found: list[int] = []
    try:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    except OSError:
        pass
    return found


def descendants(pid: int) -> Iterator[int]:
    """Those processes that a process started, and those that they started; parents first."""
    level = [pid]
    while level:
        level = [child for parent in level for child in _children(parent)]
        yield from level


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[1:3] == [b"-m", NODE.encode()]


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal: one that is just starting would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


class Outside:
    """The runtime of one container, and what runs below it."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        for number in PASSED:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)

    def run(self, argv: Sequence[str]) -> int:
        """Run the container to its end; its exit code, 128+n after signal n."""
        from ones_wrapper.launch.rank import end_with_parent  # `ones-run` imports this module, and needs no rank

        # What a runtime that is killed leaves behind becomes ours.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        parent = os.getpid()
        runtime = os.fork()
        if runtime == 0:
            for number in PASSED:
                signal.signal(number, signal.SIG_DFL)
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
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code

    def _deliver(self) -> None:
        """Signal the launcher, once it is there and listens."""
        if not self._pending:
            return
        launcher = next(filter(_is_launcher, descendants(os.getpid())), None)
        if launcher is None or not _catches(launcher, self._pending[0]):
            return
        while self._pending:
            os.kill(launcher, self._pending.pop(0))

    @staticmethod
    def _end_the_rest() -> None:
        until, end = time.monotonic() + TIDY_S, time.monotonic() + 3 * TIDY_S
        while (left := list(descendants(os.getpid()))) and time.monotonic() < end:
            for pid in left:
                # A helper of the runtime may take its time; what trains is not to go on.
                if time.monotonic() > until or _is_launcher(pid):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(_POLL_S)


def main(argv: Sequence[str]) -> int:
    """Run the container command `argv`, which ends in the launcher's."""
    from ones_wrapper.launch.rank import end_with_parent

    env = os.environ
    job_dir, restart = Path(env["ONES_JOB_DIR"]), int(env.get("SLURM_RESTART_COUNT") or 0)
    if env.get("ONES_LAUNCHER", "local") == "local":  # elsewhere the starter's daemon looks after us
        end_with_parent(os.getppid())
    if shutil.which(argv[0]) is None:
        log(f"--container: there is no {argv[0]} on this node; load its module in the batch script", "ones-run")
        write_exit_code(job_dir, restart, int(env.get("SLURM_PROCID") or 0), USAGE_ERROR, None)
        return USAGE_ERROR
    code = Outside().run(argv)
    if 0 < code < 128 and code != USAGE_ERROR and not any(job_dir.glob(".exit-*")):
        log(
            f"the container ended with code {code} and its launcher said nothing: is {argv[0]}'s image there, and "
            f"ones_wrapper installed for its {PYTHON}?",
            "ones-run",
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
