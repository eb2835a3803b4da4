"""How long nobody acts when the companion that leads is killed or paused.

    python benchmarks/failover.py --tries 20 --json failover.json

Two companions, as processes of their own, on one PostgreSQL; a controller of a cluster without jobs. The one that leads
is killed (SIGKILL), or paused (SIGSTOP), at a moment of the tick that is drawn from the seed. The figure is the time
from then to the end of the first tick of the other, in ticks. Of the first kind there is SQLite too, and one in which
PostgreSQL crashes at that moment and is started again a second later.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db import Store, migrate
from ones_db.leader import LeaderLock
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import Settings
from slurm_ones.service.daemon import Daemon
from slurm_ones.service.leadership import Leadership
from slurm_ones.slurm.model import Snapshot
from tests.db.server import Server

CLUSTER = "here"
LIMIT_TICKS = 20.0
AWAY_S = 1.0
"""For so long PostgreSQL is away."""


class Quiet:
    """A controller of a cluster without jobs."""

    name = "quiet"

    def snapshot(self) -> Snapshot:
        return Snapshot(time.time(), {}, {}, {})


def companion(url: str, tick_s: float) -> None:
    """One companion, as `slurm-ones run` makes it; each tick is a line."""
    settings = Settings(tick_s=tick_s)
    with LeaderLock(url, CLUSTER) as lock:
        lead = Leadership(lock, settings.interval_s, say=lambda line: print(line, flush=True))

        def make() -> Companion:
            store = Store.open(url, CLUSTER, term=lead.term)
            return Companion(settings, Quiet(), store, check=lead.check)  # type: ignore[arg-type]

        def on_tick(tick: Tick) -> None:
            print("tick", flush=True)

        Daemon(make, lead=lead).run(threading.Event(), on_tick)


class Process:
    """One companion, and when it said what."""

    def __init__(self, url: str, tick_s: float) -> None:
        command = [sys.executable, __file__, "--companion", url, "--tick-s", str(tick_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said: list[tuple[float, str]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append((time.monotonic(), line.strip()))

    def send(self, number: signal.Signals) -> float:
        """When it was sent."""
        self._process.send_signal(number)
        return time.monotonic()

    def wait_for(self, what: str, since: float, limit_s: float) -> float:
        """When it said that for the first time after a moment. Raises TimeoutError."""
        until = time.monotonic() + limit_s
        while not (found := [at for at, line in list(self.said) if at > since and line.startswith(what)]):
            if time.monotonic() > until:
                raise TimeoutError(f"nobody said {what!r} within {limit_s:.0f} s")
            time.sleep(0.002)
        return found[0]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(
    url: str, how: str, tries: int, tick_s: float, rng: random.Random, server: Server | None = None
) -> list[float]:
    """Ticks without a leader that acts, of each try; `server` crashes at that moment."""
    took, limit_s = [], LIMIT_TICKS * tick_s + 60
    with ExitStack() as stack:

        def start() -> Process:
            made = Process(url, tick_s)
            stack.callback(made.end)
            return made

        leader = start()
        leader.wait_for("tick", 0.0, limit_s)
        standby = start()
        standby.wait_for("stands by", 0.0, limit_s)
        for number in range(tries):
            time.sleep((1 + rng.random()) * tick_s)
            if server is not None:
                server.stop(signal.SIGQUIT)
            gone = leader.send(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            if server is not None:
                time.sleep(AWAY_S)
                server.start()
            took.append((standby.wait_for("tick", gone, limit_s) - gone) / tick_s)
            print(f"{how}, try {number + 1} of {tries}: {took[-1]:.2f} ticks", flush=True)
            if how == "killed":
                leader, standby = standby, start()
                standby.wait_for("stands by", 0.0, limit_s)
            else:
                woken = leader.send(signal.SIGCONT)
                leader.wait_for("stands by", woken, limit_s)
                leader, standby = standby, leader
    return took


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--tries", type=int, default=20, metavar="N", help="of each kind")
    parser.add_argument("--tick-s", type=float, default=3.0, metavar="S", help="seconds between ticks")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments within a tick")
    parser.add_argument("--kind", action="append", help="only these, such as killed")
    parser.add_argument("--companion", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.companion:
        companion(options.companion, options.tick_s)
        return
    rng, found = random.Random(options.seed), dict[str, Any]()
    server = Server()
    try:
        server.create()
        with tempfile.TemporaryDirectory() as folder:
            away = "killed, PostgreSQL away"
            kinds = [(name, server.url(server.fresh())) for name in ("killed", "paused", away)]
            kinds += [("killed, SQLite", f"sqlite:///{folder}/ones.sqlite")]
            kinds = [one for one in kinds if options.kind is None or one[0] in options.kind]
            for name, url in kinds:
                migrate.upgrade(url)
                crashes = server if name == away else None
                took = measure(url, name.partition(",")[0], options.tries, options.tick_s, rng, crashes)
                found[name] = {"median": statistics.median(took), "max": max(took), "n": len(took)}
    finally:
        server.remove()
    found["tick_s"] = options.tick_s
    for name, _ in kinds:
        print(f"{name}: median {found[name]['median']:.2f}, most {found[name]['max']:.2f} ticks of {options.tick_s} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
