"""What a job's training strategy holds it to, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ones_db.reasons import Reason, reason
from ones_wrapper.limits import Limits

MOST_NAMED = 12
"""Numbers of GPUs in a sentence."""


class Row(Protocol):
    """What holds at one number of GPUs."""

    @property
    def gpus(self) -> int: ...


def counts(rows: Sequence[Row]) -> str:
    """The numbers of GPUs that a strategy can use, in a sentence: `1, 2, 4 or 8`; of many the first and the last."""
    found = [row.gpus for row in rows]
    if len(found) > MOST_NAMED:
        return f"{', '.join(map(str, found[: MOST_NAMED - 1]))} … {found[-1]}"
    *others, last = map(str, found)
    return f"{', '.join(others)} or {last}" if others else last


def described(limits: Limits) -> tuple[Reason, ...]:
    """What a strategy holds its job to, a sentence each, for the job's owner."""
    name, said = limits.strategy, []
    if limits.sizes:
        said.append(reason("strategy_sizes", strategy=name, counts=counts(limits.sizes)))
    if limits.batch_fixed:
        said.append(reason("strategy_batch_fixed", strategy=name))
    if limits.min_steps:
        said.append(reason("strategy_every", strategy=name, steps=limits.min_steps))
    if limits.carries or limits.resets:
        kept, lost = ", ".join(limits.carries) or "nothing more", ", ".join(limits.resets) or "nothing"
        said.append(reason("strategy_carries", strategy=name, carries=kept, resets=lost))
    if not limits.exact:
        said.append(reason("strategy_inexact", strategy=name))
    return tuple(said)
