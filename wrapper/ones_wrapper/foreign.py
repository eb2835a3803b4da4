"""Who else would requeue this job. Two that requeue one job interrupt each other's checkpoints, and count its
restarts twice.

Nothing of theirs is imported: submitit is known by its environment, and both by the signal handlers that they
installed. So ask before our own handlers replace them, and again at the first step, since Lightning installs its
handlers when training begins.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

_SUBMITIT = (
    "submitit requeues this job by itself ({sign}), and slurm-ones would requeue it too: one must do. Submit a batch "
    "script that calls ones-run with sbatch; where this job was merely submitted from one of submitit's, unset "
    "SUBMITIT_EXECUTOR in its script"
)
_LIGHTNING = (
    "Lightning requeues this job by itself ({sign}), and slurm-ones would requeue it too: one must do. Switch "
    "Lightning's off: Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])"
)
_HANDLERS = {
    ("submitit", "checkpoint_and_try_requeue"): _SUBMITIT,
    # Without automatic requeues Lightning installs neither.
    ("pytorch_lightning", "_slurm_sigusr_handler_fn"): _LIGHTNING,
    ("pytorch_lightning", "_sigterm_handler_fn"): _LIGHTNING,
    ("lightning", "_slurm_sigusr_handler_fn"): _LIGHTNING,
    ("lightning", "_sigterm_handler_fn"): _LIGHTNING,
}
"""By the package and the name of a signal's handler."""
_DEEP = 4
"""Handlers that hold other handlers are followed so far."""


def already_requeued_by(env: Mapping[str, str] = os.environ) -> str:
    """What is wrong and what to do, for people; empty where nobody else was noticed.

    A batch script that calls `scontrol requeue` by itself is not seen.
    """
    if env.get("SUBMITIT_EXECUTOR") == "slurm":
        return _SUBMITIT.format(sign="SUBMITIT_EXECUTOR=slurm")
    for number in sorted(signal.valid_signals()):
        for handler in _handlers(signal.getsignal(number), _DEEP):
            package = str(getattr(handler, "__module__", "")).partition(".")[0]
            name = str(getattr(handler, "__name__", ""))
            if text := _HANDLERS.get((package, name)):
                return text.format(sign=f"{name} handles {getattr(number, 'name', number)}")
    return ""


def _handlers(handler: Any, deep: int) -> Iterator[Any]:
    """A signal's handler, and those that it passes the signal on to."""
    if handler is None or isinstance(handler, int):
        return
    yield handler
    held = getattr(handler, "signal_handlers", None)
    if deep and isinstance(held, (list, tuple)):
        for other in held:
            yield from _handlers(other, deep - 1)
