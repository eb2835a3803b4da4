"""Protection of a DataLoader's workers against signals to their rank.

Slurm signals every process of a step. If a worker died of a signal, its rank would end with an error while it writes
its checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from traceback import walk_stack
from types import FrameType

from ones_wrapper.process.hooks import CHECKPOINT, LOOK, STOP

_DATA_LOADER = "torch.utils.data.dataloader"


def shield_workers() -> None:
    """Make the workers of all DataLoaders that are forked from now on ignore the rank's signals."""
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    if any(frame.f_globals.get("__name__") == _DATA_LOADER for frame, _ in walk_stack(sys._getframe())):
        leave_signals_to_rank()


def leave_signals_to_rank() -> None:
    """Ignore all signals in a worker, except SIGTERM from its rank, by which multiprocessing ends it."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}):
        return  # done before
    # A handler rather than SIG_IGN, which programs that the worker starts would inherit.
    for number in {*STOP, *CHECKPOINT, *LOOK, signal.SIGINT} - {signal.SIGTERM}:
        signal.signal(number, _nothing)
    # A handler does not learn a signal's sender, and torch's own handler would end the worker for any sender.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


def _end_with(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)
