"""Exit codes that the wrapper defines; every other exit code is the script's."""

from __future__ import annotations

import signal
from collections.abc import Sequence

USAGE_ERROR = 2
"""Nothing was started, because an option or requirement is missing or contradictory."""

STOP_CODE = 128 + signal.SIGTERM
"""A signal stopped the run before training was finished, which Slurm should see."""

DONT_RESTART = 100
"""The script or its owner wants the job to end: it is neither started again nor requeued."""

OUT_OF_MEMORY = 101
"""A local batch did not fit. Half of it is now the largest local batch, with which the ranks start again."""

HUNG = 102
"""No rank reached a step boundary for `ONES_HANG_S` seconds: the ranks start again from the last checkpoint."""

PEER_LOST = 103
"""Other ranks of the training were lost: the ranks start again at once."""

NEXT_TERM = 104
"""The ranks wrote a checkpoint to train with other blocks in the next term: they start again at once."""

DEVICE_FAILED = 105
"""A GPU, its driver or its links failed: the ranks start again here, and after another failure on other nodes."""

_CRASHES = ("KILL", "SEGV", "ABRT", "BUS", "FPE", "ILL", "USR1", "USR2")
CRASHED = tuple(128 + signal.Signals[f"SIG{name}"] for name in _CRASHES)
"""Exit codes of ranks that a signal killed, as after a lack of host memory, a GPU's failure or a library's abort.
SIGUSR1 and SIGUSR2, from Slurm or the owner, kill only a process without handlers."""


_CAUSES = ((DONT_RESTART,), (HUNG, OUT_OF_MEMORY), (DEVICE_FAILED,), CRASHED)
_CONSEQUENCES = ((STOP_CODE,), (PEER_LOST, NEXT_TERM))


def explaining_code(codes: Sequence[int]) -> int:
    """Return the exit code that caused the others, among the `codes` of one run's ranks; 0 if none failed. If a rank
    was killed or hung, other ranks' errors are consequences."""
    groups = (*_CAUSES, {*codes}.difference(*_CAUSES, *_CONSEQUENCES), *_CONSEQUENCES)
    ordered = (code for group in groups for code in codes if code and code in group)
    return next(ordered, 0)
