"""Opens users' files in a child process, so that a file system that hangs blocks only the users on it.

Users choose these paths, and access to a path may hang in the kernel, where no signal ends it. So the child opens each
path in a thread of its own, and the parent waits briefly for the answer. If an access hangs, the user's other requests
on that file system fail at once with `NoAnswer`, until that access ends. Nothing waits for hanging threads or for the
child. The child ends with its parent, or as soon as the kernel lets it.

There are also limits for each user, since a user's links may lead to any file system. The mount table shows the file
system of a path, without access to the path.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slurm_ones.untrusted_files import NoAnswer

log = logging.getLogger(__name__)

WAIT_S = 0.5
"""Budget, in seconds, for waiting on slow answers: one for each user on each file system, and one for all together."""
SHARE = 0.05
"""Seconds by which the budget `WAIT_S` refills each second."""
QUICK_S = 0.02
"""Shortest wait for an answer, in seconds, even if the budget `WAIT_S` is used up."""
OF_ONE_S, OF_ONE_SHARE, LEAST_S = 5.0, 0.5, 0.002
"""One user's budget for all waits, in seconds, and the seconds by which it refills each second. The first `LEAST_S` of
each wait are free. Once the budget is used up, each wait lasts only `LEAST_S`."""
STOPPED_S = 10.0
"""Seconds after which a child that accepts no requests is replaced."""
START_S = 5.0
"""Longest wait for the child's start, in seconds."""
MOST_HANGING, MOST_OF_ONE = 128, 4
"""Largest numbers of hanging requests, of all users and of one user; beyond them requests fail at once."""
MOUNTS_S = 5.0
"""Seconds between two reads of the mount table."""
MOUNTS = Path("/proc/self/mountinfo")


@dataclass
class _Patience:
    """Budget for waiting for answers, in seconds. It refills as time passes."""

    most: float = WAIT_S
    share: float = SHARE
    free: float = QUICK_S
    _waited: float = 0.0
    _at: float = 0.0

    def left(self) -> float:
        now = time.monotonic()
        self._waited, self._at = max(self._waited - self.share * max(now - self._at, 0.0), 0.0), now
        return max(self.most - self._waited, 0.0)

    def waited(self, seconds: float) -> None:
        self._waited += max(seconds - self.free, 0.0)


@dataclass
class _Lane:
    """Requests of one user on one file system."""

    patience: _Patience = field(default_factory=_Patience)
    asked: int = 0
    """Sequence number of the hanging request; 0 for none."""
    since: float = 0.0
    """Unix time of the hanging request."""


