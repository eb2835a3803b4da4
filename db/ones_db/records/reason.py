"""Why something is as it is, as the database keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Reason(Protocol):
    """What `ReasonRecord.of` takes: the companion's reasons are such (`slurm_ones.reasons.Reason`)."""

    @property
    def code(self) -> str: ...

    @property
    def arguments(self) -> tuple[tuple[str, str | int | float], ...]: ...


@dataclass(frozen=True)
class ReasonRecord:
    """A reason: its code, by which causes are counted, and the sentence that people read. False where it says nothing.

    The codes and their sentences are the companion's; here they are stored as they come.
    """

    code: str = ""
    """Empty where none was given, as in rows that are older than schema 0009."""
    arguments: Mapping[str, str | int | float] = field(default_factory=dict, hash=False)
    """What the sentence names: numbers, names, states. A number that is not finite comes back as text."""
    text: str = ""
    """The sentence."""

    @classmethod
    def of(cls, reason: Reason | str | None) -> ReasonRecord:
        """What is stored of a reason; of a bare sentence that alone, of None nothing."""
        if reason is None or isinstance(reason, str):
            return cls(text=reason or "")
        return cls(reason.code, dict(reason.arguments), str(reason))

    def __bool__(self) -> bool:
        return bool(self.code or self.text)

    def __str__(self) -> str:
        return self.text


NO_REASON = ReasonRecord()
"""Nothing to say."""
