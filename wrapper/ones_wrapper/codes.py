"""Exit codes that mean something to `ones-run`, which decides by them what comes next.

0 ends the job; every other code that is not named here is the script's own, and ends the job too: a script that
fails would fail again. 128+n says that signal n killed a rank.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

USAGE_ERROR = 2
"""Nothing was started, because something asked for was missing or contradictory."""

STOP_CODE = 128 + signal.SIGTERM
"""A stop that a signal asked for: training is not finished, and Slurm should see that."""

DONT_RESTART = 100
"""The script's or its owner's word that the job shall end here: it is neither started again nor requeued."""

OUT_OF_MEMORY = 101
"""A batch did not fit although it had been made smaller: start the ranks again, with what was learned."""

HUNG = 102
"""No rank reached a step boundary for `ONES_HANG_S`: start the ranks again from the last checkpoint."""

CRASHED = tuple(
    128 + s
    for s in (
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
)
"""Ends of a rank that are no word of its script: killed for memory, a dead GPU, a library's abort. The last two are
asked for by Slurm or the owner, and kill a process only in the moment before it listens to them."""


def cause(codes: Sequence[int]) -> int:
    """Of the codes of one run, in the order in which they came, the one that explains the others; 0 for none.

    When a rank is killed or hangs, the others fail with errors of their own that are mere consequences.
    """
    failed = [code for code in codes if code]
    for group in ((DONT_RESTART,), (HUNG, OUT_OF_MEMORY), CRASHED):
        for code in failed:
            if code in group:
                return code
    return next((code for code in failed if code != STOP_CODE), failed[0] if failed else 0)
