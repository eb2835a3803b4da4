"""The moments at which ranks may change. In a plain job they stay those of its start, and nothing happens here."""

from __future__ import annotations

from typing import Any

from ones_wrapper.run.boundary import Agreement


class Unknown(int):
    """A rank or world size in a block that has not joined: equal to no number, and shown as none.

    It is an int all the same, so that a seed may be made of it.
    """

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
    """The ranks of a plain job. `ChangingRanks` are those of a job of blocks."""

    @property
    def joining(self) -> bool:
        """True while others train and these ranks are none of them."""
        return False

    def join(self) -> bool:
        """Join those who train, if others do; true if that began the run. Called before the first step."""
        return False

    def began(self) -> None:
        """The hello was sent, and the first step is next."""

    def stepped(self) -> None:
        """A step was completed."""

    def at_boundary(self) -> None:
        """A step boundary was reached."""

    def agreed(self, agreed: Agreement) -> None:
        """All ranks did what they agreed on, and train on."""

    def over(self) -> None:
        """All is trained, and the last checkpoint is written."""

    def leave(self, code: int) -> None:
        """All ranks end now with this exit code, before the last report."""

    def ended(self, code: int) -> bool:
        """The script ended with this exit code; true if the run has yet to report that."""
        return True

    def failed(self, error: BaseException) -> tuple[int, str] | None:
        """Exit code and note for an error that is not of the script's own making; None for any other."""
        return None
