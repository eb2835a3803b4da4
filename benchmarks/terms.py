"""What a planned change by a term costs, and where the time goes: two blocks of FSDP2 on this machine.

    python benchmarks/terms.py --changes 10 --parameters 5000000 --json terms.json
    python benchmarks/terms.py --changes 6 --carriers apart memory disk --fsync-ms 300 --write-mb-s 50
    python benchmarks/terms.py --changes 0 --losses 3 --copies 10 0 10 0

Task 0 trains, then tasks 0 and 1, then 0 again, and so on; each change begins a term. The pause is the time between the
ends of two steps around the change, less a usual step of its own size, as the script's own lines show. Its parts are
the times between moments that all ranks have reached, as functions of the wrapper note them. In the same run the bytes
of a checkpoint are copied in memory, and written and fsynced on the job's disk. `late` is what the change costs up to
its fifth step, with the checkpoint that is written behind the training. A slow file system is emulated below the job's
directory: each fsync sleeps, and a checkpoint's writes sleep by their bytes. `apart` emulates a node for each task, by
a folder in memory for each; the network between them is the loopback device.

`--losses N` kills a node of two N times for each value of `--copies`, the steps between copies in other nodes' memory
(0: none). Steps lost are those that are made again. The disk gets a checkpoint every 30 s.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_wrapper.checkpoint import files
from ones_wrapper.files.node_memory import COPY_STEPS
from ones_wrapper.protocol import Checkpoint, First, Hello, Membership
from tests.waiting import until
from tests.wrapper.membership.blocks import Job

LEAST_S, MOST_S = 10.0, 25.0
"""Seconds of training before a loss."""
REST_S = 1.0
"""Seconds of training between two changes."""
LATE = 5
"""Steps after a change whose time `late` counts."""
SCRIPT = """
import json, os, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import ones_wrapper as ones

parameters, folder = int(os.environ["PARAMETERS"]), Path(os.environ["ONES_JOB_DIR"])
width = 1024 if parameters >= 1_100_000 else 256
job = ones.init(batch=32, max_batch=64, max_local_batch=64, epochs=1_000_000,
               checkpoint_every_s=float(os.environ.get("CHECKPOINT_S", "1e9")))
layers = max(1, round(parameters / (width * width + width)))
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
model = job.fsdp(model, modules=torch.nn.Linear)
optimizer = job.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))
rows = torch.randn(640, width, generator=torch.Generator().manual_seed(1))
loader = job.loader(TensorDataset(rows), seed=3)
file = open(folder / f"steps-{os.getpid()}.jsonl", "w", buffering=1)
for _ in job.epochs():
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        if job.updates:
            file.write(json.dumps({"time": time.time(), "step": job.progress.step, "world": job.world}) + "\\n")
    if (folder / "hurry").exists():
        break
