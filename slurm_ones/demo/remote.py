"""Client through which the companion's process uses the demo's simulated Slurm, over a socket.

Both ends run as the same user. Before any call, each end proves to the other that it has the demo's key.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from slurm_ones.slurm.client import Refused, SlurmClient, Unreachable

DOOR = "SLURM_ONES_DEMO"
"""Environment variable with port and key; all users of the machine could read the key on a command line."""
CALLS = frozenset(name for name in vars(SlurmClient) if not name.startswith("_")) - {"name"}
"""Methods of `SlurmClient` that can be called over the socket."""


class Served:
    """Server of calls to a `SlurmClient`. Each connection has a thread, and each call holds `lock`."""

    def __init__(self, client: SlurmClient, lock: threading.RLock) -> None:
        self._client, self._lock = client, lock
        self._key = os.urandom(16)
        # Without the key: it would ask for it before it serves the next one, and end at a stranger's long message.
        self._listener = Listener(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="demo-door", daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for a process that uses `RemoteClient`."""
        return {DOOR: f"{self._listener.address[1]} {self._key.hex()}"}

    def close(self) -> None:
        """Close the server's socket."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except ConnectionError:  # one that went away
                continue
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError, AuthenticationError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            while True:
                name, values, named = connection.recv()
                connection.send(self._call(name, values, named))

    def _call(self, name: str, values: Any, named: Any) -> tuple[bool, Any]:
        if name not in CALLS:
            return False, Refused(f"{name!r} is no call of a Slurm client")
        try:
            with self._lock:
                return True, getattr(self._client, name)(*values, **named)
        except Exception as error:  # raised again in the caller
            return False, error


class RemoteClient:
    """`SlurmClient` that sends each call to the demo that started this process."""

    name = "the demo's own Slurm"

    def __init__(self, *, timeout_s: float = 30.0, keepalive: Callable[[], None] = lambda: None) -> None:
        port, _, key = os.environ.get(DOOR, "").partition(" ")
        if not (port.isdigit() and key):
            raise Refused(f"{DOOR} is not set: this client is only for `slurm-ones demo`, which sets it")
        self._timeout_s, self._keepalive = timeout_s, keepalive
        try:
            self._connection = Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key))
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise Unreachable(f"the demo does not answer: {error}") from None

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        return partial(self._ask, name)

    def _ask(self, name: str, *values: Any, **named: Any) -> Any:
        self._keepalive()
        try:
            self._connection.send((name, values, named))
            if not self._connection.poll(self._timeout_s):
                self._connection.close()  # a late answer would pass for that of the next call
                raise Unreachable(f"{name}: no answer of the demo for {self._timeout_s:g} s")
            answered, value = self._connection.recv()
        except (OSError, EOFError) as error:
            raise Unreachable(f"{name}: the demo is gone ({error})") from None
        if not answered:
            raise value
        return value