class FileChild:
    """`untrusted_files.Runner` that runs functions in a child process: `with run_by(child.run)`. Only one thread may
    use it.

    A child that has ended is replaced.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._patience = _Patience()
        self._of_one: dict[int, _Patience] = {}
        """Budget of each user (`OF_ONE_S`)."""
        self._mounts: list[str] = []
        self._mounts_at = float("-inf")
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._taken = 0
        """Sequence number of the newest request that the child accepted."""
        self._answers: dict[int, tuple[bool, Any]] = {}

    @property
    def hanging(self) -> list[tuple[str, int]]:
        """File system and user id of each request that hangs."""
        return [key for key, lane in self._lanes.items() if lane.asked]

    def run(self, function: Callable[..., Any], path: Path, uid: int, *more: object) -> Any:
        """Run `function(path, uid, *more)` in the child. Raises its error, or `NoAnswer` if it takes too long."""
        place = self._file_system(path)
        lane = self._lanes.setdefault((place, uid), _Lane())
        self._take(0.0)
        hanging = [whose for _, whose in self.hanging]
        if lane.asked or len(hanging) >= MOST_HANGING or hanging.count(uid) >= MOST_OF_ONE:
            if lane.asked > self._taken and time.time() - lane.since > STOPPED_S:
                log.error("the process that opens users' files does not answer; a new one is started")
                self.close()
            raise _silent(place, lane)
        lane.since = time.time()
        number = self._ask(function, path, uid, *more)
        if self._wait(number, uid, lane):
            good, answer = self._answers.pop(number)
            if good:
                return answer
            raise answer
        lane.asked = number
        log.warning("uid %d: %s does not answer; %d requests hang", uid, place, len(self.hanging))
        raise _silent(place, lane)

    def start(self) -> FileChild:
        """Start the child now, so that the first request does not have to wait for its start."""
        self._child()
        return self

    def close(self) -> None:
        """Kill the child without waiting for its end."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.poll()
        self._connection = self._process = None
        for lane in self._lanes.values():
            lane.asked = 0

    def _wait(self, number: int, uid: int, lane: _Lane) -> bool:
        """Wait for the answer as long as the budgets allow; return True if it came."""
        began = time.monotonic()
        of_one = self._of_one.setdefault(uid, _Patience(OF_ONE_S, OF_ONE_SHARE, LEAST_S))
        slow = max(QUICK_S, min(lane.patience.left(), self._patience.left()))
        until = began + (slow if of_one.left() else LEAST_S)
        while number not in self._answers and (left := until - time.monotonic()) > 0:
            self._take(left)
        for patience in (lane.patience, self._patience, of_one):
            patience.waited(time.monotonic() - began)
        return number in self._answers

    def _ask(self, function: Callable[..., Any], *arguments: object) -> int:
        self._number += 1
        for _ in range(2):
            try:
                self._child().send((self._number, function, arguments))
                break
            except OSError:
                self.close()
        else:
            raise NoAnswer("the process that opens users' files cannot be started")
        return self._number

    def _child(self) -> Connection:
        if self._connection is None:
            mine, its = socket.socketpair()
            with its:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(its.fileno())],
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._connection = Connection(mine.detach())
            # Its start is not the file system's.
            self._connection.poll(START_S)
        return self._connection

    def _take(self, seconds: float) -> None:
        """Receive the child's messages that have come; wait up to `seconds` for the first."""
        if self._connection is None:
            return
        try:
            while self._connection.poll(seconds):
                number, good, answer = self._connection.recv()
                if good is None:
                    self._taken = max(self._taken, number)
                    continue
                seconds = 0.0
                self._end(number, good, answer)
        except (OSError, EOFError):
            log.error("the process that opens users' files has ended; a new one is started")
            self.close()

    def _end(self, number: int, good: bool, answer: Any) -> None:
        for (place, uid), lane in self._lanes.items():
            if lane.asked == number:
                # What it says is old by now.
                lane.asked = 0
                log.warning("uid %d: %s answers again", uid, place)
                return
        self._answers[number] = good, answer

    def _file_system(self, path: Path) -> str:
        """Return the mount point of a path's file system, without access to the path."""
        now = time.monotonic()
        if now - self._mounts_at >= MOUNTS_S:
            self._mounts, self._mounts_at = mount_points(), now
        named = os.path.normpath(path) + "/"
        return next((point for point in self._mounts if named.startswith(point.rstrip("/") + "/")), "/")


def _silent(place: str, lane: _Lane) -> NoAnswer:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(lane.since or time.time()))
    return NoAnswer(f"the file system {place} has not answered since {since}")


def mount_points() -> list[str]:
    """Return the mount points of this process, longest first; empty if the table cannot be read."""
    with suppress(OSError):
        lines = MOUNTS.read_bytes().splitlines()
        # proc_pid_mountinfo(5): the fifth field, in which blanks and backslashes are octal.
        names = (
            re.sub(rb"\\([0-3][0-7]{2})", lambda octal: bytes([int(octal[1], 8)]), line.split(b" ")[4])
            for line in lines
        )
        return sorted(map(os.fsdecode, {*names}), key=len, reverse=True)
    return []


# -- the child ---------------------------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Answer the parent's requests, each in a thread of its own, until the parent ends."""
    lock, workers = threading.Lock(), ThreadPoolExecutor(MOST_HANGING + 1)

    def send(number: int, good: bool | None = None, answer: object = None) -> None:
        with lock, suppress(OSError):
            connection.send((number, good, answer))

    def work(number: int, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
        try:
            send(number, True, function(*arguments))
        except Exception as error:
            send(number, False, error)

    send(0)
    with suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            send(request[0])
            workers.submit(work, *request)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
    # Threads that hang are not waited for.
    os._exit(0)
