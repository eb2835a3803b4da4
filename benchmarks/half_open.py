"""How long a viewer of the live page waits while another user of the machine holds half-open connections.

    python benchmarks/half_open.py --seconds 60

`slurm-ones web` serves an empty database. A child opens connections as another user (root is needed for that), sends
half of a header on each, and opens a new one for each that the server ends. The viewer asks for the page twice a
second, with the token.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db import Store, migrate

STRANGER = 65534


def attack(port: int, count: int) -> None:
    """Hold this number of connections, for ever."""
    os.setuid(STRANGER)
    watched = selectors.DefaultSelector()
    while True:
        for _ in range(min(count - len(watched.get_map()), 100)):
            with suppress(OSError):
                one = socket.socket()
                one.settimeout(1.0)
                one.connect(("127.0.0.1", port))
                one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
                watched.register(one, selectors.EVENT_READ)
        for key, _ in watched.select(0.01):
            watched.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]


def main() -> None:
    """Print what the viewer saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=300.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/ones.sqlite"
        migrate.upgrade(url)
        Store.open(url, "bench").close()
        command = [sys.executable, "-m", "slurm_ones.cli", "web", "--port=0", f"--database={url}"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = next(found[1] for line in server.stdout if (found := re.search(r"(http://\S+)", line)))
        port = int(re.findall(r":(\d+)/", address)[0])
        child = os.fork()
        if not child:
            try:
                attack(port, asked.connections)
            finally:
                os._exit(1)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        waits, failed, until = list[float](), 0, time.monotonic() + asked.seconds
        try:
            while time.monotonic() < until:
                began = time.monotonic()
                try:
                    opener.open(address, timeout=30.0).read()
                    waits.append(time.monotonic() - began)
                except OSError:
                    failed += 1
                time.sleep(0.5)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            server.terminate()
            server.wait()
    print(
        f"{len(waits)} answers, {failed} failed; median {statistics.median(waits) * 1000:.0f} ms, "
        f"most {max(waits) * 1000:.0f} ms; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
