"""Standing guests, managed by the leading block's launcher while its ranks train."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.files.small_files import create_small, replace_small
from ones_wrapper.launch.slurm import run_slurm
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.process.block import Block
from ones_wrapper.process.log import log
from ones_wrapper.protocol import MAX_INT, ORDERS, SPOOL_MARK, Order, encode
from ones_wrapper.protocol.standing import ORDER, StandingGuests, is_companions

LOOK_S = 30.0
"""Seconds between two checks of Slurm's queue."""
STOP_S = 5.0
"""Longest wait for the end of a Slurm command, in seconds."""
_TURN_S = 1.0
_ACTS_S = 300.0
"""Seconds for which a companion counts as active after it last marked the spool."""


class GuestKeeper:
    """Thread that manages a job's standing guests, so that a Slurm command that hangs does not delay the ranks' end."""

    def __init__(self, block: Block, job_dir: Path, spool: Path | None, shape: tuple[int, int]) -> None:
        """`shape` is the block's number of nodes, and of GPUs on each."""
        self._block, self._job_dir, self._spool = block, job_dir, spool
        self._hot = HotFolder(job_dir, block.array)
        self._orders = OrderReader(job_dir, MAX_INT, spool, block.array)
        self._guests = StandingGuests(
            block.array, shape, run_slurm, self._write, lambda text: log(text, "ones-run"), time.time
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="ones-guests", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait up to `STOP_S` seconds for its present Slurm command."""
        self._over.set()
        self._thread.join(STOP_S)

    def _keep(self) -> None:
        due = 0.0
        if missing := [name for name in ("squeue", "scontrol") if shutil.which(name) is None]:
            text = f"there is no {missing[0]} here: if the job's comment names a queue for guests, run this"
            log(f"{text} on a login node: slurm-ones guests {self._block.array}", "ones-run")
            return
        while not self._over.wait(_TURN_S):
            if not self._leads() or time.monotonic() < due:
                continue
            if self._companion_acts() or self._hot.over() or not self._guests.look():
                return
            due = time.monotonic() + LOOK_S

    def _leads(self) -> bool:
        leader = self._hot.newest()
        return leader is not None and (leader.task, leader.restart) == (self._block.task, self._block.restart)

    def _companion_acts(self) -> bool:
        """Return True if a companion decides for the job."""
        order = self._orders.poll()
        if order is not None and is_companions(order.number):
            return True
        if self._spool is not None:
            with suppress(OSError):
                mark, owner = (self._spool / SPOOL_MARK).lstat(), self._spool.stat().st_uid
                return mark.st_uid == owner and abs(time.time() - mark.st_mtime) < _ACTS_S
        return False

    def _write(self, tasks: tuple[int, ...]) -> str:
        """Write an order that names these tasks; return an error, or ''. A companion's order is never replaced."""
        order = self._orders.poll()
        if order is not None and {*(order.blocks or ())} >= {*tasks}:
            return ""
        path = self._job_dir / ORDERS
        text = encode(Order(ORDER if order is None else order.number + 1, 0, blocks=tasks))
        try:
            if order is not None:
                replace_small(path, text)
            elif not create_small(path, text):
                return "there is another order now"
        except OSError as error:
            return error.strerror or str(error)
        return ""
