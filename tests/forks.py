"""Commands as forks of a process that has imported them: a start takes a tenth of a second of the processor instead of
two. Commands of ours are forked in a box, pytest's workers on the host (`tests.workers`).

    forks.py serve SOCKET                               in the box, as root
    forks.py SOCKET UID GID CWD -- COMMAND...           on the host, in the place of `tests/cluster/enter.py`

The second stands for its command as `enter.py` does: signals reach the command, it ends as the command ended, and a
command whose stand-in was killed is killed. What is not the real thing: imports, and that all starts hash strings
alike. `tests.endtoend.warm` says which commands are forked in a box; services and jobs never are.
"""

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
MODULES = (
    *(
        f"slurm_ones.cli.{name}"
        for name in ("run", "jobs", "status", "report", "check", "doctor", "by_hand", "import_", "plugin")
    ),
    *("slurm_ones.slurm.connect", "ones_db.migrate", "alembic.command", "sqlalchemy.dialects.sqlite"),
    *("scipy.optimize", "scipy.special", "tests.endtoend.killed", "tests.endtoend.scripted"),
)
"""What forks have imported."""
CREDENTIALS = struct.Struct("3i")


def ask(
    path: str, uid: int, gid: int, cwd: str, command: "list[str]", files: "tuple[int, int, int]" = (0, 1, 2)
) -> "tuple[int, socket.socket]":
    """Have the server fork a command. Returns its process, and where its exit code comes; who closes that kills it."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Slurm's number of a process in a box is another than the host's: this has the kernel say the host's.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    server.connect(path)
    request = json.dumps([uid, gid, cwd, command, dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)
    _, ancillary, _, _ = server.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
    return CREDENTIALS.unpack(ancillary[0][2])[0], server


def exit_code(server: socket.socket) -> int:
    """Wait for a command's exit code, -n after signal n."""
    said = server.recv(8)
    return int.from_bytes(said, "little", signed=True) if said else -signal.SIGKILL


def stand_in(path: str, uid: str, gid: str, cwd: str, command: "list[str]") -> None:
    """Have the server fork a command, and be it until it ends."""
    passed_on = {getattr(signal, name) for name in PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    pid, server = ask(path, int(uid), int(gid), cwd, command)
    for number in passed_on:
        signal.signal(number, lambda number, frame: _signal(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = exit_code(server)
    if status < 0:
        if -status != signal.SIGKILL:  # which nobody may handle
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def load() -> None:
    import importlib

    for name in MODULES:
        importlib.import_module(name)


def listening(path: str) -> socket.socket:
    from pathlib import Path

    asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    asked.bind(f"{path}.new")
    asked.listen(64)
    Path(f"{path}.new").rename(path)  # who waits for it finds one that listens
    return asked


def serve(asked: socket.socket, load: "Callable[[], None]", end: "int | None" = None) -> "list[str]":
    """Answer requests until somebody closes `end`; returns in each fork, with its command."""
    import gc
    import select

    loaded = False
    keepers: list[int] = []
    waited_for = [asked] if end is None else [asked, end]
    while True:
        if end in select.select(waited_for, [], [])[0]:
            sys.exit()
        way, _ = asked.accept()
        if not loaded:
            load()
            gc.freeze()
            loaded = True
        keepers.append(os.fork())
        if keepers[-1] == 0:
            asked.close()
            command = _keep(way)
            if command is not None:
                return command
        way.close()
        keepers = [pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _keep(way: socket.socket) -> "list[str] | None":
    """Fork a command, say its exit code, and kill it if its stand-in is gone. Returns in the command's process."""
    import select

    size, files, _, _ = socket.recv_fds(way, 8, 3)
    request = json.loads(way.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
    child = os.fork()
    if child == 0:
        os.setsid()
        way.send(b"\0")  # with this process's number
        return _become(files, *request)
    for file in (0, 1, 2, *files):
        os.close(file)
    ended = os.pidfd_open(child)
    if ended not in select.select([way, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        way.send(status.to_bytes(8, "little", signed=True))
    os._exit(0)


def _become(
    files: "list[int]", uid: int, gid: int, cwd: str, command: "list[str]", env: "dict[str, str]"
) -> "list[str]":
    """Be a process that has just begun, and prints its stacks at SIGQUIT."""
    import faulthandler
    import random
    import time

    import numpy

    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1024)
    # The server's were made for its own files, which one may seek in.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.register(signal.SIGQUIT)
    if uid != os.getuid() or gid != os.getgid():
        os.setgroups([gid])
        os.setgid(gid)
        os.setuid(uid)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    random.seed()
    numpy.random.seed()
    return command


def run(command: "list[str]") -> None:
    """What the command does: a program of ours, or `python -m MODULE`."""
    import runpy
    from pathlib import Path

    if command[1:2] == ["-m"]:
        sys.path[0] = str(Path.cwd())
        sys.argv = command[2:]
        sys.modules.pop(command[2], None)
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        from slurm_ones.cli import main

        sys.path[0] = str(Path(sys.executable).parent)
        sys.argv = command
        main()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run(serve(listening(sys.argv[2]), load))
    else:
        stand_in(*sys.argv[1:5], sys.argv[6:])
