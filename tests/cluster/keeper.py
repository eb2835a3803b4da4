"""The process on the host that keeps one box: starts it, ends it with its owner, tidies up.

    python -m tests.cluster.keeper SPEC READY_FD

The keeper waits for one of three: the box's first process ends, the owner ends (a test run, say,
however it ends, SIGKILL included), or SIGTERM comes. In all three the box is gone afterwards. Were
the keeper itself killed, the box's first process would be killed by the kernel (die_with_parent).
Standard library only; single-threaded, since die_with_parent is about threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import traceback
from pathlib import Path

from . import cgroups, linux
from .inside import be_the_first_process
from .spec import LOCK, PIDS, Spec


def keep(spec: Spec, ready_fd: int) -> int:
    """Start the box of `spec`, write {"error": null or why} to `ready_fd`, and keep the box."""
    folder = Path(spec.folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # A process descriptor, unlike a pid, cannot come to mean somebody else.
    watched = [os.pidfd_open(spec.owner)] if spec.owner else []
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(stop_write)
    signal.signal(signal.SIGTERM, lambda *_: None)
    linux.unshare(linux.CLONE_NEWPID)
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go_read, 1)
        _first_process(spec, ready_fd)
    os.close(ready_fd)
    # Only here is it known how the host numbers the box's first process.
    (folder / PIDS).write_text(json.dumps({"keeper": os.getpid(), "init": child}))
    os.write(go_write, b"!")
    watched += [os.pidfd_open(child), stop_read]
    select.select(watched, [], [])
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if spec.boots:
        cgroups.remove(spec.name)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _first_process(spec: Spec, ready_fd: int) -> None:
    linux.die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ready() -> None:
        os.write(ready_fd, json.dumps({"error": None}).encode())
        os.close(ready_fd)

    try:
        be_the_first_process(spec, ready)
    except BaseException as why:
        traceback.print_exc()
        os.write(ready_fd, json.dumps({"error": str(why)}).encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(keep(Spec.read(Path(sys.argv[1])), int(sys.argv[2])))
