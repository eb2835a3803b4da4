"""Whether the companion's memory stays flat, tick after tick.

    python benchmarks/memory.py --ticks 10000 --json memory.json

The companion itself ticks on a simulated cluster, where jobs come, are resized and go. After a first tenth of the ticks
its memory is taken as a base, and again after each further tenth: what the process holds (RSS), and what Python has
allocated (tracemalloc) outside the simulator, whose own books of all jobs grow. Printed is the growth from the base to
the end, and the modules that grew most. With --no-trace RSS alone is taken, at full speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_ones.companion import Tick
from slurm_ones.simulate.engines.companion_engine import WarningLog, companion_settings, fast_directory, run_companion
from slurm_ones.simulate.engines.world import ClusterSpec, World
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.workloads.generate import generate, offered

MIB = float(1 << 20)
NOT_OURS = ("*/slurm_ones/simulate/*", "*/benchmarks/memory.py", "*/tracemalloc.py", "<frozen*")
SAMPLES = 10
LOAD = 0.6


def rss() -> float:
    """MiB of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status names no VmRSS")


def traced() -> tracemalloc.Snapshot:
    """What Python has allocated outside the simulator."""
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

    def take(self, tick: int, jobs: int, live: int) -> None:
        gc.collect()
        sample: dict[str, Any] = {"tick": tick, "rss_mib": round(rss(), 2), "jobs_ended": jobs, "jobs_live": live}
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


def measure(ticks: int, *, interval_s: float, nodes: int, gpus: int, policy: str, seed: int, trace: bool) -> Samples:
    """So many ticks under a workload that lasts as long."""
    spec = ClusterSpec(nodes, gpus)
    hours = ticks * interval_s / 3600.0
    # About one job for each 10 ticks; each trains so long that they ask for `LOAD` of the cluster, so that as many come
    # as go, and no queue grows.
    workload = generate("uniform", jobs=max(ticks // 10, 5), seed=seed, gpus=spec.gpus, gpus_per_node=gpus, hours=hours)
    share = LOAD / offered(workload, spec.gpus, gpus)
    workload = replace(workload, submissions=tuple(replace(s, epochs=share) for s in workload.submissions))
    samples = Samples(ticks, trace)
    with (
        tempfile.TemporaryDirectory(prefix="ones-memory-", dir=fast_directory()) as name,
        WarningLog().recording() as log,
    ):
        directory = Path(name)
        settings = companion_settings(spec, directory, {}, tick_s=interval_s, policy=policy, seed=seed)
        world = World(workload, spec, directory, ClusterSettings(), seed=seed)
        done = ended = 0

        def on_tick(tick: Tick) -> bool:
            nonlocal done, ended
            done += 1
            # What the simulator keeps of jobs that have ended is for its studies.
            for job_id in [id_ for id_ in world.trainings if world.cluster.jobs[id_].ended]:
                del world.trainings[job_id]
                ended += 1
            if done % samples.every == 0:
                samples.take(done, ended, world.cluster.live)
            return done >= ticks

        with run_companion(world, settings, log, on_tick):
            pass
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ticks", type=int, default=10_000)
    parser.add_argument("--interval", type=float, default=60.0, help="simulated seconds between ticks")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4, help="of a node")
    parser.add_argument("--policy", default="ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.no_trace:
        tracemalloc.start()
    asked = {name: getattr(args, name) for name in ("nodes", "gpus", "policy", "seed")}
    samples = measure(args.ticks, interval_s=args.interval, trace=not args.no_trace, **asked)
    first, last = samples.taken[0], samples.taken[-1]
    result = {
        "ticks": args.ticks,
        **asked,
        "jobs_ended": last["jobs_ended"],
        "samples": samples.taken,
        "rss_growth_mib": round(last["rss_mib"] - first["rss_mib"], 2),
        "python_growth_mib": None if args.no_trace else round(last["python_mib"] - first["python_mib"], 3),
        "grown": samples.grown(),
    }
    for one in result["grown"]:
        print(f"{one['kib']:>10.1f} KiB  {one['where']}")
    print(
        f"from tick {first['tick']} to {last['tick']}, {last['jobs_ended']} jobs ended: RSS {first['rss_mib']} MiB and"
    )
    print(f"{result['rss_growth_mib']:+.2f} MiB; Python's own outside the simulator {result['python_growth_mib']} MiB")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
