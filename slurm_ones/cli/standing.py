"""Command `slurm-ones guests`: moves a job's waiting blocks to its queue of guests, without a companion."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from ones_wrapper.protocol import Order
from ones_wrapper.protocol.standing import ORDER, StandingGuests, is_companions
from slurm_ones.act.orders import OrderError, OrderWriter
from slurm_ones.cli.by_hand import look
from slurm_ones.cli.common import JobArgument, command, console
from slurm_ones.jobs.other_companion import OtherCompanion
from slurm_ones.jobs.reports import JobDirectories
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.command import CommandClient


@command
def guests(job: JobArgument) -> None:
    """Move the waiting blocks of a job of yours to the queue that its comment names (guests=partition:NAME).

    They then join the job. On compute nodes with Slurm's commands `ones-run` does it itself."""
    client = CommandClient()
    whole = look(client, job)
    if whole.uid != os.geteuid():
        raise BadInput(f"job {job} is {whole.user}'s: only its owner can move its blocks")
    if not (whole.by_blocks and whole.running):
        raise BadInput(f"job {job} is no job of blocks that runs: guests join its first block")
    orders = OrderWriter(client, None, time.time)
    other = OtherCompanion(os.geteuid(), JobDirectories(None).hello, time.time).refusal(whole)
    if other is not None or is_companions(orders.last_number(whole)):
        raise BadInput(f"job {job}: a companion of slurm-ones decides for it, by its own settings")

    def run(argv: list[str]) -> tuple[str, str]:
        try:
            return client.run(argv), ""
        except SlurmError as error:
            return "", str(error)

    def order(tasks: tuple[int, ...]) -> str:
        with suppress(OrderError):
            if not orders.last_number(whole):
                orders.write(whole, Order(ORDER, 0, blocks=tasks))
            return ""
        return "its directory takes none"

    shape = whole.home.nodes, whole.home.gpus_per_node
    if not StandingGuests(job, shape, run, order, console.print, time.time).look():
        raise BadInput(f"job {job}: its comment names no queue for guests, or leaves no room for any")
