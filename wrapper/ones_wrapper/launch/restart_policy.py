"""Decision after an exit code: end the job, start its ranks again, or requeue the job. Pure functions.

Exit code 0 ends the job. A code that is not named here is the script's own, and ends the job as well: the script would
fail again. 128+n means that signal n killed a rank. The number of restarts and requeues without a newer complete
checkpoint is limited. A block that starts again because of other blocks counts no failure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ones_wrapper.process.exit_codes import (
    CRASHED,
    DEVICE_FAILED,
    DONT_RESTART,
    HUNG,
    OUT_OF_MEMORY,
    PEER_LOST,
    STOP_CODE,
)

MOST_FORKS = 20
"""Largest number of consecutive starts of a block's ranks, after losses of other blocks, without a newer checkpoint."""


def fork_delay_s(row: int) -> float | None:
    """Return the seconds before a block's ranks start again after the loss of other blocks; None if `ones-run` decides.
    `row` is the number of losses in a row, from 1."""
    if row > MOST_FORKS:
        return None
    return 0.0 if row <= 1 else min(5.0, 0.1 * 2.0 ** (row - 2))


_RESTARTED = {*CRASHED, HUNG, OUT_OF_MEMORY, PEER_LOST, DEVICE_FAILED}
GOOD_S = 600.0
"""Seconds of training with other blocks after which a newer checkpoint counts as this block's own progress."""
_LONGEST_DELAY_S = 30.0
_MOST_HALVINGS = 30
"""Largest number of restarts after the exit code `OUT_OF_MEMORY`, each with half the samples in a pass. A script that
itself exits with this code would otherwise restart for ever."""


def script_failed(code: int) -> bool:
    """Return True if a start ended with an error of the script: the script would fail on other nodes, too."""
    return code not in (0, STOP_CODE, DONT_RESTART) and code not in _RESTARTED


class Action(Enum):
    """The next step of `ones-run`."""

    END = "end"
    RESTART = "restart"
    REQUEUE = "requeue"


@dataclass(frozen=True)
class RestartLimits:
    """Bounds on restarts and requeues."""

    retries: int = 3
    """Largest number of consecutive starts of the ranks, after a crash, without a newer checkpoint."""
    requeues: int = 20
    """Largest number of requeues of the job by `ones-run`; requeues by the companion or by Slurm do not count."""


@dataclass(frozen=True)
class Tries:
    """Numbers of restarts and requeues so far, stored in the job's directory. SLURM_RESTART_COUNT also counts other
    requeues."""

    job_id: int = 0
    requeues: int = 0
    requeued_at: str = ""
    """Newest checkpoint at the last requeue."""
    restarts: int = 0
    """Number of all starts of the ranks after a crash."""
    failures: int = 0
    """Number of consecutive starts after a crash without a newer checkpoint."""
    failed_at: str = ""
    """Newest checkpoint at the last start after a crash."""
    halvings: int = 0
    """Number of starts after a pass ran out of memory."""


@dataclass(frozen=True)
class StartOutcome:
    """End of a start of the ranks: exit code, cause and progress."""

    code: int
    stopped: bool = False
    """True if SIGTERM or SIGINT asked `ones-run` to stop: scancel, Slurm's own requeue, Ctrl-C."""
    warned: bool = False
    """True if SIGUSR2 announced that the job's time is nearly over."""
    drained: bool = False
    """True if the ranks obeyed an order to drain: the companion requeues the job."""
    checkpoint: str = ""
    """Name of the newest complete checkpoint; empty if there is none."""
    ours: bool = False
    """True if this run wrote or loaded the newest checkpoint."""
    steady: bool = True
    """True if a newer checkpoint counts as progress of this block (`GOOD_S`)."""
    no_requeue: str = ""
    """Reason why the job cannot be requeued from here; empty if it can."""


@dataclass(frozen=True)
class Decision:
    """The next step of `ones-run`, and a line for the log."""

    action: Action
    why: str
    tries: Tries
    delay_s: float = 0.0


def _step(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("step-") or -1)


def newer(checkpoint: str, than: str) -> bool:
    """Return True if a checkpoint is of a later step than another; an empty name is older than all."""
    return _step(checkpoint) > _step(than)


def decide(end: StartOutcome, tries: Tries, limits: RestartLimits) -> Decision:
    """Return the next step."""
    if end.code not in (0, DONT_RESTART) and not end.stopped:
        if end.warned and not script_failed(end.code):
            return _requeue(end, tries, limits, "the job's time is over")
        if not end.warned and end.code in _RESTARTED and not end.drained:
            return _restart(end, tries, limits)
    return Decision(Action.END, "", tries)


def _requeue(end: StartOutcome, tries: Tries, limits: RestartLimits, what: str) -> Decision:
    refusal = end.no_requeue
    if not refusal and not (end.checkpoint and end.ours):
        refusal = "this run has made no checkpoint and loaded none, so the next would do the same again"
    if not refusal and tries.requeues >= limits.requeues:
        refusal = f"it was requeued {tries.requeues} times, and --requeues allows no more"
    if not refusal and tries.requeues and not newer(end.checkpoint, tries.requeued_at):
        refusal = f"there is no newer checkpoint than {tries.requeued_at}, at which it was requeued before"
    if refusal:
        return Decision(Action.END, f"{what} and it is not requeued: {refusal}", tries)
    counted = replace(tries, requeues=tries.requeues + 1, requeued_at=end.checkpoint)
    why = f"{what}: requeue {counted.requeues} of {limits.requeues}, to go on from {end.checkpoint}"
    return Decision(Action.REQUEUE, why, counted)


def _restart(end: StartOutcome, tries: Tries, limits: RestartLimits) -> Decision:
    if end.code == OUT_OF_MEMORY and tries.halvings < _MOST_HALVINGS:
        # No try is used up: each start halves the samples a pass, and at one sample the ranks end with another code.
        counted = replace(tries, restarts=tries.restarts + 1, halvings=tries.halvings + 1)
        return Decision(Action.RESTART, "out of memory; starting the ranks again with smaller passes", counted)
    fresh = tries.failures == 0 or (end.steady and newer(end.checkpoint, tries.failed_at))
    failures = 1 if fresh else tries.failures + 1
    what = {
        HUNG: "the ranks hung",
        OUT_OF_MEMORY: "out of memory again and again",
        PEER_LOST: "other blocks were lost again and again",
        DEVICE_FAILED: "a GPU failed",
    }.get(end.code, f"a rank was killed by signal {end.code - 128}")
    if end.code == DEVICE_FAILED and failures > 1:  # the same card again
        elsewhere = _requeue(end, tries, limits, "a GPU failed again")
        if elsewhere.action is Action.REQUEUE:
            return elsewhere
    if failures > limits.retries:
        tried = f"tried {tries.failures} more times without a newer checkpoint" if tries.failures else "--retries is 0"
        return Decision(Action.END, f"{what}; {tried}, so the job ends", tries)
    counted = replace(tries, restarts=tries.restarts + 1, failures=failures, failed_at=end.checkpoint)
    place = f"from {end.checkpoint}" if end.checkpoint else "from the beginning"
    why = f"{what}; starting the ranks again {place}, try {failures} of {limits.retries}"
    return Decision(Action.RESTART, why, counted, min(_LONGEST_DELAY_S, 2.0 ** (failures - 1)))
