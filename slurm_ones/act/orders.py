"""Writing orders to jobs.

Orders go into the job's own directory if the companion may write there (its own jobs, or as root). Else they go into
the site's spool, a directory of the companion's that every user can read.
"""

from __future__ import annotations

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


class OrderError(Exception):
    """The order cannot reach the job; the message says why and what to do."""


def order_path(job: HasFiles, spool: Path | None) -> Path:
    """Path of an order to this job. Raises `NotBelieved`."""
    if spool is not None and foreign(job):
        return spool / spool_order_name(job.job_id)
    return job_directory(job) / ORDERS


def write_order(job: HasFiles, order: Order, spool: Path | None) -> None:
    """Replace the order in force; durable when it returns. Raises `OrderError`."""
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
    """Gives orders to jobs, and wakes those that run."""

    client: SlurmClient
    spool: Path | None
    clock: Callable[[], float]
    check: Callable[[], None] = lambda: None
    """Raises `NotLeader` if another companion leads; called before each order is written."""
    _newest: int = field(default=0, init=False)
    """Highest order number written to any job."""

    def next_number(self, job: HasFiles) -> int:
        """Return the number of the job's next order: Unix time in milliseconds, but above the order in force. That
        holds even if the clock was set back, or a file system still shows an older order."""
        now = round(self.clock() * 1000)
        return max(now, self.last_number(job) + 1, self._newest + 1 if now < self._newest else 0)

    def last_number(self, job: HasFiles) -> int:
        """Return the number of the job's order in force; 0 if none can be read. A user who forges a number misleads
        only their own job."""
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
        """Replace the job's order in force, and signal the block `wake`, if it runs, to read it now. Raises
        `OrderError`."""
        self.check()
        write_order(job, order, self.spool)
        self._newest = max(self._newest, order.number)
        # scancel tries for half a minute to signal a job that waits.
        if wake is not None and wake.running:
            with suppress(SlurmError):  # it would find the order by itself, a little later
                self.client.signal(wake.key, LOOK_SIGNAL)

    def mark(self) -> None:
        """Mark the spool as in use: owners' companions then yield for the jobs that read it."""
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
        """Remove the mark in the spool, so that owners' companions may act at once."""
        if self.spool is not None:
            with suppress(OSError, NotBelieved):
                remove(self.spool / SPOOL_MARK)

    def clear(self, alive: Container[int]) -> None:
        """Remove orders to ended jobs from the spool, before other jobs get their ids and obey. A file that cannot be
        removed is tried again the next time."""
        if self.spool is None:
            return
        self.check()
        try:
            for name in names_in(self.spool):
                number = Path(name).stem.rpartition("-")[2]
                if number.isdecimal() and name == spool_order_name(int(number)) and int(number) not in alive:
                    remove(self.spool / name)
        except (OSError, NotBelieved) as error:
            log.warning("%s: orders to jobs that ended could not be removed: %s", self.spool, error)
