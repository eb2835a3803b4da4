"""The few system calls that Python 3.10 has no name for. Standard library only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2
CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {kind or source} on {target}")


def bind(source: str, target: str, *, writable: bool) -> None:
    """Show `source` at `target`, with whatever is mounted below it."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if not writable:
        # A bind takes its flags from the source; read-only needs a second call.
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def detach(target: str) -> None:
    """umount2(2), lazily."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int) -> None:
    """setns(2), for whatever kind of namespace `fd` is."""
    _check(_libc.setns(fd, 0), "setns")


def die_with_parent(signal_number: int) -> None:
    """Have this process sent a signal when the thread that started it ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def loopback_up() -> None:
    """Bring up `lo`, which a new network namespace has but leaves down.

    It gets a second address, one reserved for documentation: where 127.0.0.1 is the only one, the
    C library holds that there is no IPv4 (AI_ADDRCONFIG), and slurmctld cannot open its port.
    """
    get_flags, set_flags, set_address, up = 0x8913, 0x8914, 0x8916, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        (_, flags) = struct.unpack("16sh14x", fcntl.ioctl(handle, get_flags, request))
        fcntl.ioctl(handle, set_flags, struct.pack("16sh14x", b"lo", flags | up))
        address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton("192.0.2.1"))
        fcntl.ioctl(handle, set_address, struct.pack("16s16s", b"lo:1", address))
