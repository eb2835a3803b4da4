"""The greedy solution: a price for GPUs at which they suffice, then what is left to whom it helps most."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones.worth import Choices
from slurm_ones.schedule.policy import Floats, Ints

HALVINGS = 40
FILLS = 64
"""Most jobs that get more of what is left."""


def greedy(choices: Choices) -> Ints:
    """Columns (J,) of high worth that need no more GPUs than there are: the Lagrangian's solution, filled up.

    Starts from each job's least where even that is too much: then the least worthy jobs go down to it or wait.
    """
    best = _at_price(choices, 0.0)
    if _gpus(choices, best) > choices.gpus:
        best = _cheapest(choices)
    return fill(choices, best)


def _cheapest(choices: Choices) -> Ints:
    low, high = 0.0, 1.0
    while _gpus(choices, _at_price(choices, high)) > choices.gpus and high < 1e12:
        low, high = high, high * 16.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _gpus(choices, _at_price(choices, middle)) > choices.gpus:
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return _at_price(choices, high)


def _at_price(choices: Choices, price: float) -> Ints:
    best: Ints = (choices.worth - price * choices.sizes).argmax(axis=1)
    return best


def _gpus(choices: Choices, columns: Ints) -> int:
    return int(choices.sizes[columns].sum())


def fill(choices: Choices, columns: Ints) -> Ints:
    """Columns (J,) with what is left of the GPUs given to whom it helps most per GPU, one after the other."""
    columns = columns.copy()
    rows = np.arange(len(columns))
    left = choices.gpus - _gpus(choices, columns)
    if left <= 0 or not len(columns):
        return columns
    more, rate = _growth(choices, rows, columns)
    for _ in range(FILLS):
        rate[more > left] = -np.inf
        best = int(rate.argmax())
        if not np.isfinite(rate.flat[best]):
            break
        j, columns[j] = divmod(best, len(choices.sizes))
        left -= int(more[j, columns[j]])
        more[j : j + 1], rate[j : j + 1] = _growth(choices, rows[j : j + 1], columns[j : j + 1])
    return columns


def _growth(choices: Choices, rows: Ints, columns: Ints) -> tuple[Ints, Floats]:
    """(R, U) GPUs more than those jobs have in `columns` (R,), and the worth each of them brings; -inf where none."""
    more = choices.sizes - choices.sizes[columns][:, None]
    held = choices.worth[rows, columns]
    gain = choices.worth[rows] - np.where(np.isfinite(held), held, 0.0)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return more, np.where((more > 0) & (gain > 0), gain / more, -np.inf)
