"""A box: a built root in namespaces of its own, in which commands run. Knows nothing of Slurm."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from . import host, paths
from .errors import ClusterError
from .spec import LOCK, PIDS, SPEC, Bind, Spec

START_SECONDS = 60.0
ENTER = Path(__file__).with_name("enter.py")
File = IO[Any] | int | None


class Box:
    """One box, identified by its folder on the host. Cheap to make; `start` does the work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name

    @property
    def alive(self) -> bool:
        """Whether the box runs, whoever started it."""
        try:
            handle = os.open(self.folder / LOCK, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)

    @property
    def _pids(self) -> dict[str, int]:
        try:
            pids: dict[str, int] = json.loads((self.folder / PIDS).read_text())
            return pids
        except FileNotFoundError:
            raise ClusterError(f"{self.name} is not running") from None

    @property
    def init(self) -> int:
        """The box's first process, as the host numbers it."""
        return self._pids["init"]

    @property
    def keeper(self) -> int:
        """The process that keeps the box (see keeper.py)."""
        return self._pids["keeper"]

    @property
    def root(self) -> Path:
        """The box's / as the host sees it, for as long as the box runs. Absolute symbolic links
        in it lead to the host's files: use paths without them."""
        return Path(f"/proc/{self.init}/root")

    def start(
        self,
        root: Path,
        binds: Sequence[Bind],
        devices: Sequence[str] = (),
        owner: int | None = None,
        *,
        network: int | None = None,
        boots: bool = False,
    ) -> None:
        """Start the box, which ends with process `owner` if one is given. It shares the network of process `network`,
        and its root's own init `boots` it."""
        host.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        spec = Spec(self.name, str(self.folder), str(root), list(binds), list(devices), owner, network, boots)
        spec.write(self.folder / SPEC)
        log = self.folder / "box.log"
        read, write = os.pipe()
        with log.open("w") as output:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.keeper", str(self.folder / SPEC), str(write)],
                cwd=paths.REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[write],
                start_new_session=True,
            )
        self._keeper = keeper  # keeps Popen from complaining; the keeper ends by itself
        os.close(write)
        answer = _first_words(read)
        if answer != {"error": None}:
            why = answer.get("error") or log.read_text().strip() or "no answer"
            keeper.kill()
            keeper.wait()
            raise ClusterError(f"{self.name} did not start: {why}")

    def stop(self) -> None:
        """End the box and everything in it. Does nothing if it does not run."""
        if self.alive:
            pids = self._pids
            # The keeper tidies up; if it is gone, its death has ended the box already.
            _signal(pids["keeper"], signal.SIGTERM)
            deadline = time.monotonic() + 10
            while self.alive:
                if time.monotonic() > deadline:
                    _signal(pids["init"], signal.SIGKILL)
                time.sleep(0.01)
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            keeper.wait()

    def remove(self) -> None:
        """Remove what a box that ended hard has left on the host: plain files, never a mount."""
        if not self.alive:
            shutil.rmtree(self.folder, ignore_errors=True)

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
        text: bool = True,
        new_session: bool = True,
    ) -> subprocess.Popen[Any]:
        """Start a command inside. The Popen stands for the command: signals and exit status pass
        through, and killing it kills the command (children of the command are the command's)."""
        command, environment = self.command(argv, user=user, cwd=cwd, env=env, new_session=new_session)
        return subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=text,
            start_new_session=new_session,
        )

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        new_session: bool = False,
    ) -> tuple[list[str], dict[str, str]]:
        """The command of this machine that runs a command inside, and its environment; it starts in `/`."""
        uid, gid, home = self._account(user)
        if cwd is None:  # accounts of daemons have a home that does not exist
            cwd = home if (self.root / home.lstrip("/")).is_dir() else "/"
        command = [sys.executable, "-I", "-S", *self._door(argv, new_session), uid, gid, str(cwd), "--", *argv]
        return command, {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", **(env or {})}

    def _door(self, argv: Sequence[str], new_session: bool) -> list[str]:
        """The program that brings the command inside, with its first arguments."""
        return [str(ENTER), str(self.init)]

    def ids(self, user: str) -> tuple[int, int]:
        """The uid and gid of a user inside."""
        uid, gid, _ = self._account(user)
        return int(uid), int(gid)

    def _account(self, user: str) -> tuple[str, str, str]:
        """The uid, gid and home of a user inside."""
        for line in (self.root / "etc/passwd").read_text().splitlines():
            name, _, uid, gid, _, home, _ = line.split(":")
            if name == user:
                return uid, gid, home
        raise ClusterError(f"{self.name} has no user {user!r}")

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout: float | None = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and return what it said. With `check`, a failure raises
        ClusterError with the command's own words; at the time limit everything it started dies."""
        pipe = subprocess.PIPE
        stdin = subprocess.DEVNULL if input is None else pipe
        process = self.popen(argv, user=user, cwd=cwd, env=env, stdin=stdin, stdout=pipe, stderr=pipe)
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if check and process.returncode != 0:
            said = (stderr + stdout).strip()
            raise ClusterError(f"{' '.join(argv)}: exit status {process.returncode}: {said}")
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)


def _first_words(read: int) -> dict[str, Any]:
    """What the keeper says: the box is ready, or why it is not, or nothing (it died)."""
    said = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        if select.select([pipe], [], [], START_SECONDS)[0]:
            said = pipe.read(65536)
    answer: dict[str, Any] = json.loads(said) if said else {}
    return answer


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
