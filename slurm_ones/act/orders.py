"""Orders to jobs: how they are numbered, written and removed.

An order is written into the job's own directory if the companion may write there (the companion of its owner or of
root). Otherwise it is written into the site's spool, a directory of the companion that every user can read.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ones_wrapper.protocol import (
    LOOK_SIGNAL,
    MAX_LINE,
    ORDERS,
    SPOOL_MARK,
    Order,
    ProtocolError,
    decode_order,
    encode,
    spool_order_name,
)
from slurm_ones.slurm.client import SlurmClient, SlurmError
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.untrusted_files import (
    HasFiles,
    NotBelieved,
    foreign,
    job_directory,
    names_in,
    read_file,
    remove,
    write_file,
)

log = logging.getLogger(__name__)

AHEAD_S = 86_400.0
"""Most seconds by which an order's number, which is a time, may be ahead of the clock."""


class OrderError(Exception):
    """Failure of an order to reach its job; the message names the cause and the remedy."""


def order_path(job: HasFiles, spool: Path | None) -> Path:
    """Return the path of the job's order: in the job's directory if this process can write there, else in the spool.
    Raises `NotBelieved`."""
    if spool is not None and foreign(job):
        return spool / spool_order_name(job.job_id)
    return job_directory(job) / ORDERS


def write_order(job: HasFiles, order: Order, spool: Path | None) -> None:
    """Replace the job's present order. On return the new one is durable. Raises `OrderError`."""
    try:
        path = order_path(job, spool)
    except NotBelieved as error:
        raise OrderError(str(error)) from None
    owner, whose = (job.uid, "the job's user") if path.name == ORDERS else (os.geteuid(), "this companion")
    try:
        write_file(path.parent, owner, whose, path.name, encode(order), safe=path.name != ORDERS)
    except FileNotFoundError:
        raise OrderError(f"{path.parent}: no such directory; was the job started by ones-run?") from None
    except PermissionError:
        raise OrderError(
            f"{path.parent}: not writable by this companion; set `spool` in its settings and ONES_SPOOL in the "
            "job's environment"
        ) from None
    except NotBelieved as error:
        raise OrderError(f"{path}: {error}") from None
    except OSError as error:
        raise OrderError(f"{path}: {error.strerror}") from None


@dataclass
class OrderWriter:
    """Writer of orders to jobs, which also signals running jobs to read them."""

    client: SlurmClient
    spool: Path | None
    clock: Callable[[], float]
    check: Callable[[], None] = lambda: None
    """Function that raises `NotLeader` if another companion leads; called before each write."""
    _newest: int = field(default=0, init=False)
    """Highest order number that this companion has written to any job."""

    def next_number(self, job: HasFiles) -> int:
        """Return the number for the job's next order: Unix time in milliseconds, but at least one more than its present
        order's number."""
        now = round(self.clock() * 1000)
        return max(now, self.last_number(job) + 1, self._newest + 1 if now < self._newest else 0)

    def last_number(self, job: HasFiles) -> int:
        """Return the number of the job's present order; 0 if it cannot be read."""
        last = 0
        for owner in {os.geteuid(), job.uid}:
            try:
                path = order_path(job, self.spool)
                uid = job.uid if path.name == ORDERS else os.geteuid()
                text, _ = read_file(path.parent, uid, path.name, MAX_LINE + 1, owner)
                last = max(last, decode_order(text).number)
            except (OSError, NotBelieved, ProtocolError):
                continue
        return last

    def write(self, job: HasFiles, order: Order, *, wake: SlurmJob | None = None) -> None:
        """Replace the job's present order, and signal the block `wake` to read it if it runs. Raises `OrderError`."""
        self.check()
        write_order(job, order, self.spool)
        # A number far ahead follows one that the job's user forged. It must not raise the numbers of other jobs'
        # orders.
        if order.number < 1000 * (self.clock() + AHEAD_S):
            self._newest = max(self._newest, order.number)
        # scancel tries for half a minute to signal a waiting job.
        if wake is not None and wake.running:
            with suppress(SlurmError):  # the job finds the order by itself, a little later
                self.client.signal(wake.key, LOOK_SIGNAL)

    def mark(self) -> None:
        """Mark the spool as in use: companions of single users then do not act on jobs that read it."""
        if self.spool is None:
            return
        self.check()
        try:
            write_file(self.spool, os.geteuid(), "this companion", SPOOL_MARK, b"")
        except FileNotFoundError:
            return
        except (OSError, NotBelieved) as error:
            log.warning("%s: cannot be marked as in use: %s", self.spool, error)

    def unmark(self) -> None:
        """Remove the mark in the spool, so that companions of single users may act at once."""
        if self.spool is not None:
            with suppress(OSError, NotBelieved):
                remove(self.spool / SPOOL_MARK)

    def clear(self, alive: Container[int]) -> None:
        """Remove the orders of ended jobs from the spool, before new jobs with the same ids read them."""
        if self.spool is None:
            return
        self.check()
        try:
            for name in names_in(self.spool):
                number = Path(name).stem.rpartition("-")[2]
                if number.isdecimal() and name == spool_order_name(int(number)) and int(number) not in alive:
                    try:
                        remove(self.spool / name)
                    except PermissionError as error:
                        if error.errno != errno.EPERM:  # it is another user's file, in a spool with the sticky bit
                            raise
        except (OSError, NotBelieved) as error:
            log.warning("%s: orders to jobs that ended could not be removed: %s", self.spool, error)
