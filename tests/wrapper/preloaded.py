"""`ones-run` forked from a process that has imported torch: what `python -m ones_wrapper.launch` is, without the two
seconds of the processor that each start of a node launcher takes to import.

One such process serves all tests (`tests.loaded` starts it). `ones-run` is a fork of it, and forks its node launcher
where it would start a Python; both go through their `main` with the environment, folder, signals, session and files
that they would have. What is not the real thing: the interpreter is not taken down at the end of `ones-run` and of the
node launcher, all starts hash strings alike, and what torch reads of the environment while it is imported is that of
the tests. `forkable` says which environments would make a difference; tests/wrapper/launch has the true command.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ones_wrapper import launch
from ones_wrapper.files.places import make_job_directory
from ones_wrapper.launch import node, rank, supervise
from ones_wrapper.network.job_network import STORE
from tests import loaded

_ROOT = Path(__file__).parents[2]
NODE = ["-m", "ones_wrapper.launch.node"]
_DEFAULT = {"OMP_NUM_THREADS": "1"}
"""What the node launcher sets where nobody did, before torch is there."""
_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH", "MALLOC", "GLIBC", "KMP_", "GOMP_")
"""What begins the names of variables that Python and torch read when they start."""


def forkable(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be a fork: what is read at the start is as it is here, and no folder
    but the repository, of which all is that is imported already, is searched for modules first."""

    def read(env: Mapping[str, str]) -> dict[str, str]:
        found = _DEFAULT | {name: value for name, value in env.items() if name.startswith(_AT_START)}
        found.pop("PYTHONHASHSEED", None)
        return found | {"PYTHONPATH": found.get("PYTHONPATH", "").removeprefix(str(_ROOT))}

    return read(env) == read(os.environ)


class Started:
    """An `ones-run`, its node launcher alone if `main` is `node`, or without either a script as a `rank` or by itself
    (`plain`), with what the tests use of `subprocess.Popen`; its output is text, or is added to a log."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], log: Path | None = None, main: str = "run"
    ) -> None:
        self.args = [sys.executable, "-m", "ones_wrapper.launch", *arguments]
        self.returncode: int | None = None
        status = os.pipe()
        pipes = [] if log else [os.pipe(), os.pipe()]
        written = [os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)] * 2 if log else [end for _, end in pipes]
        self._status = os.fdopen(status[0], "rb", buffering=0)
        request = json.dumps([main, list(arguments), dict(env), str(Path.cwd())]).encode()
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(loaded.folder() / loaded.RUNS))
            socket.send_fds(server, [len(request).to_bytes(8, "little")], [*written, status[1]])
            server.sendall(request)
        for end in {*written, status[1]}:
            os.close(end)
        self.pid = self._number()
        self._texts = ["", ""]
        self._readers = [
            threading.Thread(target=self._read, args=(i, os.fdopen(end)), daemon=True)
            for i, (end, _) in enumerate(pipes)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, which: int, file: IO[str]) -> None:
        with file:
            for line in file:
                self._texts[which] += line

    def _number(self) -> int:
        """What the process that keeps it says next. Raises `ChildProcessError` where that is gone."""
        said = self._status.read(8)
        if len(said) < 8:
            raise ChildProcessError(f"nobody says what became of {self.args}")
        return int.from_bytes(said, "little", signed=True)

    def poll(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it and its ranks printed, once nobody can print any more. Raises `subprocess.TimeoutExpired`."""
        until = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *self._texts)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def load() -> None:
    # Most examples read their data with the second, and sweeps ask the third: a second of the processor for each rank.
    rank.preload({"ONES_PRELOAD": "sklearn.datasets,optuna"})


def serve(asked: socket.socket) -> None:
    """Answer requests until standard input is closed."""
    supervise.subprocess = _Subprocess  # type: ignore[assignment]
    # Of the tests, a fresh start has none.
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    while select.select([asked, 0], [], [])[0] == [asked]:
        way, _ = asked.accept()
        load()
        if os.fork() == 0:
            asked.close()
            size, files, _, _ = socket.recv_fds(way, 8, 3)
            with way:
                request = json.loads(way.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
            _keep(*request, *files)
        way.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(main: str, arguments: list[str], env: dict[str, str], cwd: str, out: int, err: int, status: int) -> None:
    """Fork one `ones-run` or node launcher, and say its process and then its exit code."""
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 1024)
        os.chdir(cwd)
        _run(env, lambda: _MAINS[main](arguments))
    os.close(out)
    os.close(err)
    os.write(status, pid.to_bytes(8, "little", signed=True))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, code.to_bytes(8, "little", signed=True))
    os._exit(0)


def _node_alone(arguments: list[str]) -> int:
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    directory = Path(os.environ["ONES_JOB_DIR"])
    make_job_directory(directory)
    os.environ[STORE] = launch.serve(directory, {})
    return node.main(arguments)


def _plain(arguments: list[str]) -> int:
    """A script as by `python`."""
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _rank(arguments: list[str]) -> int:
    return rank.leave(rank.run_script(arguments[0], []))


_MAINS = {"run": launch.main, "node": _node_alone, "plain": _plain, "rank": _rank}


def _folders(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


_PATH = sys.path[1 + len(_folders(os.environ)) :]
"""Where every Python looks for modules, after its own folder and those of PYTHONPATH."""


def _run(env: Mapping[str, str], main: Callable[[], int]) -> None:
    """Be a process that has just begun, with this environment, and end as its `main` says."""
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [str(Path.cwd()), *_folders(env), *_PATH]
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    code = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Node:
    """A forked node launcher, with what `ones-run` uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stdin: int, start_new_session: bool) -> None:
        self._command = command
        self.returncode: int | None = None
        everything = signal.valid_signals()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        self.pid = os.fork()
        if self.pid == 0:
            for number in everything - {signal.SIGKILL, signal.SIGSTOP}:
                if callable(signal.getsignal(number)):  # which no new program keeps
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            if start_new_session:
                os.setsid()
            os.closerange(3, 1024)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(3)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _run(env, lambda: node.main(command[3:]))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended. Raises `subprocess.TimeoutExpired`."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self._command, timeout)
            time.sleep(0.02)
        return code


def _popen(command: Sequence[str], **options: Any) -> Any:
    """A node launcher is forked; a launcher that starts it is what it is."""
    return (_Node if [*command[1:3]] == NODE else subprocess.Popen)(command, **options)


class _Subprocess:
    """The module `subprocess` as `ones-run` sees it, where a node launcher is a fork."""

    DEVNULL, TimeoutExpired, run, Popen = subprocess.DEVNULL, subprocess.TimeoutExpired, subprocess.run, _popen
