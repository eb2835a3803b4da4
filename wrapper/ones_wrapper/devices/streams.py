"""Waits for a device: after a measurement, before ranks change, and in a rescue, in which the device may hang.

A device whose peer died waits in a collective for ever, and so does every wait for its stream. So a rescue queries
events and never synchronises.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ones_wrapper.process.log import log

END_S = 10.0
"""Seconds that a rank has to end after it lost its peers, without the time of a rescue checkpoint."""
DONE_S = 2.0
"""Time that a rescue waits for the device to finish the newest step."""
_POLL_S = 0.01


def wait(device: torch.device) -> None:
    """Wait until the device has finished all queued work; does nothing on a CPU, and during the capture of a graph."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def record(device: torch.device) -> Any:
    """Record an event on the current stream and return it; None on a CPU, or during the capture of a graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class Marks:
    """Event at the end of the newest step, which shows whether the device has finished that step."""

    def __init__(self, device: torch.device, mark: Callable[[torch.device], Any] = record) -> None:
        self._device, self._mark = device, mark
        self._last: Any = None

    def step(self) -> None:
        """Mark the end of a step that the script enqueued."""
        self._last = self._mark(self._device)

    def done(self, within_s: float = DONE_S) -> bool:
        """Return whether the device finishes the newest step within this many seconds."""
        event, until = self._last, time.monotonic() + within_s
        while event is not None and not event.query():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Context on a separate stream: copies do not wait for the script's kernels, so the source must be complete."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def shared(device: torch.device) -> Callable[[], None]:
    """Return a function that puts the thread that calls it on this thread's stream."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.set_stream(stream)


class EndTimer:
    """Timer that ends this process with an exit code, whatever the process's threads wait for."""

    def __init__(self, seconds: float, code: int, end: Callable[[int], Any] = os._exit) -> None:
        self._code, self._end = code, end
        self.allow(seconds)
        threading.Thread(target=self._run, name="ones-deadline", daemon=True).start()

    def allow(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._at = time.monotonic() + seconds

    def _run(self) -> None:
        while time.monotonic() < self._at:
            time.sleep(_POLL_S)
        log("the device hangs, or a checkpoint takes too long; the rank ends without waiting")
        self._end(self._code)


def cleans_up() -> bool:
    """Return whether torch aborts the communicators of lost peers (TORCH_NCCL_ASYNC_ERROR_HANDLING 1 or 2). Kernels
    then *return* with half-made sums, so nothing on the device may be believed."""
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("1", "2")
