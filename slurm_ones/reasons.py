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
    # What became of a resize (act/)
    "job_unknown": "Slurm no longer knows the job",
    "job_ended": "the job is {state}",
    "release_forgotten": "Slurm has forgotten that it released the job, which is reshaped and released again",
    "run_ended": "its run ended before it was drained",
    "switched_off": "resizing was switched off",
    "held_while_running": "it was held while it ran",
    "order_not_written": "no order could be given: {problem}",
    "no_checkpoint": "no checkpoint in time",
    "released_before_reshape": "it was released before it could be reshaped",
    "started_before_reshape": "it started before it could be reshaped",
    "released_before_parking": "it was released before it could be parked",
    "not_requeued_in_time": "it was not requeued in time and trains on",
    "drain_cancelled": "its drain was cancelled",
    "requeue_refused": "Slurm did not requeue it: {answer}",
    "hold_refused": "Slurm did not hold it: {answer}",
    "defer_refused": "Slurm did not defer it: {answer}",
    "shape_refused": "the new shape was refused: {answer}",
    "old_shape_refused": "the old shape was refused: {answer}",
    "release_refused": "Slurm does not release it at this shape: {answer}",
    "held_by_operator": "it is held by an operator",
    "held_by_owner": "it is held by its owner",
    "never_starts": "Slurm never starts it at this shape: {cause}",
    "waits_for_other": "it waits for its earliest start, or for another job",
    "queued_too_long": "it waited longer than {seconds:.0f} s",
    "parked": "it is parked",
    "stands": "it {now} at {shape}",
    "stands_held": "it {now} at {shape}, held by {holder}",
    "stands_run_ended": "it {now} at {shape}, and that run ended before it reported its start",
    "stands_no_start_report": "it {now} at {shape}, and has not reported its start",
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

    def stored(self) -> tuple[str, dict[str, Argument], str]:
        """Code, arguments and sentence, as the database keeps them (`ones_db.ReasonRecord`)."""
        return self.code, dict(self.arguments), str(self)


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
