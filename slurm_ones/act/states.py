"""The states of a resize, and how one leads to the next.

::

    to be parked  draining → requeuing → parking → done
    running job   draining → requeuing ─┐
    waiting job             holding  ───┴→ reshaping → releasing → waiting → starting → done
                                               │                      │
                            (Slurm refused, or the owner opted out)   (too long in the queue)
                                               ↓                      ↓
                                        releasing_back ← reshaping_back ← holding_back
                                               ↓
                                         waiting_back → starting_back → rolled_back

A state is written to the database before its action is taken, so it reads "this is about to happen, or has".
A parking that Slurm or its owner does not let happen goes on at `releasing_back`, and the job starts at its old shape.
A job that others hold, or that waits for its earliest start, goes from `releasing` or `waiting` to `waiting_back`,
where it gets its old shape in whatever hold it is: Slurm does not say whether it would ever start at the new one.
`abandoned` means that the job was left as it was, `ended` that it finished or was cancelled meanwhile.
"""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """Where a resize stands."""

    DRAINING = "draining"
    REQUEUING = "requeuing"
    PARKING = "parking"
    HOLDING = "holding"
    RESHAPING = "reshaping"
    RELEASING = "releasing"
    WAITING = "waiting"
    STARTING = "starting"
    HOLDING_BACK = "holding_back"
    RESHAPING_BACK = "reshaping_back"
    RELEASING_BACK = "releasing_back"
    WAITING_BACK = "waiting_back"
    STARTING_BACK = "starting_back"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    ABANDONED = "abandoned"
    ENDED = "ended"

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL = frozenset({State.DONE, State.ROLLED_BACK, State.ABANDONED, State.ENDED})

HOLDS_JOB = frozenset(
    {
        State.REQUEUING,
        State.PARKING,
        State.HOLDING,
        State.RESHAPING,
        State.RELEASING,
        State.HOLDING_BACK,
        State.RESHAPING_BACK,
        State.RELEASING_BACK,
    }
)
"""States in which the job may stand in a hold of ours; none of them is ever given up before a release."""
