"""Waits for a device after a measurement, before ranks change, and in a rescue.

If another rank died, a collective never ends, and neither does a wait for its stream. So a rescue queries events, and
never synchronises.
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
"""Seconds in which a rank that lost other ranks must end, besides the time for a rescue checkpoint."""
DONE_S = 2.0
"""Seconds that a rescue waits for the device to finish the newest step."""
_POLL_S = 0.01


def wait(device: torch.device) -> None:
    """Wait until the device has finished all queued work. Does nothing for a CPU, or while a graph is captured."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def record(device: torch.device) -> Any:
    """Record an event on the current stream and return it; None for a CPU, or while a graph is captured."""
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
        """Record the event after the script has queued a step."""
        self._last = self._mark(self._device)

    def done(self, within_s: float = DONE_S) -> bool:
        """Return True as soon as the device has finished the newest step, False after `within_s` seconds."""
        event, until = self._last, time.monotonic() + within_s
        while event is not None:
            late = time.monotonic() > until  # before the query: this process may have been suspended meanwhile
            if event.query():
                break
            if late:
                return False
            time.sleep(_POLL_S)
        return True


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Context of a new stream, in which copies do not wait for the script's kernels. The data to copy must be complete
    already."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def shared(device: torch.device) -> Callable[[], None]:
    """Return a function that makes this thread's stream current in the thread that calls it."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.set_stream(stream)


class EndTimer:
    """Timer that ends this process with an exit code, even if all other threads hang."""

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
    """Return True if torch aborts the communicators of lost ranks (TORCH_NCCL_ASYNC_ERROR_HANDLING is 1 or 2). Aborted
    collectives return with incomplete sums, so that no value on the device can be trusted."""
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("1", "2")
