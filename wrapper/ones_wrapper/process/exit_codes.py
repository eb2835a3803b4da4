"""Exit codes with a meaning of their own; every other is the script's."""

from __future__ import annotations

import signal
from collections.abc import Sequence

USAGE_ERROR = 2
"""Nothing was started, because something asked for was missing or contradictory."""

STOP_CODE = 128 + signal.SIGTERM
"""A stop that a signal asked for: training is not finished, and Slurm should see that."""

DONT_RESTART = 100
"""The script or its owner asks that the job ends here: it is neither started again nor requeued."""

OUT_OF_MEMORY = 101
"""A batch did not fit although it had been made smaller: start the ranks again, with what was learned."""

HUNG = 102
"""No rank reached a step boundary for `ONES_HANG_S`: start the ranks again from the last checkpoint."""

PEER_LOST = 103
"""A block that it trained with was lost; to be started again at once."""

NEXT_TERM = 104
"""The ranks of a block wrote a checkpoint, from which they train on with other blocks; to be started again at once."""

DEVICE_FAILED = 105
"""A GPU, its driver or its links failed: start the ranks again here, and if it fails again, on other nodes."""

_CRASHES = ("KILL", "SEGV", "ABRT", "BUS", "FPE", "ILL", "USR1", "USR2")
CRASHED = tuple(128 + signal.Signals[f"SIG{name}"] for name in _CRASHES)
"""Exit codes that are not the script's own: killed for memory, a dead GPU, a library's abort. The last two are
asked for by Slurm or the owner, and kill a process only in the moment before it listens to them."""


def explaining_code(codes: Sequence[int]) -> int:
    """Code among those of one run, in their order, that explains the others; 0 for none.

    When a rank is killed or hangs, the others fail with errors of their own that are mere consequences.
    """
    failed = [code for code in codes if code]
    for group in ((DONT_RESTART,), (HUNG, OUT_OF_MEMORY), (DEVICE_FAILED,), CRASHED):
        for code in failed:
            if code in group:
                return code
    again = (PEER_LOST, NEXT_TERM)
    for consequences in ((STOP_CODE, *again), again):
        for code in failed:
            if code not in consequences:
                return code
    return failed[0] if failed else 0
