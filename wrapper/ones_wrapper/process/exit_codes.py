"""Exit codes that the wrapper defines; every other exit code is the script's."""

from __future__ import annotations

import signal
from collections.abc import Sequence

USAGE_ERROR = 2
"""Nothing was started, because an option or requirement was missing or contradictory."""

STOP_CODE = 128 + signal.SIGTERM
"""Stop by a signal: training is not finished, and Slurm should see that."""

DONT_RESTART = 100
"""The script or its owner asks that the job ends here: it is neither started again nor requeued."""

OUT_OF_MEMORY = 101
"""A batch did not fit although it had been made smaller: start the ranks again with the limit learned."""

HUNG = 102
"""No rank reached a step boundary for `ONES_HANG_S`: start the ranks again from the last checkpoint."""

PEER_LOST = 103
"""A block's peer was lost: start the ranks again at once."""

NEXT_TERM = 104
"""The ranks of a block wrote a checkpoint to train on with other blocks: start the ranks again at once."""

DEVICE_FAILED = 105
"""A GPU, its driver or its links failed: start the ranks again here, and if it fails again, on other nodes."""

_CRASHES = ("KILL", "SEGV", "ABRT", "BUS", "FPE", "ILL", "USR1", "USR2")
CRASHED = tuple(128 + signal.Signals[f"SIG{name}"] for name in _CRASHES)
"""Exit codes of signals that end a process without the script's will: killed for memory, a dead GPU, a library's abort.
Slurm or the owner sends the last two, which kill only a process without handlers yet."""


_CAUSES = ((DONT_RESTART,), (HUNG, OUT_OF_MEMORY), (DEVICE_FAILED,), CRASHED)
_CONSEQUENCES = ((STOP_CODE,), (PEER_LOST, NEXT_TERM))


def explaining_code(codes: Sequence[int]) -> int:
    """Return the exit code, among the `codes` of one run, that explains the others; 0 for none. When a rank is killed
    or hangs, the errors of the other ranks are mere consequences."""
    groups = (*_CAUSES, {*codes}.difference(*_CAUSES, *_CONSEQUENCES), *_CONSEQUENCES)
    ordered = (code for group in groups for code in codes if code and code in group)
    return next(ordered, 0)
