"""Why something is as it is, as the database keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReasonRecord:
    """A reason: its code, by which causes are counted, and the sentence that people read. False where it says nothing.

    The codes and their sentences are the companion's (`slurm_ones.reasons`); here they are stored as they come.
    """

    code: str = ""
    """Empty where none was given, as in rows that are older than schema 0009."""
    arguments: Mapping[str, str | int | float] = field(default_factory=dict, hash=False)
    """What the sentence names: numbers, names, states. A number that is not finite comes back as text."""
    text: str = ""
    """The sentence."""

    def __bool__(self) -> bool:
        return bool(self.code or self.text)

    def __str__(self) -> str:
        return self.text


NO_REASON = ReasonRecord()
"""Nothing to say."""
