"""Rescue checkpoint of a lost membership: which rank writes it, and how the next term waits for it.

The first rank that notices the loss claims the checkpoint by an empty file in the job's folder. It renames the file
when it is done. On a GPU the checkpoint is written only after the last step's event has completed. A collective whose
peer died never completes, and a model that waits for it lacks steps that its progress already counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ones_wrapper.devices.streams import END_S, EndTimer, Marks, cleans_up, side_stream
from ones_wrapper.process.exit_codes import PEER_LOST
from ones_wrapper.process.log import log

WAIT_S = 20.0
"""Seconds that a new leader waits for the previous term's rescue checkpoint. A later one is not used."""


class Ending:
    """End of a rank that lost other ranks, in the thread that notices it first: the script's thread or `Link`'s."""

    def __init__(
        self,
        device: torch.device,
        write: Callable[[], None],
        forget: Callable[[], None],
        deadline: Callable[[float, int], EndTimer] = EndTimer,
    ) -> None:
        """`write` writes the checkpoint if the state is consistent. `forget` drops metrics, which would wait for the
        device."""
        self.marks = Marks(device)
        self._device, self._write, self._forget, self._deadline = device, write, forget, deadline
        self._running: EndTimer | None = None
        self._starting = threading.Lock()
        self._one = threading.Lock()
        """Lock held while one thread writes the checkpoint, so that the other does not end the process meanwhile."""
        self._over = False

    def _start(self) -> EndTimer:
        with self._starting:
            self._running = self._running or self._deadline(END_S, PEER_LOST)
            return self._running

    def by_script(self, say: Callable[[], None]) -> None:
        """Handle an error in the script's thread: call `say`, which reports the loss in the log and on the board, and
        write the checkpoint."""
        deadline = self._start()
        with self._one:  # never released, if the link's thread came first
            self._over = True
            say()
            self._rescue(deadline)

    def by_watch(self, say: Callable[[], None], end: Callable[[], None]) -> None:
        """End the process by `end` from the thread of `Link`, because the script's thread waits for lost ranks. Returns
        only if the script's thread already ends the process."""
        deadline = self._start()
        with self._one:
            if self._over:
                return
            with suppress(Exception):
                say()
                self._rescue(deadline)
            end()

    def _rescue(self, deadline: EndTimer) -> None:
        if cleans_up():
            log("no checkpoint is written from memory: TORCH_NCCL_ASYNC_ERROR_HANDLING lets broken sums through")
            self._forget()
        elif self.marks.done():
            deadline.allow(WAIT_S)
            with side_stream(self._device):
                self._write()
            if self._device.type == "cuda":  # the last report would wait for the step that never ends
                self._forget()
        else:
            log("no checkpoint is written from memory: the device has not finished the last step")
            self._forget()
        deadline.allow(END_S)


def claim(folder: Path, term: int) -> bool:
    """Claim the rescue checkpoint of a term; return True if this process must write it."""
    if _done(folder, term).exists():
        return False
    try:
        os.close(os.open(_path(folder, term), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def done(folder: Path, term: int) -> None:
    """Mark the rescue checkpoint of a term as done: written, or given up."""
    with suppress(OSError):
        _path(folder, term).rename(_done(folder, term))


def wait(folder: Path, term: int) -> float:
    """Wait up to `WAIT_S` seconds while a process writes the term's rescue checkpoint; return the seconds waited.
    Removes marks of older terms."""
    waited_s, began = 0.0, time.monotonic()
    while _path(folder, term).exists() and waited_s < WAIT_S:
        time.sleep(0.02)
        waited_s = time.monotonic() - began
    for path in (*folder.glob("rescue-*"), *folder.glob("rescued-*")):
        number = path.name.partition("-")[2]
        if number.isdigit() and int(number) < term:
            path.unlink(missing_ok=True)
    return waited_s


def _path(folder: Path, term: int) -> Path:
    return folder / f"rescue-{term}"


def _done(folder: Path, term: int) -> Path:
    return folder / f"rescued-{term}"
