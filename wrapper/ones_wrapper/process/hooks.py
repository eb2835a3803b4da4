"""Handlers of a rank's signals and of its script's end, and a check for libraries that also requeue the job.

Signals set flags; all ranks act on them together at the next step boundary. SIGTERM and SIGUSR2 request a checkpoint
and then a stop (`srun` forwards only SIGUSR2); SIGUSR1 requests only a checkpoint. Slurm may signal launcher and ranks,
so that a rank may get a signal twice.

Exit hooks are functions called with the script's exit code when the script ends. The process that runs the script calls
them, since `atexit` does not know the exit code.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from ones_wrapper.process.exit_codes import DEVICE_FAILED, STOP_CODE, USAGE_ERROR
from ones_wrapper.process.faults import Fault, fault_of
from ones_wrapper.protocol import LOOK_SIGNAL

STOP = (signal.SIGTERM, signal.SIGUSR2)
CHECKPOINT = (signal.SIGUSR1,)
LOOK = (signal.Signals[f"SIG{LOOK_SIGNAL}"],)
"""Signal on which a rank reads its orders at once."""

QUIET_S = 2.0
"""Seconds after a checkpoint in which further requests for one are ignored, as copies of the same signal."""


class Flags:
    """Requests by signals that are not yet fulfilled."""

    def __init__(self) -> None:
        self.stop = False
        self.checkpoint = self.look = False
        self.armed = False
        """True if a later step boundary will act on the flags. If False, a stop signal ends the script at once."""
        self.leaving = False
        """True if other processes wait for this one's end even if its exit code is 0."""
        self.tested = False
        """True in a rank of `testing`, where a test's body may leave its loop to continue at another world size."""
        self._quiet_until = 0.0
        self.scripts: dict[int, Callable[[int, FrameType | None], object]] = {}
        """The script's own handlers by signal. Our handlers call them."""
        self.called = False
        """True after a handler of the script was called."""
        self._waiting: list[int] = []
        """Signals whose handlers in the script are called at a step boundary."""
        self._calling = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. This does little more than set flags, since it may run between any two lines of the
        script."""
        waits = self.armed and number not in LOOK
        if number in CHECKPOINT:
            self.checkpoint = self.checkpoint or time.monotonic() > self._quiet_until
            waits = waits and self.checkpoint
        elif number in LOOK:
            self.look = True
        else:
            self.stop = True
        if not waits:
            self._call_script(number, frame)
        elif not self._calling and number not in self._waiting:
            self._waiting.append(number)
        if self.stop and not self.armed and number not in CHECKPOINT + LOOK:
            raise SystemExit(STOP_CODE)

    def _call_script(self, number: int, frame: FrameType | None) -> None:
        """Call the script's own handler. If the handler tries to end the script during training, request a stop after a
        checkpoint instead."""
        handler = self.scripts.get(number)
        if handler is None or self._calling:  # the script's handler may call the earlier one: ours
            return
        self._calling = self.called = True
        try:
            handler(number, frame)
        except (SystemExit, KeyboardInterrupt):
            if not self.armed:
                raise
            self.stop = True
        finally:
            self._calling = False

    def call_waiting(self) -> None:
        """Call the script's handlers of signals that came during training. This follows the checkpoint: a handler
        called at once might end the loop at a different step on each rank."""
        waiting, self._waiting = self._waiting, []
        for number in waiting:
            self._call_script(number, None)

    def checkpoint_taken(self) -> None:
        """Clear the request for a checkpoint, because one was written."""
        self.checkpoint = False
        self._quiet_until = time.monotonic() + QUIET_S

    def install(self, keep: bool = True) -> None:
        """Set our signal handlers (in the main thread only). With `keep`, the script's handlers are stored, to be
        called by ours."""
        for number in STOP + CHECKPOINT + LOOK:
            before = signal.getsignal(number)
            if before == self.handle:
                continue
            if keep and callable(before):
                self.scripts[number] = before
            signal.signal(number, self.handle)

    def keep(self) -> None:
        """Set our signal handlers again if the script has replaced them; ours then call the script's."""
        if threading.current_thread() is not threading.main_thread():
            return
        if any(signal.getsignal(number) != self.handle for number in STOP + CHECKPOINT):
            self.install()


