"""Whether the companion's memory stays flat, tick after tick.

    python benchmarks/memory.py --ticks 10000 --json memory.json

The companion itself ticks in a process of its own, and asks another one, which holds the simulated cluster, where jobs
come, are resized and go: what the simulator keeps of all jobs is not in the figures. The companion's memory is taken
after each tenth of the ticks: what its process holds (RSS), how many descriptors are open, and with --trace what Python
has allocated (tracemalloc), and the lines of code whose memory grew most. Printed is the growth to the end from the
steady state on, which begins with the first sample at which the bounded stores of histories are full (`FULL` jobs
ended), and the slope of RSS over the second half of the ticks. A run that does not come so far counts from its first
sample, and says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db.history import SPARE
from slurm_ones.companion import Tick
from slurm_ones.simulate.run import WarningLog, companion_settings, fast_directory, run_companion
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.workloads.generate import generate, offered
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World

MIB = float(1 << 20)
NOT_OURS = ("*/benchmarks/memory.py", "*/tracemalloc.py", "<frozen*")
SAMPLES = 10
FULL = 200 + SPARE
"""Ended jobs at which a companion remembers no more of them: those that others learn from, and the spare ones."""
LOAD = 0.6


def rss() -> float:
    """MiB of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status names no VmRSS")


def traced() -> tracemalloc.Snapshot:
    """What Python has allocated for the companion."""
    filters = [tracemalloc.Filter(False, pattern) for pattern in NOT_OURS]
    return tracemalloc.take_snapshot().filter_traces(filters)


