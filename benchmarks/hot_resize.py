"""What a resize costs training on a real Slurm: by blocks that join and leave, and by a requeue, in one run.

    python benchmarks/hot_resize.py --cycles 10 --parameters 5000000 --json hot_resize.json

A cycle takes a job through 1 → 2 → 4 → 2 → 1 → 3 → 2 → 1 GPUs: the last but one leaves a block of two GPUs that leads,
whose place a block of one takes. The real companion does it; only its policy is scripted. Pauses are taken from the
times at which the ranks' own steps ended, written down by the training script: the longest gap between the ends of two
steps around the change, less a usual step of that size. Steps vary, so the same is taken where nothing changes, a
second or so after each change: what it shows there is no pause. Needs root on a Debian-like host.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_db import ResizeRecord
from ones_db.shape import Shape
from ones_wrapper.protocol import Membership, decode_report
from slurm_ones.policy.contract import Allocation
from tests.cluster import Cluster, paths
from tests.conftest import quick
from tests.endtoend.harness import Harness
from tests.wrapper.runs import samples_wrong

BATCH = 32
CYCLE = (2, 4, 2, 1, 3, 2, 1)
"""GPUs, from one on."""
SAMPLES = 640
STEPS = 12
"""Steps on each side that say how long a usual one takes."""
LATER = 2 * STEPS
"""So many steps after a change nothing changes."""
BATCH_SCRIPT = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-gpu=1
#SBATCH --time=120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
exec ones-run "$@"
"""
SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import TensorDataset
import ones_wrapper as ones

