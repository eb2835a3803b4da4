"""Hooks called when a job's ranks may change. The ranks of a plain job are fixed, so its hooks do nothing."""

from __future__ import annotations

from typing import Any

from ones_wrapper.process.background import run_behind
from ones_wrapper.run.boundary import Agreement
from ones_wrapper.script.stuck import Watch


class Unknown(int):
    """Rank or world size in a block that has not joined yet: equal to no number, and printed as "none yet". It is an
    int, so that a script can use it as a seed."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __repr__(self) -> str:
        return "none yet"

    def __format__(self, spec: Any) -> str:
        return str(self)


class FixedRanks:
    """Hooks of a plain job, whose ranks are fixed. `ChangingRanks` has the hooks of a job of blocks."""

    @property
    def joining(self) -> bool:
        """True if these ranks wait to join other blocks that train."""
        return False

    def join(self) -> bool:
        """Join the blocks that train; return True if this rank has joined. Does nothing if no other block trains.
        Called before the first step."""
        return False

    def began(self) -> None:
        """Called after the hello, before the first step."""

    def watch(self, others: Watch) -> None:
        """Let a thread find stuck ranks from now on."""
        run_behind("ones-stuck", others.run)

    def stepped(self) -> None:
        """Called after each step."""

    def at_boundary(self) -> None:
        """Called at a step boundary, before the ranks agree."""

    def agreed(self, agreed: Agreement) -> None:
        """Called at a step boundary, after the ranks have acted on their agreement."""

    def over(self) -> None:
        """Called after the last checkpoint of a finished training."""

    def leave(self, code: int) -> None:
        """Called before the last report, when all ranks are about to end with this exit code."""

    def ended(self, code: int) -> bool:
        """Called after the script ended with this exit code. Return True if the run must still report its end."""
        return True

    def failed(self, error: BaseException) -> tuple[int, str] | None:
        """Return (exit code, note) for an error that the loss of other ranks caused; None for any other error."""
        return None
