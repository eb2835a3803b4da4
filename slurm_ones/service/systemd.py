"""Messages of a companion to systemd: it is ready, alive, reading its settings again, or stopping.

The protocol is sd_notify(3): one datagram of NAME=VALUE lines to the socket that the environment names.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping

FEED_SHARE = 1 / 4
"""Share of the time that systemd allows between two pings; it asks for half at most."""
LONGEST = 200
"""Characters of a status line."""


class Notifier:
    """One service manager, or none: then nothing is sent.

    Never blocks and never raises: a service manager that does not listen must not stop a companion.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Takes its variables out of the environment, which is not meant for Slurm's commands."""
        address = environment.pop("NOTIFY_SOCKET", "")
        allowed = environment.pop("WATCHDOG_USEC", "")
        meant = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        # A leading @ stands for an abstract socket.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self._every_s = int(allowed) / 1e6 * FEED_SHARE if allowed.isdecimal() and meant == str(os.getpid()) else None
        self._fed = float("-inf")

    @property
    def listens(self) -> bool:
        """There is a service manager."""
        return self._socket is not None

    def ready(self, words: str) -> None:
        """The companion works, for the first time or after `reloading`."""
        self._send("READY=1", f"STATUS={_line(words)}")

    def status(self, words: str) -> None:
        """What `systemctl status` shows."""
        self._send(f"STATUS={_line(words)}")

    def reloading(self) -> None:
        """Settings are read again; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, words: str, within_s: float) -> None:
        """The companion leaves, and takes that long at most: systemd waits for it, whatever its own limit."""
        self._send("STOPPING=1", f"STATUS={_line(words)}", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")

    def alive(self) -> None:
        """Feed the watchdog, where there is one and it is time; cheap enough for every turn of a loop."""
        now = time.monotonic()
        if self._every_s is not None and now - self._fed >= self._every_s:
            self._fed = now
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)


def _line(words: str) -> str:
    return " ".join(words.split())[:LONGEST]
