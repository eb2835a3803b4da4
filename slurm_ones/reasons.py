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
    "fits_nowhere": "none of the GPU counts it takes ({counts}) and their batches fit this cluster",
    "nodes_do_not_add_up": "the GPUs it holds are not all on nodes that can be used now",
    "no_room": "there is no room now for {gpus:GPU|GPUs}",
    "in_queue": "there is no room now for {gpus:GPU|GPUs}: it is number {place} of {waiting} waiting",
    "turn": "its turn has come: {first} go first",
    "interrupted": "its turn is too late to keep its GPUs: {first} go first",
    "never_interrupted": "this policy never interrupts a running job",
    "between_changes": "running jobs change size every {seconds:.0f} s at most",
    "least_total_time": "the sum of all jobs' completion times is expected to be least so",
    "trains_faster": "there it is expected to train {factor:.2g} times as fast",
    "gives_up_gpus": "at {factor:.2g} times its speed the sum of all jobs' completion times is expected to be least",
    "no_change_repays": "no change of its GPUs would repay an interruption of {seconds:.0f} s",
    "better_batch": "it is expected to train faster with batch {batch} than with {before}",
    "smallest_size": "a job starts on the smallest size that it takes",
    "least_remaining": "all jobs then need the fewest GPU-seconds; {speed:.3g} samples/s are predicted for it",
    "stopped": "all jobs need the fewest GPU-seconds while it is stopped",
    "changed_lately": "{gpus:GPU|GPUs} would be better, but that changes a job that changed less than "
    "{epochs:epoch|epochs} ago",
    "shortens_most": "GPUs go one by one to the job whose remaining time they shorten most",
    "best_total": "of all schedules weighed, this one is best by {total}",
    "nearly_best_total": "of all schedules weighed, this one is within {percent:.2g} % of the best by {total}",
    "no_solution": "the integer program has no answer ({message}), so nothing changes",
    "network": "the trained network scored this highest",
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