"""
MARKS = (
    ("checkpoint", "ones_wrapper.run.keeping", "Keeping.save", "ended"),
    ("ranks end", "ones_wrapper.launch.node", "Ranks.fork", "began"),
    ("ranks meet", "ones_wrapper.api", "before_script", "ended"),
    ("script makes model", "ones_wrapper.run.run", "Run.load", "began"),
    ("state loaded", "ones_wrapper.run.run", "Run.load", "ended"),
    ("first step", "ones_wrapper.run.run", "Run.commit", "ended"),
)
"""Parts of a pause, each with the function of the wrapper whose beginning or end ends the part."""
BEGINS = ("ones_wrapper.run.changing", "ChangingRanks._end_term")
"""Function with which a pause begins."""

Note = tuple[float, int, str, str]
"""Time, process, function, and whether it began or ended."""


def note_functions(path: Path) -> None:
    """Have the functions above write notes, in all blocks that are forked from here on."""

    def noting(name: str, function: Any) -> Any:
        def note(what: str) -> None:
            with path.open("a") as file:
                file.write(json.dumps([time.time(), os.getpid(), name, what]) + "\n")

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            note("began")
            try:
                return function(*args, **kwargs)
            finally:
                note("ended")

        return wrapper

    for module, name in {BEGINS, *(mark[1:3] for mark in MARKS)}:
        holder: Any = importlib.import_module(module)
        *owners, last = name.split(".")
        for owner in owners:
            holder = getattr(holder, owner)
        setattr(holder, last, noting(name, getattr(holder, last)))


def slow_down(directory: Path, fsync_s: float, bytes_per_s: float) -> None:
    """Have all blocks that are forked from here on find the file system of this directory slow."""
    fsync, write = os.fsync, files._write

    def within(handle: int) -> bool:
        return Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(directory)

    def slow_fsync(handle: int) -> None:
        time.sleep(fsync_s if within(handle) else 0.0)
        fsync(handle)

    def slow_write(handle: int, pieces: list[memoryview]) -> int:
        time.sleep(sum(map(len, pieces)) / bytes_per_s if within(handle) else 0.0)
        return write(handle, pieces)

    os.fsync, files._write = slow_fsync, slow_write  # type: ignore[assignment]


def parts_of(notes: list[Note], began: float) -> dict[str, float]:
    """Return the seconds of each part of the pause that began then."""
    after = [note for note in notes if note[0] >= began]
    loaded = {pid for at, pid, name, what in after if name == "Run.load" and at < began + 60}
    firsts: dict[int, float] = {}
    for at, pid, name, what in after:
        if pid in loaded and name == "Run.commit" and what == "ended":
            firsts.setdefault(pid, at)
    over = min(firsts.values())  # all ranks step together, and ranks of later terms do so later
    found, before = {}, began
    for part, _, name, what in MARKS:
        at = max(at for at, _, its, did in after if (its, did) == (name, what) and at <= over)
        found[part], before = at - before, at
    return found


def lines_of(folder: Path) -> list[tuple[int, float, int]]:
    """Return number, end and world size of each rank's steps."""
    lines = [line for path in folder.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
    return [(one["step"], one["time"], one["world"]) for one in map(json.loads, lines)]


def steps_of(folder: Path) -> list[tuple[int, float, int]]:
    """Return number, end and world size of each step, once all ranks have ended it."""
    ends: dict[int, tuple[float, int]] = {}
    for step, at, world in lines_of(folder):
        ends[step] = max(ends.get(step, (0.0, 0)), (at, world))
    return [(step, *ends[step]) for step in sorted(ends)]


def pauses(steps: list[tuple[int, float, int]], count: int = 1) -> list[tuple[int, float]]:
    """Return the new world size of each change, and the time of its first `count` steps beyond the usual."""
    found = []
    for at, ((_, before, old), (_, _, new)) in enumerate(pairwise(steps)):
        if old != new:
            usual = statistics.median(b[1] - a[1] for a, b in pairwise(steps) if a[2] == b[2] == new)
            _, after, world = steps[min(at + count, len(steps) - 1)]
            if world == new:
                found.append((new, after - before - count * usual))
    return found


def raw(size: int, folder: Path) -> dict[str, float]:
    """Time a copy of these bytes in memory, and a write with fsync, in seconds; each the median of five."""
    data, target = bytes(size), bytearray(size)
    copies, writes = [], []
    for number in range(5):
        began = time.perf_counter()
        target[:] = data
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        with (folder / f"raw-{number}").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        writes.append(time.perf_counter() - began)
        (folder / f"raw-{number}").unlink()
    return {"copy_s": statistics.median(copies), "write_s": statistics.median(writes)}


def measure(directory: Path, changes: int, parameters: int, carrier: str, memory: Path) -> dict[str, Any]:
    """Run a job in this directory through these changes, and return its figures. `memory` is for the carrier apart."""
    directory.mkdir(exist_ok=True)
    env = {"PARAMETERS": str(parameters)} | ({"ONES_MEMORY": ""} if carrier == "disk" else {})
    (directory / "train.py").write_text(SCRIPT)
    note_functions(directory / "notes")
    apart = memory if carrier == "apart" else None
    job = Job(directory / "job", script=directory / "train.py", apart=apart, **env)
    try:
        job.start(0)
        job.wait(First)
        for number in range(changes):
            time.sleep(REST_S)
            if number % 2 == 0:
                job.start(1, restart=number // 2)
            job.order(*((0, 1) if number % 2 == 0 else (0,)))
            until(lambda: len(job.of(Membership)) > number + 1, job.errors)  # noqa: B023
        time.sleep(REST_S)
        job.finish(0)
    finally:
        job.kill()
    newest = max((job.directory / "checkpoints").iterdir())
    size = sum(file.stat().st_size for file in newest.iterdir())
    notes: list[Note] = sorted(tuple(json.loads(line)) for line in (directory / "notes").read_text().splitlines())
    begins = [at for at, _, name, what in notes if (name, what) == (BEGINS[1], "began")]
    firsts = [at for before, at in pairwise([0.0, *begins]) if at - before > REST_S / 2]
    parts = [parts_of(notes, at) for at in firsts]
    figures: dict[str, Any] = {"bytes": size, "load": os.getloadavg(), **raw(size, directory)}
    figures["checkpoints_s"] = [[round(one.seconds, 3), round(one.stall_s, 3)] for one in job.of(Checkpoint)]
    for world, kind in ((2, "grow"), (1, "shrink")):
        of = [part for number, part in enumerate(parts) if (number % 2 == 0) == (world == 2)]
        figures[kind] = {
            "pause_s": [round(pause, 3) for its, pause in pauses(steps_of(job.directory)) if its == world],
            "late_s": [round(late, 3) for its, late in pauses(steps_of(job.directory), LATE) if its == world],
            "parts_s": {name: round(statistics.median(part[name] for part in of), 3) for name, *_ in MARKS if of},
        }
    return figures


def lose(directory: Path, losses: int, parameters: int, copies: int, memory: Path) -> dict[str, Any]:
    """Train on two nodes and kill one, `losses` times. Return the steps lost and the steps/s before each loss."""
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(SCRIPT)
    env = {"PARAMETERS": str(parameters), "CHECKPOINT_S": "30", COPY_STEPS: str(copies)}
    job = Job(directory / "job", script=directory / "train.py", apart=memory, **env)
    dice, lost, rates = random.Random(1), [], []
    try:
        at = job.begin(0, 1)
        for number in range(losses):
            job.wait(Checkpoint, lambda one: one.step >= at.step)  # noqa: B023
            began = time.time()
            time.sleep(dice.uniform(LEAST_S, MOST_S))
            known, killed = len(job.of(Hello)), time.time()
            job.blocks[-1].kill()
            until(lambda: job.of(Hello)[known:], job.errors)  # noqa: B023
            job.start(1, restart=number + 1)
            at = job.wait_for(0, 1, after=job.of(Membership)[-1].generation)
            made = lines_of(job.directory)
            last = max(step for step, when, _ in made if when < killed)
            lost.append(max(0, last + 1 - min(step for step, when, _ in made if when > killed)))
            rates.append(len({step for step, when, _ in made if began < when < killed}) / (killed - began))
        job.finish(0, -1)
    finally:
        job.kill()
    return {"copies": copies, "lost": lost, "steps_per_s": [round(rate, 2) for rate in rates]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    carriers = ("apart", "memory", "disk")
    parser.add_argument("--carriers", nargs="+", choices=carriers, default=["memory"], help="in turn")
    parser.add_argument("--fsync-ms", type=float, default=0.0)
    parser.add_argument("--write-mb-s", type=float, default=1e6)
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--copies", type=int, nargs="+", default=[10, 0], help="steps between copies, in turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        slow_down(Path(folder), args.fsync_ms / 1e3, args.write_mb_s * 1e6)
        for number, copies in enumerate(args.copies if args.losses else ()):
            place, apart = (Path(one) / f"lost-{number}" for one in (folder, memory))
            figures.append(lose(place, args.losses, args.parameters, copies, apart) | {"load": os.getloadavg()})
        for number, carrier in enumerate(args.carriers if args.changes else ()):
            place, apart = (Path(one) / str(number) for one in (folder, memory))
            its = measure(place, args.changes, args.parameters, carrier, apart)
            figures.append({"carrier": carrier} | its)
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
