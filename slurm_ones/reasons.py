"""Why a job has what it has, or is left as it is: a code and its arguments, rendered here and nowhere else.

A reason is data, so that causes can be counted, stored and compared; its sentence stands for itself, whatever is
printed around it. A new reason is one line of `SENTENCES`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Argument = str | int | float

SENTENCES: dict[str, str] = {
    # Slurm and the job: who is never resized (observe/eligibility.py)
    # The round: who keeps what they have in it (rules/)
    # Limits that a site has set (rules/)
    # What a policy gives and why (decide/)
    # What became of it (rules/plan.py, act/)
}
"""The sentence of each code. ``{gpus:GPU|GPUs}`` is the number with the word that fits it, ``{seconds:.0f}`` as in
`str.format`."""

SITE_LIMITS: frozenset[str] = frozenset()
"""Codes of limits that a site has set."""


@dataclass(frozen=True)
class Reason:
    """A code of `SENTENCES` and its arguments, in the order in which they were given. Made by `reason`."""

    code: str
    arguments: tuple[tuple[str, Argument], ...] = ()

    def __str__(self) -> str:
        """The sentence, for a job's owner."""
        return render(self.code, dict(self.arguments))


def reason(code: str, **arguments: Argument) -> Reason:
    """The reason of that code. Raises KeyError for a code, or an argument, that `SENTENCES` does not know or lacks."""
    wanted = {name for _, name, _, _ in string.Formatter().parse(SENTENCES[code]) if name}
    if wanted != arguments.keys():
        raise KeyError(f"reason {code}: takes {sorted(wanted)}, not {sorted(arguments)}")
    return Reason(code, tuple(arguments.items()))


def render(code: str, arguments: Mapping[str, Argument]) -> str:
    """The sentence of a code. A code of a newer version, as a database may hold it, is shown with its arguments."""
    sentence = SENTENCES.get(code)
    if sentence is None:
        shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return f"{code} ({shown})" if shown else code
    return _PLURALS.vformat(sentence, (), arguments)


class _Plurals(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if "|" in format_spec:
            one, many = format_spec.split("|")
            return f"{value} {one if value == 1 else many}"
        return str(super().format_field(value, format_spec))


_PLURALS = _Plurals()
