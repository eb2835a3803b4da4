"""A whole tick of the companion over a real slurmctld's queue: seconds by part, RPCs, memory.

The cluster is the tests' own on this machine, with emulated nodes: many real slurmds, whose CPUs and GPUs are made up.
The elastic jobs are real batch jobs that run there and sleep; what they would report, one process writes into their
directories in the wrapper's format. The other jobs are held, but for some that wait for more nodes than are free.
Before each tick every elastic job has reported `--lines` times: a minute of reports every 5 s, in less time.

Three sizes of the queue, each ten times the one before, show how RPCs and seconds grow. At the largest each client and
each database is measured: a first tick, in which every job is new, and then `--ticks`, whose medians are told. There
the companion acts: it orders drains, which these jobs do not answer, so that `resize.max_open` resizes are under way.
RPCs are counted by `sdiag` in ticks in which it only advises, and as it acts. Seconds are of the clock and of the
processor, the commands that it runs included, slurmctld and the database's server not.

    OMP_NUM_THREADS=1 python benchmarks/tick.py --json tick.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db import Store, migrate
from ones_wrapper.protocol import SPEC, Hello, Spec, Throughput, directory_name, encode, encode_report, reports_name
from slurm_ones.companion import Companion
from slurm_ones.config import ResizeSettings, Settings
from slurm_ones.slurm.client import SlurmClient
from slurm_ones.slurm.command import CommandClient

SIZES = (1, 1, 1, 1, 1, 2, 2, 2, 4, 4)
"""GPUs of elastic jobs, one as likely as another."""
COMMENT = "ones: gpus=1-16 batch=64-1024"
SETTLE_S = 3.0


# -- in the cluster: the jobs ---------------------------------------------------------------------------------------


def submit(count: int, kind: str) -> None:
    """Submit so many jobs as the user who runs this: elastic ones, held ones, or ones that wait."""
    sizes = random.Random(count)
    for number in range(count):
        name = f"{kind}-{number % 50}"
        if kind == "elastic":
            # Not through PySlurm, which gives every job a task count.
            gres = [f"--gres=gpu:{sizes.choice(SIZES)}", "--cpus-per-gpu=1"]
            command = ["sbatch", f"--job-name={name}", "--nodes=1", *gres, "--requeue", f"--comment={COMMENT}"]
            command += ["--time=1200", "--output=/dev/null", "--chdir=/scratch", "--wrap=exec sleep 100000"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        else:
            _submit_rigid(name, kind == "held")


def _submit_rigid(name: str, held: bool) -> None:
    import pyslurm

    pyslurm.JobSubmitDescription(
        name=name,
        script="#!/bin/sh\nexec sleep 100000\n",
        standard_output="/dev/null",
        working_directory="/scratch",
        time_limit="20:00:00",
        nodes=1 if held else 200,
        gres_per_node="gpu:1" if held else "gpu:16",
        cpus_per_gpu=1,
        **({"priority": 0} if held else {}),
    ).submit()


class Reporter:
    """Writes what the elastic jobs would report."""

    def __init__(self) -> None:
        jobs = CommandClient().snapshot().jobs.values()
        self.jobs = [job for job in jobs if job.comment == COMMENT and job.running]
        self.number = self.step = 0
        self.time = 0.0

    def begin(self) -> None:
        """Every job has just said hello."""
        self.number, self.step, self.time = 1, 0, time.time()
        for job in self.jobs:
            gpus = job.gpus_per_node
            folder = Path(job.work_dir, directory_name(job.job_id))
            folder.mkdir(exist_ok=True)
            (folder / SPEC).write_bytes(encode(Spec(64 * gpus, 1024, 256, 10_000_000, 10)))
            hello = Hello(1, gpus, gpus, 64 * gpus, 1.0, 64 * gpus, 1024, 10_000_000, 10, 0, 0, 0, "")
            (folder / reports_name(0)).write_bytes(encode_report(1, self.time, hello))

    def report(self, lines: int) -> None:
        """So many stretches of training since the last time."""
        began, now = self.time, time.time()
        each = (now - began) / lines
        noise = random.Random(self.number)
        for job in self.jobs:
            gpus = job.gpus_per_node
            batch = 64 * gpus
            text = b""
            for line in range(1, lines + 1):
                samples = 8 * batch
                cursor = samples * (self.step + line)
                stretch = Throughput(
                    epoch=0,
                    step=8 * (self.step + line),
                    cursor=cursor,
                    samples=samples,
                    seconds=0.9 * each * noise.uniform(0.9, 1.0),
                    batch=batch,
                    lr_factor=1.0,
                    loss=2.0,
                    noise=300.0,
                    progress=float(cursor),
                )
                text += encode_report(self.number + line, began + each * line, stretch)
            with Path(job.work_dir, directory_name(job.job_id), reports_name(0)).open("ab") as file:
                file.write(text)
        self.number, self.step, self.time = self.number + lines, self.step + lines, now


def report() -> None:
    """Write what standard input asks for, and say so: `begin`, or a number of lines."""
    reporter = Reporter()
    print(len(reporter.jobs), flush=True)
    for line in sys.stdin:
        if line.strip() == "begin":
            reporter.begin()
        else:
            reporter.report(int(line))
        print("done", flush=True)


# -- in the cluster: the companion ----------------------------------------------------------------------------------


class Parts:
    """Seconds by part of what runs, each without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[float] = []

    def watch(self, owner: Any, names: list[str], part: str) -> None:
        """Count the methods of a class as that part."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            self._open.append(0.0)
            try:
                return method(*arguments, **options)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._open.pop()
                if self._open:
                    self._open[-1] += took

        return timed


def watched() -> Parts:
    """The parts of a tick."""
    from slurm_ones.act.actor import Actor
    from slurm_ones.jobs.observer import Observer
    from slurm_ones.learn.learner import Learner
    from slurm_ones.ones.ones import Ones

    parts = Parts()
    parts.watch(Store, [name for name, value in vars(Store).items() if callable(value) and name[0] != "_"], "store")
    parts.watch(Observer, ["collect"], "reports")
    parts.watch(Observer, ["observe"], "observe")
    parts.watch(Learner, ["look", "about", "finished"], "learn")
    parts.watch(Ones, ["decide"], "decide")
    parts.watch(Companion, ["_decide"], "views")
    parts.watch(Actor, ["act", "advance"], "act")
    return parts


def rpcs() -> Counter[str]:
    """RPCs that slurmctld has answered, without those of its nodes and of this question."""
    text = CommandClient().run(["sdiag"])
    found = re.findall(r"^\s*(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)", text, re.MULTILINE)
    return Counter({name: int(n) for name, n in found if not re.search("STATS_INFO|COMPLETE|STEP|PROLOG", name)})


def processor() -> float:
    """Seconds of the processor, of this process and of the commands that it ran."""
    own, commands = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + commands.ru_utime + commands.ru_stime


def memory_mb() -> float:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def ask(reporter: subprocess.Popen[str], what: str) -> None:
    assert reporter.stdin is not None and reporter.stdout is not None
    reporter.stdin.write(f"{what}\n")
    reporter.stdin.flush()
    if not reporter.stdout.readline():
        raise SystemExit("the reporter died")


def measure(client_name: str, url: str, ticks: int, lines: int, mode: str) -> None:
    """Ticks of one companion; prints the figures as JSON. Its reporter is at the other end of standard input and
    output: `>` asks it."""
    parts = watched()
    client: SlurmClient = CommandClient()
    if client_name == "pyslurm":
        from slurm_ones.slurm.pyslurm import PySlurmClient

        client = PySlurmClient()
    parts.watch(type(client), ["snapshot"], "snapshot")
    parts.watch(type(client), ["job", "details"], "closer look")
    if not url:
        url = f"sqlite:///{tempfile.mkdtemp()}/ones.sqlite"
    migrate.upgrade(url)
    settings = Settings(mode=mode, resize=ResizeSettings(dwell_s=0), stop_file=Path("/nowhere/stop"), database=url)
    figures = []
    with Store.open(url, "load") as store:
        companion = Companion(settings, client, store, say=lambda line: None)
        for number in range(-1, ticks):
            print("> begin" if number < 0 else f"> {lines}", flush=True)
            sys.stdin.readline()
            before = rpcs()
            parts.seconds.clear()
            began, busy = time.perf_counter(), processor()
            tick = companion.tick()
            took = {"seconds": time.perf_counter() - began, "processor": processor() - busy}
            asked = rpcs()
            asked.subtract(before)
            elastic = tick.observation.elastic.values()
            figures.append(
                {
                    **took,
                    "parts": dict(parts.seconds),
                    "rpcs": {name: count for name, count in sorted(asked.items()) if count},
                    "jobs": len(tick.observation.snapshot.jobs),
                    "elastic": len(elastic),
                    "running": sum(e.job.running for e in elastic),
                    "begun": len(tick.begun),
                    "memory_mb": memory_mb(),
                }
            )
            # Reports are to tell of some seconds at least.
            time.sleep(SETTLE_S)
    print(json.dumps(figures), flush=True)


def bare() -> None:
    """What the queue costs without us: as JSON, in the fields that we ask for, and through PySlurm."""
    import pyslurm

    client = CommandClient()

    def timed(action: Callable[[], object]) -> tuple[float, float]:
        began, busy = time.perf_counter(), processor()
        action()
        return time.perf_counter() - began, processor() - busy

    ways: dict[str, Callable[[], object]] = {
        "squeue --json and json.loads": lambda: json.loads(client.run(["squeue", "--json", "--states=all"])),
        "squeue": lambda: client.run(["squeue", "--states=all"]),
        "Jobs.load": pyslurm.Jobs.load,
        "snapshot by commands": client.snapshot,
    }
    print(json.dumps({name: timed(action) for name, action in ways.items()}))


# -- outside ----------------------------------------------------------------------------------------------------------


class Load:
    """The cluster with its queue."""

    def __init__(self, nodes: int, gpus: int) -> None:
        from tests.cluster import Cluster
        from tests.cluster.cli import Progress
        from tests.cluster.sites import GRES, Partition
        from tests.cluster.spec import Bind
        from tests.db.server import NoServer, Server

        options = "Default=YES OverSubscribe=NO MaxTime=1-00:00:00"
        partition = Partition("gpu", "n", 17001, nodes, 2 * gpus, 1000 * gpus, gpus, options=options)
        # Without accounting: slurmdbd takes longer to note 10,000 jobs than slurmctld to take them.
        site = replace(GRES, partitions=(partition,), max_jobs=60_000, accounting=False)
        self.cluster = Cluster(site, report=Progress())
        self.server: Server | None = None
        try:
            self.server = Server()
            self.server.create()
        except NoServer as error:
            print(error, file=sys.stderr)
        place = [Bind(str(self.server.place), str(self.server.place), writable=True)] if self.server else []
        self.cluster.start(place)
        if not self.cluster.pyslurm:
            raise SystemExit(f"10,000 jobs are submitted through PySlurm: {self.cluster.pyslurm_why}")
        self.reporter: subprocess.Popen[str] | None = None

    def popen(self, *arguments: object, user: str = "root") -> subprocess.Popen[str]:
        command = [self.cluster.python, str(Path(__file__).resolve()), *map(str, arguments)]
        env = {"OMP_NUM_THREADS": "1"}
        return self.cluster.popen(command, user=user, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, *arguments: object, user: str = "root") -> str:
        process = self.popen(*arguments, user=user)
        text = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{arguments} failed")
        return str(text)

    def fill(self, elastic: int, held: int, waiting: int) -> None:
        """Submit so many more, and wait until the elastic ones run."""
        for count, kind, user in ((elastic, "elastic", "alice"), (held, "held", "bob"), (waiting, "waiting", "bob")):
            if count:
                self.run("submit", count, kind, user=user)
        counting = ["squeue", "--noheader", "--user=alice", "--states=pending"]
        until = time.monotonic() + 300
        while self.cluster.run(counting, user="root").stdout.strip():
            if time.monotonic() > until:
                raise SystemExit("the elastic jobs do not start")
            time.sleep(1)
        if self.reporter is not None:
            self.reporter.communicate()
        self.reporter = self.popen("report", user="alice")
        assert self.reporter.stdout is not None
        print(f"{int(self.reporter.stdout.readline())} elastic jobs run", file=sys.stderr)

    def measure(self, client: str, database: str, ticks: int, lines: int, mode: str) -> list[dict[str, Any]]:
        """The figures of each tick, the first first."""
        url = self.server.url(self.server.fresh()) if database == "postgresql" and self.server else ""
        process = self.popen("measure", client, url, ticks, lines, mode)
        assert self.reporter is not None and process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            if not line.startswith(">"):
                found: list[dict[str, Any]] = json.loads(line)
                process.communicate()
                return found
            ask(self.reporter, line[1:].strip())
            process.stdin.write("done\n")
            process.stdin.flush()
        raise SystemExit("the companion died")

    def close(self) -> None:
        self.cluster.stop()
        if self.server is not None:
            self.server.remove()


def summary(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the ticks after the first, medians; the first apart."""
    first, later = figures[0], figures[1:]
    names = sorted({name for figure in later for name in figure["parts"]})
    return {
        **{name: later[-1][name] for name in ("jobs", "elastic", "running")},
        "seconds": statistics.median(figure["seconds"] for figure in later),
        "seconds_all": [round(figure["seconds"], 3) for figure in later],
        "processor": statistics.median(figure["processor"] for figure in later),
        "parts": {name: statistics.median(figure["parts"].get(name, 0.0) for figure in later) for name in names},
        "first_seconds": first["seconds"],
        "first_processor": first["processor"],
        "first_parts": first["parts"],
        "rpcs": [figure["rpcs"] for figure in figures],
        "begun": [figure["begun"] for figure in figures],
        "memory_mb": [round(figure["memory_mb"], 1) for figure in figures],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs in the queue")
    parser.add_argument("--elastic", type=int, default=2_000, help="of them opted in, all running")
    parser.add_argument("--waiting", type=int, default=0, help="of them rigid, waiting and not held")
    parser.add_argument("--ticks", type=int, default=4, help="of each companion, after a first one")
    parser.add_argument("--lines", type=int, default=12, help="reports of each job before each tick")
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--gpus", type=int, default=16, help="of each node")
    parser.add_argument("--only", nargs="*", help="measure these, at the largest queue, such as 'pyslurm postgresql'")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {"cpus": os.cpu_count(), "nodes": asked.nodes, "gpus": asked.nodes * asked.gpus}
    load = Load(asked.nodes, asked.gpus)
    try:
        queued = Counter[str]()
        for share in (0.01, 0.1, 1.0):
            whole = Counter({"all": asked.jobs, "elastic": asked.elastic, "waiting": asked.waiting})
            wanted = Counter({name: round(share * count) for name, count in whole.items()})
            more = wanted - queued
            queued = wanted
            load.fill(more["elastic"], more["all"] - more["elastic"] - more["waiting"], more["waiting"])
            for client in () if asked.only else ("command", "pyslurm"):
                found = load.measure(client, "sqlite", 2, asked.lines, "advise")
                result[f"advise {wanted['all']} {client}"] = summary(found)
                tell(f"{wanted['all']} jobs, {client}, advise", result[f"advise {wanted['all']} {client}"])
        if asked.only is None:
            result["bare"] = json.loads(load.run("bare"))
        for client in ("command", "pyslurm"):
            for database in ("sqlite", "postgresql") if load.server else ("sqlite",):
                name = f"{client} {database}"
                if asked.only is not None and name not in asked.only:
                    continue
                result[name] = summary(load.measure(client, database, asked.ticks, asked.lines, "act"))
                tell(name, result[name])
        result["load"] = os.getloadavg()
    finally:
        load.close()
    print(json.dumps(result.get("bare"), indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def tell(name: str, figures: dict[str, Any]) -> None:
    """One line and one of parts."""
    parts = "  ".join(f"{part} {seconds:.2f}" for part, seconds in figures["parts"].items())
    print(
        f"{name}: {figures['seconds']:.2f} s ({min(figures['seconds_all']):.2f}–{max(figures['seconds_all']):.2f}), "
        f"{figures['processor']:.2f} s of the processor, first {figures['first_seconds']:.2f} s, "
        f"{figures['memory_mb'][-1]:.0f} MB, RPCs {figures['rpcs'][-1]}\n    {parts}",
        flush=True,
    )


ROLES: dict[str, Callable[..., None]] = {
    "submit": lambda count, kind: submit(int(count), kind),
    "report": report,
    "measure": lambda client, url, ticks, lines, mode: measure(client, url, int(ticks), int(lines), mode),
    "bare": bare,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