parameters, step_ms, log = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
width = 1024 if parameters >= 1_100_000 else 256
job = ones.init(batch=32, max_batch=64, max_local_batch=64, epochs=1_000_000)
layers = max(1, round(parameters / (width * width + width)))
model = job.ddp(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
optimizer = job.register(model=model, optimizer=optimizer)
generator = torch.Generator().manual_seed(1)
loader = job.loader(TensorDataset(torch.randn(640, width, generator=generator)), seed=3)
task, restart = os.environ.get("SLURM_ARRAY_TASK_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
file = open(f"{log}/steps-{task}-{restart}-{os.getpid()}.jsonl", "w", buffering=1)
for _ in job.epochs():
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(step_ms / 1000)
        optimizer.step()
        if job.updates:
            line = {"time": time.time(), "task": int(task), "restart": int(restart), "world": job.world}
            file.write(json.dumps(line | {"step": job.progress.step}) + "\\n")
"""
TRAINER = """
import json, os, sys, time
import torch
from transformers import TrainerCallback, TrainingArguments
from ones_wrapper.frameworks.transformers import Trainer

parameters, step_ms, log = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
width = 1024 if parameters >= 1_100_000 else 256
task, restart = os.environ.get("SLURM_ARRAY_TASK_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
file = open(f"{log}/steps-{task}-{restart}-{os.getpid()}.jsonl", "w", buffering=1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = max(1, round(parameters / (width * width + width)))
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        time.sleep(step_ms / 1000)
        return {"loss": self.net(x).square().mean()}


class Note(TrainerCallback):
    def on_step_end(self, *_, **__):
        line = {"time": time.time(), "task": int(task), "restart": int(restart), "world": trainer.job.world}
        file.write(json.dumps(line | {"step": trainer.job.progress.step}) + "\\n")


rows = torch.randn(640, width, generator=torch.Generator().manual_seed(1))
trainer = Trainer(
    Model(),
    TrainingArguments(
        output_dir=f"{log}/out", num_train_epochs=10_000, per_device_train_batch_size=32, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False, dataloader_pin_memory=False,
    ),
    train_dataset=[{"x": row} for row in rows],
    callbacks=[Note()],
    elastic={"max_batch": 64, "max_local_batch": 64},
)
trainer.train()
"""
"""The same by Hugging Face's Trainer: each change begins a term."""


@dataclass
class Step:
    """A step, once all ranks have ended it."""

    number: int
    ended: float
    world: int
    members: frozenset[tuple[int, int]]


@dataclass
class Change:
    """What one resize cost."""

    kind: str
    """grow, shrink, replace or requeue."""
    pause_s: float
    order_to_size_s: float
    gap_s: float
    """`pause_s` and a usual step."""
    gpus_back_s: float | None = None
    """From the order until Slurm had the GPUs back of all blocks that left."""
    told_s: float | None = None
    """The pause as the job reported it."""
    undisturbed_s: float | None = None
    """What the measure of `pause_s` shows later, where nothing changes."""
    bytes: int = 0
    transfer_s: float = 0.0


@dataclass
class Queue:
    """Which tasks of a job Slurm had running, and until when."""

    cluster: Cluster
    gone: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    """Each time at which a task, as (job, task), was seen not to have GPUs any more, ascending."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        before: set[tuple[int, int]] = set()
        while not self._stop.wait(0.15):
            command = ["squeue", "-h", "-t", "R,CG", "-o", "%F %K"]
            text = self.cluster.run(command, user="root", check=False).stdout
            rows = (line.split() for line in text.splitlines())
            now = {(int(array), int(task)) for array, task in rows if task.isdecimal()}
            for gone in before - now:
                self.gone.append((gone, time.time()))
            before = now

    def back(self, job_id: int, task: int, since: float) -> float | None:
        """When the GPUs of that task were free again."""
        return next((at for gone, at in self.gone if gone == (job_id, task) and at > since), None)

    def stop(self) -> None:
        self._stop.set()


def steps_of(folder: Path) -> list[Step]:
    """The steps that counted, in order: of a step that was taken again, the last time."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            values = json.loads(line)
            found.setdefault(values["step"], []).append(values)
    steps = []
    for number, lines in sorted(found.items()):
        last = max(lines, key=lambda line: float(line["time"]))
        same = [line for line in lines if line["world"] == last["world"] and line["time"] > last["time"] - 5]
        members = frozenset((line["task"], line["restart"]) for line in same)
        steps.append(Step(number, max(line["time"] for line in same), last["world"], members))
    return steps


def longest(steps: Sequence[Step], at: int) -> tuple[float, float]:
    """The longest gap around step `at`, and by how much gaps exceed a usual step: of the size before, or of the size
    from that step on."""
    gaps = [b.ended - a.ended for a, b in pairwise(steps[max(at - STEPS - 1, 0) : at + STEPS])]
    there = min(at, STEPS + 1)
    before, after = gaps[: there - 1], gaps[there - 1 :]
    near_before, near_after = before[-2:], after[:3]
    excess = [gap - statistics.median(before) for gap in near_before]
    excess += [gap - statistics.median(after[1:] or after) for gap in near_after]
    return max(near_before + near_after), max(0.0, *excess)


def change_of(resize: ResizeRecord, steps: Sequence[Step], told: Sequence[Membership], queue: Queue) -> Change | None:
    """What this resize cost; None where no step shows it."""
    kind = "requeue"
    if resize.mechanism == "blocks":
        kind = "replace" if resize.added and resize.dropped else "grow" if resize.added else "shrink"
    pairs = [
        (a, b)
        for a, b in pairwise(steps)
        if b.members != a.members and b.ended > resize.started and (resize.ended is None or a.ended < resize.ended + 1)
    ]
    if not pairs:
        return None
    first = pairs[0][1]
    at = steps.index(first)
    gap, pause = longest(steps, at)
    back = [queue.back(resize.job_id, task, resize.started) for task in resize.dropped]
    reports = [m for m in told if m.order == resize.order_number and resize.order_number]
    change = Change(kind, pause, first.ended - resize.started, gap)
    later = steps[at + LATER - STEPS : at + LATER + STEPS]
    if len(later) == 2 * STEPS and all(step.members == first.members for step in later):
        change.undisturbed_s = longest(steps, at + LATER)[1]
    if back and all(time_ is not None for time_ in back):
        change.gpus_back_s = max(time_ for time_ in back if time_ is not None) - resize.started
    if reports:
        change.told_s, change.bytes, change.transfer_s = reports[0].pause_s, reports[0].bytes, reports[0].transfer_s
    return change


def sending(size: int) -> float:
    """Seconds in which so many bytes go once through a socket of this machine, between two processes."""
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        with socket.create_connection(server.getsockname()) as out:
            out.sendall(bytes(size))
        os._exit(0)
    taken, _ = server.accept()
    began, left, view = time.perf_counter(), size, memoryview(bytearray(1 << 20))
    while left and (count := taken.recv_into(view)):
        left -= count
    seconds = time.perf_counter() - began
    os.waitpid(child, 0)
    taken.close()
    server.close()
    return seconds


class Bench:
    """One cluster, and the jobs that are resized on it one after the other."""

    def __init__(self, cluster: Cluster, parameters: int, step_ms: float, script: str = SCRIPT) -> None:
        self.harness, self.parameters, self.step_ms, self.script = Harness(cluster), parameters, step_ms, script
        self.queue = Queue(cluster)
        self.lost = self.repeated = 0
        self.steps: dict[str, list[float]] = {"usual": []}
        self.missed: list[str] = []

    def changes(self, hot: bool, steps: list[Allocation], timeout_s: float) -> Iterator[Change]:
        """Take a new job through these sizes; what each resize cost."""
        harness = self.harness
        folder = harness.folder("steps")
        inside = f"/scratch/{folder.name}"
        (folder / "train.py").write_text(self.script)
        (folder / "job.sbatch").write_text(BATCH_SCRIPT)
        comment = "--comment=ones: gpus=1-8 batch=32-64" + (" array=blocks" if hot else "")
        options = (comment, *(("--array=0-7%1",) if hot else ()))
        arguments = [*(("--blocks",) if hot else ()), f"{inside}/train.py", str(self.parameters), str(self.step_ms)]
        job_id = harness.submit(
            *arguments,
            inside,
            options=options,
            template=Path(f"{inside}/job.sbatch"),
            ONES_TRACE=f"{inside}/trace-{{restart}}-{{rank}}.jsonl",
            ONES_PRELOAD="ones_wrapper.frameworks.transformers" if self.script is TRAINER else "",
        )
        harness.trains(job_id)
        settings = harness.settings(scope='"own"', tick_s="0.5", resize="max_wait_s = 120\ndwell_s = 2")
        sizes = {job_id: [[step.shape.nodes, step.shape.gpus_per_node, step.batch] for step in steps]}
        command = [harness.cluster.python, "-m", "tests.endtoend.scripted", settings, json.dumps(sizes)]
        companion = harness.start(command, settings, cwd=paths.REPOSITORY)
        try:
            failed = companion.wait(timeout_s)
        except subprocess.TimeoutExpired:
            failed = -1
        if failed:
            print(f"the companion failed ({failed}):\n{harness.companion_log(settings)[-6000:]}", file=sys.stderr)
            print(f"the job:\n{harness.log(job_id)[-3000:]}", file=sys.stderr)
        time.sleep(3)
        harness.clear()
        time.sleep(1)
        taken, told = steps_of(folder), list(memberships(harness.directory(job_id)))
        with harness.store(settings) as store:
            resizes = sorted(store.resizes(job_id), key=lambda resize: resize.started)
        for resize in resizes:
            change = change_of(resize, taken, told, self.queue) if resize.state == "done" else None
            if change is None:
                self.missed.append(f"resize {resize.id} of job {job_id}: {resize.state} {resize.outcome!s}")
            else:
                yield change
        _, lost, repeated = samples_wrong(folder, SAMPLES)
        self.lost, self.repeated = self.lost + lost, self.repeated + repeated


def memberships(directory: Path) -> Iterator[Membership]:
    """What the job said of its memberships."""
    for path in sorted(directory.glob("reports-*.jsonl")):
        for line in path.read_bytes().splitlines():
            report = decode_report(line)[2]
            if isinstance(report, Membership):
                yield report


def at(*gpus: int) -> list[Allocation]:
    return [Allocation(Shape(1, count), BATCH) for count in gpus]


def figures(changes: Sequence[Change], bench: Bench, sent: list[float]) -> dict[str, Any]:
    """What `--json` writes."""
    found: dict[str, Any] = {}
    for kind in ("grow", "shrink", "replace", "requeue"):
        of = [change for change in changes if change.kind == kind]
        found[kind] = {
            "pause_s": [round(c.pause_s, 4) for c in of],
            "order_to_size_s": [round(c.order_to_size_s, 3) for c in of],
            "gap_s": [round(c.gap_s, 4) for c in of],
            "undisturbed_s": [round(c.undisturbed_s, 4) for c in of if c.undisturbed_s is not None],
            "told_pause_s": [round(c.told_s, 4) for c in of if c.told_s is not None],
            "gpus_back_s": [round(c.gpus_back_s, 3) for c in of if c.gpus_back_s is not None],
            "bytes": [c.bytes for c in of if c.bytes],
            "transfer_s": [round(c.transfer_s, 4) for c in of if c.bytes],
        }
    found |= {"lost": bench.lost, "repeated": bench.repeated, "missed": bench.missed, "parameters": bench.parameters}
    return found | {"sending_s": [round(s, 4) for s in sent], "load": os.getloadavg(), "cpus": os.cpu_count()}


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f}, n = {len(values)})"


def show(found: dict[str, Any]) -> None:
    """Medians, spreads, and how much longer a requeue takes."""
    requeue = found["requeue"]["pause_s"]
    for kind in ("grow", "shrink", "replace", "requeue"):
        of = found[kind]
        ratio = ""
        if kind != "requeue" and of["pause_s"] and requeue:
            ratio = f"  requeue/{kind} {statistics.median(requeue) / max(statistics.median(of['pause_s']), 1e-3):.0f}"
        print(f"{kind:8} pause {spread(of['pause_s'])} s  order to size {spread(of['order_to_size_s'])} s{ratio}")
        print(f"{'':8} the same where nothing changes {spread(of['undisturbed_s'])} s")
        print(f"{'':8} told {spread(of['told_pause_s'])} s  GPUs back {spread(of['gpus_back_s'])} s")
    if found["sending_s"]:
        print(f"sending the bytes once {spread(found['sending_s'])} s")
    print(f"lost {found['lost']}, repeated {found['repeated']}, resizes that did not come about {len(found['missed'])}")
    for line in found["missed"]:
        print(f"  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--requeues", type=int, help="by default two a cycle, six at most")
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--step-ms", type=float, default=30.0, help="sleep in a step, for the GPU's work")
    parser.add_argument("--sizes", type=int, nargs="+", default=CYCLE, help="GPUs in a cycle, from one on")
    parser.add_argument("--trainer", action="store_true", help="train by Hugging Face's Trainer")
    parser.add_argument("--site", default="gres", choices=["gres", "old"])
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    args = parser.parse_args()
    requeues = args.requeues if args.requeues is not None else min(2 * args.cycles, 6)
    with Cluster(args.site) as cluster:
        quick(cluster)
        bench = Bench(cluster, args.parameters, args.step_ms, TRAINER if args.trainer else SCRIPT)
        watcher = threading.Thread(target=bench.queue.watch)
        watcher.start()
        try:
            changes: list[Change] = []
            if args.cycles:
                changes += bench.changes(True, at(*(*args.sizes,) * args.cycles), 120 + 200.0 * args.cycles)
            if requeues:
                changes += bench.changes(False, at(*((2, 1) * requeues)[:requeues]), 120 + 60.0 * requeues)
        finally:
            bench.queue.stop()
            watcher.join()
        most = max((change.bytes for change in changes), default=0) or 12 * args.parameters
        found = figures(changes, bench, [sending(most) for _ in range(7)])
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
