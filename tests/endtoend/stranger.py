"""Another user of a job's node, who tries to join its training.

`python -m tests.endtoend.stranger HOST PORT PLACE UID`: until he is ended he connects to everything that the job's user
listens at, as gloo's ranks do and as nobody does, and each turn tries what was once enough: to read the board, to say
that all is lost, to join as a block. What he got he writes to stdout, a line each.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ones_wrapper.network.client import StoreClient
from ones_wrapper.network.proof import MOST_UNPROVEN
from ones_wrapper.network.secret import JobSecret

LISTENS = "0A"
HELD = 40


def listening(user: int) -> set[int]:
    """Ports at which processes of a user listen on this machine, which everybody may know."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and int(words[7]) == user:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def knock(host: str, port: int, words: bytes) -> socket.socket | None:
    """A connection that begins with these words and then says nothing."""
    with contextlib.suppress(OSError):
        connection = socket.create_connection((host, port), 0.5)
        connection.sendall(words)
        return connection
    return None


def join(host: str, port: int, place: str) -> None:
    """What a member does, with a secret of the stranger's own."""
    for role in ("member", "host", "meet"):
        try:
            board = StoreClient(host, port, JobSecret.fresh(), role, place, 2.0)
            print("joined as", role, board.ask("keys", b""), flush=True)
            board.ask("set", b"lost", b"so says a stranger")
        except OSError:
            pass


def read_as_torch(host: str, port: int) -> None:
    """What was enough when the board was torch's store."""
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        print("read", store.list_keys(), flush=True)
        PrefixStore("ones", store).set("lost", "so says a stranger")
    except (RuntimeError, ValueError):
        pass


def main(host: str, port: int, place: str, user: int) -> None:
    """Try until ended."""
    held: list[socket.socket] = []
    numbers = [struct.pack("<q", number) for number in range(4)]
    others = [b"", b"GET / HTTP/1.0\r\n\r\n", struct.pack("!I", 0xFFFFFFFF), b"\0" * MOST_UNPROVEN]
    until, next_try = time.monotonic() + 600, 0.0
    print("begins", flush=True)
    while time.monotonic() < until:
        for open_port in sorted(listening(user)):
            for words in (*numbers, *others):
                if (connection := knock(host, open_port, words)) is not None:
                    held.append(connection)
        while len(held) > HELD:
            held.pop(0).close()
        if time.monotonic() > next_try:
            next_try = time.monotonic() + 5.0
            join(host, port, place)
            read_as_torch(host, port)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