FLAGS = Flags()
"""The flags of this process. There is one object, since signal handlers belong to the process."""


ExitHook = Callable[[int, str], None]
"""Function of the exit code and the text of an uncaught error; the text is empty if there was no error."""

ErrorClassifier = Callable[[BaseException], tuple[int, str] | None]
"""Function from an uncaught error to (exit code, text); None for errors that it does not know."""

_callbacks: list[ExitHook] = []
_classifiers: list[ErrorClassifier] = []


def on_exit(callback: ExitHook) -> None:
    """Register a function that is called once when the script ends, also under plain `python`."""
    if not _callbacks:
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous(kind, error, trace)
            run_exit_hooks(*exit_code_of(error))

        sys.excepthook = hook
        atexit.register(run_exit_hooks, 0, "")
    _callbacks.append(callback)


def on_error(classifier: ErrorClassifier) -> None:
    """Register a function that may choose the exit code of the script's uncaught errors."""
    _classifiers.append(classifier)


def exit_code_of(error: BaseException) -> tuple[int, str]:
    """Return the exit code and one line of text for an uncaught error."""
    for classifier in _classifiers:
        if verdict := classifier(error):
            return verdict
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, describe_error(error)
    return _CODES.get(fault_of(error), 1), describe_error(error)


_CODES = {Fault.DEVICE: DEVICE_FAILED, Fault.CONFIGURATION: USAGE_ERROR}


def run_exit_hooks(code: int, note: str) -> None:
    """Call the exit hooks, because the script has ended. Further calls do nothing."""
    with suppress(BaseException):  # whatever a handler of the script raises, the exit hooks follow
        FLAGS.call_waiting()
    callbacks = _callbacks[:]
    drop_exit_hooks()
    for callback in reversed(callbacks):
        callback(code, note)


def drop_exit_hooks() -> None:
    """Remove all exit hooks, because the process ends although the script has not ended."""
    _callbacks.clear()
    _classifiers.clear()


def describe_error(error: BaseException) -> str:
    """Return one line about an error, short enough for a report's field."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


_SUBMITIT = (
    "submitit requeues this job by itself ({sign}), and slurm-ones would, too: only one may. Submit a batch "
    "script that calls ones-run with sbatch; where this job was merely submitted from one of submitit's, unset "
    "SUBMITIT_EXECUTOR in its script"
)
_LIGHTNING = (
    "Lightning requeues this job by itself ({sign}), and slurm-ones would, too: only one may. Switch "
    "Lightning's off: Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])"
)
_HANDLERS = {("submitit", "checkpoint_and_try_requeue"): _SUBMITIT} | {
    (package, name): _LIGHTNING  # Lightning installs them only if it requeues jobs automatically
    for package in ("pytorch_lightning", "lightning")
    for name in ("_slurm_sigusr_handler_fn", "_sigterm_handler_fn")
}
_DEEP = 4
"""Largest number of levels of nested handlers that are searched."""


def requeue_conflict(env: Mapping[str, str] = os.environ) -> str:
    """Return a message with a remedy if another library would also requeue the job; empty if none was found. A
    `scontrol requeue` in the batch script is not found."""
    if env.get("SUBMITIT_EXECUTOR") == "slurm":
        return _SUBMITIT.format(sign="SUBMITIT_EXECUTOR=slurm")
    for number in sorted(signal.valid_signals()):
        for handler in (*_handlers(signal.getsignal(number), _DEEP), *_handlers(FLAGS.scripts.get(number), _DEEP)):
            package = str(getattr(handler, "__module__", "")).partition(".")[0]
            name = str(getattr(handler, "__name__", ""))
            if text := _HANDLERS.get((package, name)):
                return text.format(sign=f"{name} handles {getattr(number, 'name', number)}")
    return ""


def _handlers(handler: Any, deep: int) -> Iterator[Any]:
    """Yield `handler`, and the handlers in its attribute `signal_handlers`, down to `deep` levels."""
    if handler is None or isinstance(handler, int):
        return
    yield handler
    held = getattr(handler, "signal_handlers", None)
    if deep and isinstance(held, (list, tuple)):
        for other in held:
            yield from _handlers(other, deep - 1)
