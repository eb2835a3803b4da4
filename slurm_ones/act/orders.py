"""Writing orders where a job looks for them.

Into the job's own directory where the companion may write there (its own jobs, or as root), else into the site's
spool, a directory of the companion's that every user can read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from pathlib import Path

from ones_wrapper.protocol import ORDERS, Order, encode, spool_order_name
from slurm_ones.observe.files import NotBelieved, directory_of
from slurm_ones.observe.reports import job_directory
from slurm_ones.slurm.model import Job

log = logging.getLogger(__name__)


class OrderError(Exception):
    """The order cannot reach the job; the message says why and what to do."""


def _replace(directory: int, name: str, text: bytes) -> None:
    """Write a file under a temporary name, make it durable, and rename it over `name`."""
    temporary = f".{name}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o644, dir_fd=directory)
    except FileExistsError:
        os.unlink(temporary, dir_fd=directory)
        fd = os.open(temporary, flags, 0o644, dir_fd=directory)
    try:
        os.write(fd, text)
        os.fchmod(fd, 0o644)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def order_path(job: Job, spool: Path | None) -> Path:
    """Where an order to this job belongs."""
    if spool is not None and job.uid != os.geteuid() and os.geteuid() != 0:
        return spool / spool_order_name(job.job_id)
    return job_directory(job) / ORDERS


def write_order(job: Job, order: Order, spool: Path | None) -> None:
    """Replace the order in force; durable when it returns. Raises `OrderError`."""
    path = order_path(job, spool)
    owner = job.uid if path.name == ORDERS else os.geteuid()
    try:
        with directory_of(path.parent, owner) as directory:
            _replace(directory, path.name, encode(order))
    except FileNotFoundError:
        raise OrderError(f"{path.parent}: no such directory; was the job started by ones-run?") from None
    except PermissionError:
        raise OrderError(
            f"{path.parent}: not writable by this companion; set `spool` in its settings and ONES_SPOOL in the "
            "job's environment"
        ) from None
    except (NotBelieved, OSError) as error:
        raise OrderError(f"{path}: {error}") from None


def clear_spool(spool: Path, alive: Container[int]) -> None:
    """Remove the spool's orders to jobs that are not alive any more: Slurm will give their ids to other jobs, which
    would obey. What cannot be removed stays until the next time."""
    try:
        for path in spool.iterdir():
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and path.name == spool_order_name(int(number)) and int(number) not in alive:
                path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: orders to jobs that ended could not be removed: %s", spool, error)
