"""Hooks at the moments at which a job's ranks may change. A plain job's ranks stay: these do nothing."""

from __future__ import annotations

from typing import Any

from ones_wrapper.run.boundary import Agreement


class Unknown(int):
    """A rank or world size in a block that has not joined: equal to no number, and shown as none. It is an int all the
    same: a script may make a seed of it."""

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
    """Hooks of a plain job, whose ranks stay. `ChangingRanks` has those of a job of blocks."""

    @property
    def joining(self) -> bool:
        """True while other blocks train and these ranks have not joined them."""
        return False

    def join(self) -> bool:
        """Join the blocks that train, if any; return whether that began the run. Called before the first step."""
        return False

    def began(self) -> None:
        """Act after the hello, before the first step."""

    def stepped(self) -> None:
        """Act after each step."""

    def at_boundary(self) -> None:
        """Act at a step boundary, before the ranks agree."""

    def agreed(self, agreed: Agreement) -> None:
        """Act at a step boundary, after the ranks did what they agreed on."""

    def over(self) -> None:
        """Act after the last checkpoint of a finished training."""

    def leave(self, code: int) -> None:
        """Act before the last report, as all ranks end with this exit code."""

    def ended(self, code: int) -> bool:
        """Act after the script ended with this exit code; return whether the run must still report that."""
        return True

    def failed(self, error: BaseException) -> tuple[int, str] | None:
        """Return exit code and note for an error that the script did not cause; None for any other."""
        return None
