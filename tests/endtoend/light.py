"""A job that speaks to the companion as `ones_wrapper.run` does, with its mailbox, but trains nothing.

It starts in a tenth of a second, where a rank that imports torch needs seconds of CPU: for tests of what the companion
does to a job.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ones_wrapper.mailbox import Inbox, Outbox, write_spec
from ones_wrapper.protocol import (
    CHECKPOINTS,
    DRAIN_WAIT_S,
    MANIFEST,
    Batch,
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


class Light:
    """One run of the job."""

    def __init__(self) -> None:
        env = os.environ
        job_id = int(env["SLURM_JOB_ID"])
        self.restart = int(env.get("SLURM_RESTART_COUNT") or 0)
        self.nodes = int(env["SLURM_JOB_NUM_NODES"])
        self.gpus = int(env.get("SLURM_GPUS_ON_NODE") or env.get("ONES_GPUS_PER_NODE") or 1)
        self.directory = Path.cwd() / directory_name(job_id)
        (self.directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        spool = Path(env["ONES_SPOOL"]) if env.get("ONES_SPOOL") else None
        self.inbox = Inbox(self.directory, self.restart, spool, job_id)
        self.outbox = Outbox(self.directory, self.restart)
        self.step_s = float(env.get("LIGHT_STEP_S") or 0.05)
        self.step, self.batch = 0, SPEC.base_batch
        self.obeyed = 0

    def run(self) -> None:
        """Train for ever."""
        found = sorted((self.directory / CHECKPOINTS).glob("step-*"))
        if found:
            state = json.loads((found[-1] / MANIFEST).read_text())
            self.step, self.batch = state["step"], state["batch"]
        write_spec(self.directory, SPEC)
        self.look(first=True)
        epoch, cursor = divmod(self.step, STEPS)
        checkpoint = found[-1].name if found else ""
        self.outbox.send(
            Hello(
                *(self.nodes, self.gpus, self.nodes * self.gpus, self.batch, 1.0),
                *(SPEC.base_batch, SPEC.max_batch, SPEC.dataset, SPEC.epochs),
                *(epoch, cursor * SPEC.base_batch, self.step, checkpoint),
            )
        )
        while True:
            self.one_step()

    def one_step(self) -> None:
        started = time.monotonic()
        time.sleep(self.step_s)
        self.step += 1
        epoch, done = divmod(self.step, STEPS)
        if not done:
            samples = SPEC.dataset
            seconds = STEPS * (time.monotonic() - started)
            self.outbox.send(Throughput(epoch - 1, self.step, samples, samples, seconds, self.batch, 1.0, 1 / epoch))
            self.outbox.send(Epoch(epoch - 1, self.step, samples, 1 / epoch))
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
        name = f"step-{self.step:09d}"
        folder = self.directory / CHECKPOINTS / name
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps({"step": self.step, "batch": self.batch}))
        epoch, cursor = divmod(self.step, STEPS)
        self.outbox.send(Checkpoint(name, epoch, cursor * SPEC.base_batch, self.step, 1, 0.0, order=order.number))
        until = time.monotonic() + DRAIN_WAIT_S
        while time.monotonic() < until:
            newest = self.inbox.poll()
            if newest is not None and newest.number > order.number:
                break
            time.sleep(0.05)


if __name__ == "__main__":
    Light().run()
