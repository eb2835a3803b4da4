"""Paths that hang: a FIFO for functions that open it, and a FUSE mount whose server takes requests and answers none."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import linux

INIT = 26
_libc = ctypes.CDLL(None, use_errno=True)


def read(path: Path, uid: int) -> bytes:
    """The text of a file; of a FIFO once somebody writes one."""
    return path.read_bytes()


def can_mount() -> bool:
    """This process may mount a file system of its own."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


@contextmanager
def silent_mount(place: Path, process: int | None = None) -> Iterator[None]:
    """A file system over `place` that answers nothing: whoever touches it hangs, and cannot be killed. In the end those
    get errors, and what was there before is there again. It is among the mounts of `process`, by default of this one.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    try:
        _among_mounts(process, linux.mount, "silent", str(place), "fuse.silent", 0, options)
    except OSError:
        os.close(device)
        raise
    server = threading.Thread(target=_serve, args=(device,), daemon=True)
    server.start()
    try:
        yield
    finally:
        _among_mounts(process, _libc.umount2, os.fsencode(place), 1)  # MNT_FORCE: all that hang get an error
        _among_mounts(process, _libc.umount2, os.fsencode(place), 2)  # MNT_DETACH
        server.join(5)
        os.close(device)


def _among_mounts(process: int | None, call: Callable[..., Any], *arguments: object) -> None:
    """Call it in a thread that has moved to the mounts of a process; all other threads keep theirs."""

    def moved() -> None:
        linux.unshare(linux.CLONE_FS)
        with Path(f"/proc/{process or os.getpid()}/ns/mnt").open() as space:
            linux.setns(space.fileno())
        call(*arguments)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(moved).result()


def _serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            return
        _, opcode, unique = struct.unpack_from("=IIQ", request)
        if opcode == INIT:
            said = struct.pack("=IIIIHHII", 7, 31, 0, 0, 12, 9, 4096, 1).ljust(64, b"\0")
            os.write(device, struct.pack("=IiQ", 16 + len(said), 0, unique) + said)
