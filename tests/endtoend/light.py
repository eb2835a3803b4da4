"""A job that speaks to the companion as `ones_wrapper.run.run` does, with its mailbox, but trains nothing.

It starts in a tenth of a second, where a rank that imports torch needs seconds of CPU: for tests of what the companion
does to a job. With LIGHT_AGAIN in its environment one that is killed starts again in the same run, as `ones-run` has
its ranks do. One that finds a file `EXIT_IN_DRAIN` in its directory ends by itself when it is drained.
`light_blocks.py` is the same of a job of blocks.
LIGHT_EPOCHS are the epochs that it declares. With LIGHT_SCALES n GPUs are n times as fast as one, up to `NODE`; each
further one adds only that share of one. On the nodes of LIGHT_FAST it is `FASTER` times as fast: GPUs of another kind,
emulated by shorter sleep.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from ones_wrapper.files.job_io import OrderReader, ReportWriter, write_spec
from ones_wrapper.process.log import log
from ones_wrapper.protocol import (
    CHECKPOINTS,
    DRAIN_WAIT_S,
    MANIFEST,
    Batch,
    Bye,
    Checkpoint,
    Epoch,
    Hello,
    Order,
    Spec,
    Throughput,
    directory_name,
)

SPEC = Spec(base_batch=16, max_batch=64, max_local_batch=16, dataset=160, epochs=0)
STEPS = SPEC.dataset // SPEC.base_batch
"""Of an epoch, whatever the batch."""
EXIT_IN_DRAIN = "exit-in-drain"
KEPT = 3
"""Checkpoints."""
FASTER = 4
NODE = 4
"""GPUs that exchange gradients in no time."""


class Light:
    def __init__(self, attempt: int = 0) -> None:
        env = os.environ
        self.attempt = attempt
        self.restart = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.nodes = int(env["SLURM_JOB_NUM_NODES"])
        self.gpus = int(env.get("SLURM_GPUS_ON_NODE") or env.get("ONES_GPUS_PER_NODE") or 1)
        self.directory = self.job_directory()
        self.checkpoints = self.directory / CHECKPOINTS
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.inbox: OrderReader
        self.outbox: ReportWriter
        self.alone_s = float(env.get("LIGHT_STEP_S") or 0.05)
        self.scales = float(env.get("LIGHT_SCALES") or 0.0)
        self.epochs = int(env.get("LIGHT_EPOCHS") or SPEC.epochs)
        if env.get("SLURMD_NODENAME", "") in (env.get("LIGHT_FAST") or "").split(","):
            self.alone_s /= FASTER
        self.step_s = self.step_on(self.nodes * self.gpus)
        self.step, self.batch = 0, SPEC.base_batch
        self.told, self.told_at = 0, 0.0
        """Step and time of the last report of its speed."""
        self.obeyed = 0

    def step_on(self, gpus: int) -> float:
        """Seconds of a step."""
        return self.alone_s / (min(gpus, NODE) + self.scales * max(gpus - NODE, 0) if self.scales else 1)

    def job_directory(self) -> Path:
        """Where reports, orders and checkpoints lie."""
        return Path.cwd() / directory_name(int(os.environ["SLURM_JOB_ID"]))

    def run(self) -> None:
        """Train for ever."""
        spool = Path(os.environ["ONES_SPOOL"]) if os.environ.get("ONES_SPOOL") else None
        self.inbox = OrderReader(self.directory, self.restart, spool, int(os.environ["SLURM_JOB_ID"]))
        self.outbox = ReportWriter(self.directory, self.restart)
        found = sorted(self.checkpoints.glob("step-*"))
        if found:
            state = json.loads((found[-1] / MANIFEST).read_text())
            self.step, self.batch = state["step"], state["batch"]
        write_spec(self.directory, replace(SPEC, epochs=self.epochs))
        self.look(first=True)
        epoch, cursor = divmod(self.step, STEPS)
        checkpoint = found[-1].name if found else ""
        self.outbox.send(
            Hello(
                *(self.nodes, self.gpus, self.nodes * self.gpus, self.batch, 1.0),
                *(SPEC.base_batch, SPEC.max_batch, SPEC.dataset, self.epochs),
                *(epoch, cursor * SPEC.base_batch, self.step, checkpoint),
                attempt=self.attempt,
                # One that reads no spool says nothing, as former wrappers did.
                directory=str(self.directory.resolve()) if os.environ.get("ONES_SPOOL") else "",
                spool=os.environ.get("ONES_SPOOL", ""),
            )
        )
        self.told, self.told_at = self.step, time.monotonic()
        while True:
            self.one_step()

    def one_step(self) -> None:
        time.sleep(self.step_s)
        self.step += 1
        epoch, done = divmod(self.step, STEPS)
        if not done:
            size, now = SPEC.dataset, time.monotonic()
            samples, seconds = (self.step - self.told) * SPEC.base_batch, now - self.told_at
            self.told, self.told_at = self.step, now
            self.outbox.send(Throughput(epoch - 1, self.step, size, samples, seconds, self.batch, 1.0, 1 / epoch))
            self.outbox.send(Epoch(epoch - 1, self.step, size, 1 / epoch))
        self.look()

    def look(self, first: bool = False) -> None:
        """The step boundary."""
        order = self.inbox.poll()
        if order is None or order.number <= self.obeyed:
            return
        drains = order.drain and order.restart == self.restart
        if first and drains:
            return
        self.obeyed = order.number
        if order.batch and order.batch != self.batch:
            self.batch = order.batch
            if not first:
                self.outbox.send(Batch(self.step, self.batch, 1.0, order.number))
        if drains:
            self.drain(order)

    def drain(self, order: Order) -> None:
        """Checkpoint, report it, wait for the requeue or a newer order."""
        try:
            name = self.save()
        except OSError as error:
            log(f"no checkpoint: {error}; training goes on")
            return
        epoch, cursor = divmod(self.step, STEPS)
        self.outbox.send(Checkpoint(name, epoch, cursor * SPEC.base_batch, self.step, 1, 0.0, order=order.number))
        if (self.directory / EXIT_IN_DRAIN).exists():
            self.outbox.send(Bye("stopped", self.step))
            sys.exit(0)
        until = time.monotonic() + DRAIN_WAIT_S
        while time.monotonic() < until:
            newest = self.inbox.poll()
            if newest is not None and newest.number > order.number:
                break
            time.sleep(0.05)

    def save(self) -> str:
        """Write a checkpoint, whole or not at all; returns its name."""
        name = f"step-{self.step:09d}"
        folder, half = self.checkpoints / name, self.checkpoints / f".{name}"
        if not folder.exists():
            half.mkdir(exist_ok=True)
            (half / MANIFEST).write_text(json.dumps({"step": self.step, "batch": self.batch}))
            half.rename(folder)
        for old in sorted(self.checkpoints.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
        return name


def again_and_again(kind: type[Light]) -> None:
    """Run in a child, and again after one that was killed."""
    attempt = 0
    while True:
        child = os.fork()
        if child == 0:
            kind(attempt).run()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(status if status >= 0 else 128 - status)
        attempt += 1
        # Slurm, which kills them all, may be at it.
        time.sleep(0.5)


if __name__ == "__main__":
    again_and_again(Light) if os.environ.get("LIGHT_AGAIN") else Light().run()