class Samples:
    """Taken in the course of the ticks."""

    def __init__(self, ticks: int, trace: bool) -> None:
        self.every = max(ticks // SAMPLES, 1)
        self.trace = trace
        self.taken: list[dict[str, Any]] = []
        self.first: tracemalloc.Snapshot | None = None
        self.last: tracemalloc.Snapshot | None = None
        self.begun = time.monotonic()

    @property
    def base(self) -> dict[str, Any]:
        """The first sample of the steady state; of a run without one the first."""
        return next((sample for sample in self.taken if sample["jobs_ended"] >= FULL), self.taken[0])

    def take(self, tick: int, jobs: int, live: int) -> None:
        gc.collect()
        sample: dict[str, Any] = {"tick": tick, "rss_mib": round(rss(), 2), "jobs_ended": jobs, "jobs_live": live}
        sample["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
        if self.trace:
            self.last = traced()
            self.first = self.first or self.last
            sample["python_mib"] = round(sum(stat.size for stat in self.last.statistics("filename")) / MIB, 3)
        self.taken.append(sample)
        print(f"{sample}  ({time.monotonic() - self.begun:.0f} s)", file=sys.stderr, flush=True)

    def grown(self, most: int = 10) -> list[dict[str, Any]]:
        """The lines of code whose memory grew most."""
        if self.first is None or self.last is None:
            return []
        stats = self.last.compare_to(self.first, "lineno")[:most]
        return [{"where": str(s.traceback), "kib": round(s.size_diff / 1024, 1)} for s in stats]


def slope(taken: list[dict[str, Any]]) -> float:
    """KiB of RSS that each tick of the second half added, by least squares."""
    half = taken[len(taken) // 2 :]
    return 1024 * statistics.linear_regression([s["tick"] for s in half], [s["rss_mib"] for s in half]).slope


def work(ticks: int, interval_s: float, jobs: int, spec: ClusterSpec, seed: int) -> Workload:
    """Jobs that train so long that they ask for `LOAD` of the cluster: as many come as go, and no queue grows."""
    hours = ticks * interval_s / 3600.0
    found = generate("uniform", jobs=jobs, seed=seed, gpus=spec.gpus, gpus_per_node=spec.gpus_per_node, hours=hours)
    share = LOAD / offered(found, spec.gpus, spec.gpus_per_node)
    return replace(found, submissions=tuple(replace(s, epochs=share) for s in found.submissions))


# -- the process of the simulated cluster -----------------------------------------------------------------------------


def serve(pipe: Connection, workload: Workload, spec: ClusterSpec, seed: int, directory: Path) -> None:
    """Answer what the companion asks of its client, and let time pass when it waits, until it hangs up."""
    world = World(workload, spec, directory, ClusterSettings(), seed=seed)
    ended = 0

    def forget() -> tuple[int, int]:
        """What the simulator keeps of jobs that have ended is for its studies."""
        nonlocal ended
        for job_id in [id_ for id_ in world.trainings if world.cluster.jobs[id_].ended]:
            del world.trainings[job_id]
            ended += 1
        return ended, world.cluster.live

    pipe.send(world.timeline.now)
    while True:
        try:
            of, name, arguments, options = pipe.recv()
        except EOFError:
            return
        own = {"forget": forget, "empty": lambda: world.cluster.empty}
        asked = own.get(name) or getattr(world.client if of == "client" else world, name)
        try:
            answer = asked(*arguments, **options)
        except Exception as error:
            answer = error
        pipe.send((answer, world.timeline.now))


# -- the process of the companion -------------------------------------------------------------------------------------


@dataclass
class Clock:
    """The other process's time, as of its last answer."""

    now: float

    def __call__(self) -> float:
        return self.now


class Served:
    """Whatever is asked of it, the other process answers: the client, or the world."""

    name = "simulated"

    def __init__(self, of: str, pipe: Connection, clock: Clock) -> None:
        self._of, self._pipe, self._clock = of, pipe, clock

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **options: Any) -> Any:
            self._pipe.send((self._of, name, arguments, options))
            answer, self._clock.now = self._pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


class ServedWorld(Served):
    """What the companion's engine uses of a world."""

    def __init__(self, pipe: Connection, directory: Path) -> None:
        self.timeline = Clock(pipe.recv())
        super().__init__("world", pipe, self.timeline)
        self.directory = directory
        self.client = Served("client", pipe, self.timeline)

    @property
    def cluster(self) -> SimpleNamespace:
        """What a wait asks of the cluster."""
        return SimpleNamespace(empty=self.empty())


def measure(
    ticks: int, *, interval_s: float, jobs: int, nodes: int, gpus: int, policy: str, seed: int, trace: bool
) -> Samples:
    """Tick under a workload that lasts as long."""
    spec = ClusterSpec(nodes, gpus)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with (
        tempfile.TemporaryDirectory(prefix="ones-memory-", dir=fast_directory()) as name,
        WarningLog().recording() as log,
    ):
        directory = Path(name)
        workload = work(ticks, interval_s, jobs, spec, seed)
        other = context.Process(target=serve, args=(theirs, workload, spec, seed, directory), daemon=True)
        other.start()
        theirs.close()
        world = ServedWorld(ours, directory)
        settings = companion_settings(spec, directory, {}, tick_s=interval_s, policy=policy, seed=seed)
        samples = Samples(ticks, trace)
        done = 0

        def on_tick(tick: Tick) -> bool:
            nonlocal done
            done += 1
            ended, live = world.forget()
            if done % samples.every == 0:
                samples.take(done, ended, live)
            return done >= ticks

        with run_companion(world, settings, log, on_tick):  # type: ignore[arg-type]
            pass
        ours.close()
        other.join(10)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ticks", type=int, default=10_000)
    parser.add_argument("--interval", type=float, default=60.0, help="simulated seconds between ticks")
    parser.add_argument("--jobs", type=int, help="one for each 10 ticks")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4, help="of a node")
    parser.add_argument("--policy", default="ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="what Python allocates too, several times slower")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.trace:
        tracemalloc.start()
    args.jobs = args.jobs or max(args.ticks // 10, 5)
    asked = {name: getattr(args, name) for name in ("jobs", "nodes", "gpus", "policy", "seed")}
    samples = measure(args.ticks, interval_s=args.interval, trace=args.trace, **asked)
    first, last = samples.base, samples.taken[-1]
    result = {
        "ticks": args.ticks,
        **asked,
        "jobs_ended": last["jobs_ended"],
        "samples": samples.taken,
        "rss_slope_kib": round(slope(samples.taken), 3),
        "rss_growth_mib": round(last["rss_mib"] - first["rss_mib"], 2),
        "python_growth_mib": round(last["python_mib"] - first["python_mib"], 3) if args.trace else None,
        "grown": samples.grown(),
    }
    for one in result["grown"]:
        print(f"{one['kib']:>10.1f} KiB  {one['where']}")
    if first["jobs_ended"] < FULL:
        print(f"no steady state: fewer than {FULL} jobs had ended")
    print(
        f"from tick {first['tick']} to {last['tick']}, {last['jobs_ended']} jobs ended: RSS {first['rss_mib']} MiB and"
    )
    print(f"{result['rss_growth_mib']:+.2f} MiB, {result['rss_slope_kib']} KiB a tick in the second half of them")
    if args.trace:
        print(f"Python's own: {result['python_growth_mib']:+} MiB")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
