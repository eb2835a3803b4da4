"""The states of a resize, which may follow which and why, and for how long each lasts.

A state is written to the database before its action is taken, so it reads "this is about to happen, or has". Only
`Machine.move` writes one, and a write that the table does not allow raises `IllegalTransition`. The picture in
docs/architecture.md is made from the table: ``python -m slurm_ones.act.transitions``.

The way back, if Slurm refuses, the owner opts out or the queue is too long, are the states that end in ``_back``, and
`withdrawing` for blocks. A job that others hold, or that waits for its earliest start, goes on at `waiting_back`, where
it gets its old shape in whatever hold it is: Slurm does not say whether it would ever start at the new one.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from slurm_ones.rules.blocks import BLOCKS, REQUEUE


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
    PREPARING = "preparing"
    """Blocks that are to join are held, and given their shapes."""
    OPENING = "opening"
    """The job is ordered to train with other blocks; those that are to join are released."""
    JOINING = "joining"
    """The job trains on until all are ready, and says when it trains with them."""
    LEAVING = "leaving"
    """Blocks that left end, and are put back into a hold."""
    WITHDRAWING = "withdrawing"
    """The job is ordered to stay as it was; blocks that were to join are put back into a hold."""
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    ABANDONED = "abandoned"
    """The job was left as it was."""
    ENDED = "ended"
    """The job finished or was cancelled meanwhile."""

    @property
    def final(self) -> bool:
        return self in FINAL


class Edge(NamedTuple):
    """A step that a resize may take."""

    mechanism: str
    """By which the resize is carried out: `REQUEUE`, which is that of a job that waits too, or `BLOCKS`."""
    before: State
    after: State
    why: str


_CLOSED = "closed by the shape that Slurm holds, whichever was asked for last"
_FORGOTTEN = "slurmctld went back in time: it stands in our hold again"

EDGES = (
    Edge(REQUEUE, State.DRAINING, State.REQUEUING, "the checkpoint that answers this drain is durable, and it waits"),
    Edge(REQUEUE, State.DRAINING, State.ABANDONED, "no checkpoint in time, or not wanted: it trains on as it was"),
    Edge(REQUEUE, State.REQUEUING, State.PARKING, "it waits in our hold, and is to have no GPUs"),
    Edge(REQUEUE, State.REQUEUING, State.RESHAPING, "it waits in our hold"),
    Edge(REQUEUE, State.REQUEUING, State.ABANDONED, "refused, others were faster, or its minute is over: it trains on"),
    Edge(REQUEUE, State.PARKING, State.DONE, "deferred and in no hold: Slurm starts it even without a companion"),
    Edge(REQUEUE, State.PARKING, State.ROLLED_BACK, "an operator holds it: it is theirs"),
    Edge(REQUEUE, State.PARKING, State.RELEASING_BACK, "not to be deferred, not wanted, or released by its owner"),
    Edge(REQUEUE, State.HOLDING, State.RESHAPING, "it waits in our hold"),
    Edge(REQUEUE, State.HOLDING, State.RELEASING_BACK, "hold refused; or too late: it would act at the next requeue"),
    Edge(
        REQUEUE, State.HOLDING, State.ABANDONED, "it started, others hold it, or it is not wanted: Slurm was not asked"
    ),
    Edge(REQUEUE, State.RESHAPING, State.RELEASING, "Slurm took the shape, by what it says when it is asked again"),
    Edge(REQUEUE, State.RESHAPING, State.RESHAPING_BACK, "refused, perhaps after it took a part; or not wanted"),
    Edge(REQUEUE, State.RELEASING, State.WAITING, "it is in no hold"),
    Edge(REQUEUE, State.RELEASING, State.STARTING, "it started before it was seen to wait"),
    Edge(REQUEUE, State.RELEASING, State.RESHAPING_BACK, "Slurm took a shape that it never starts, or never releases"),
    Edge(REQUEUE, State.RELEASING, State.WAITING_BACK, "an operator's hold, which stays"),
    Edge(REQUEUE, State.WAITING, State.STARTING, "it runs"),
    Edge(REQUEUE, State.WAITING, State.DONE, f"of a job that waited: {_CLOSED}"),
    Edge(REQUEUE, State.WAITING, State.ROLLED_BACK, f"of a job that waited: {_CLOSED}"),
    Edge(REQUEUE, State.WAITING, State.HOLDING_BACK, "it waits too long, or Slurm never starts it at this shape"),
    Edge(REQUEUE, State.WAITING, State.WAITING_BACK, "it waits for others: their hold, a dependency, its --begin"),
    Edge(REQUEUE, State.WAITING, State.RESHAPING, _FORGOTTEN),
    Edge(REQUEUE, State.STARTING, State.DONE, f"it reported, ended or is silent: {_CLOSED}"),
    Edge(REQUEUE, State.STARTING, State.ROLLED_BACK, f"it reported, ended or is silent: {_CLOSED}"),
    Edge(REQUEUE, State.STARTING, State.RESHAPING, _FORGOTTEN),
    Edge(REQUEUE, State.HOLDING_BACK, State.RESHAPING_BACK, "it waits in our hold"),
    Edge(REQUEUE, State.HOLDING_BACK, State.RELEASING_BACK, "hold refused: its shape is put back as it waits"),
    Edge(REQUEUE, State.HOLDING_BACK, State.RELEASING, "it started at the new shape after all, perhaps in our hold"),
    Edge(REQUEUE, State.RESHAPING_BACK, State.RELEASING_BACK, "put back; or refused, and not kept held for that"),
    Edge(REQUEUE, State.RELEASING_BACK, State.WAITING_BACK, "it is in no hold, or in an operator's"),
    Edge(REQUEUE, State.RELEASING_BACK, State.STARTING_BACK, "it started before it was seen to wait"),
    Edge(REQUEUE, State.WAITING_BACK, State.STARTING_BACK, "it runs"),
    Edge(REQUEUE, State.WAITING_BACK, State.DONE, f"it waits at the new shape after all: {_CLOSED}"),
    Edge(REQUEUE, State.WAITING_BACK, State.ROLLED_BACK, f"it waits: {_CLOSED}"),
    Edge(REQUEUE, State.WAITING_BACK, State.RESHAPING_BACK, _FORGOTTEN),
    Edge(REQUEUE, State.STARTING_BACK, State.DONE, f"it started at the new shape after all: {_CLOSED}"),
    Edge(REQUEUE, State.STARTING_BACK, State.ROLLED_BACK, f"it reported, ended or is silent: {_CLOSED}"),
    Edge(REQUEUE, State.STARTING_BACK, State.RESHAPING_BACK, _FORGOTTEN),
    Edge(BLOCKS, State.PREPARING, State.OPENING, "all that wait are held, and those that join have their shapes"),
    Edge(BLOCKS, State.PREPARING, State.WITHDRAWING, "a task cannot be had, or others hold it; or not wanted"),
    Edge(BLOCKS, State.OPENING, State.JOINING, "the order stands, and nothing that is to join is in our hold"),
    Edge(BLOCKS, State.OPENING, State.WITHDRAWING, "no order could be written, a release was refused, or not wanted"),
    Edge(BLOCKS, State.JOINING, State.LEAVING, "the job reports that it trains with them, and Slurm that they run"),
    Edge(BLOCKS, State.JOINING, State.WITHDRAWING, "a block ended, is held or waits too long: it trains on as it was"),
    Edge(BLOCKS, State.LEAVING, State.DONE, "those that left wait in our hold, or linger past the deadline"),
    Edge(BLOCKS, State.WITHDRAWING, State.ROLLED_BACK, "the order is called off, and those to join are in our hold"),
    Edge(BLOCKS, State.WITHDRAWING, State.LEAVING, "the order came through before it could be called off"),
)
"""The table. Besides, a job may end at any time: any state that is not final may be followed by `ended`."""

TRANSITIONS = {
    state: frozenset({State.ENDED, *(edge.after for edge in EDGES if edge.before is state)})
    for state in State
    if any(edge.before is state for edge in EDGES)
}
"""The states that may follow each state that is not final."""

BY_BLOCKS = frozenset(edge.before for edge in EDGES if edge.mechanism == BLOCKS)
FINAL = frozenset(State) - TRANSITIONS.keys()

LASTS = {
    State.DRAINING: "drain_timeout_s",
    State.HOLDING: "drain_timeout_s",
    State.WAITING: "max_wait_s",
    State.STARTING: "start_timeout_s",
    State.WAITING_BACK: "max_wait_s",
    State.STARTING_BACK: "start_timeout_s",
    State.PREPARING: "drain_timeout_s",
    State.JOINING: "blocks_wait_s",
    State.LEAVING: "blocks_wait_s",
    State.WITHDRAWING: "start_timeout_s",
}
"""The setting (`config.ResizeSettings`) that says after how many seconds a state's deadline is past."""

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

NEEDS_COMPANION = HOLDS_JOB | {State.DRAINING, State.PREPARING, State.OPENING, State.LEAVING, State.WITHDRAWING}
"""States in which a job, or GPUs, would stand idle without a companion. In the others the job waits in the queue,
starts or trains, whether or not somebody looks."""


class IllegalTransition(Exception):
    """A resize was to go where the table does not let it."""


def first_state(running: bool, *, by_blocks: bool = False) -> State:
    """The first state of the resize of a job that runs, or waits; `by_blocks` if blocks of it join or leave."""
    if by_blocks:
        return State.PREPARING
    return State.DRAINING if running else State.HOLDING


def check_transition(before: State, after: State) -> None:
    """Raises `IllegalTransition` for a step that the table does not have."""
    if after not in TRANSITIONS.get(before, ()):
        raise IllegalTransition(f"a resize does not go from {before.value} to {after.value}")


def picture() -> str:
    """The table as a Mermaid state diagram. What leads to `ended` is left out: every state that is not final does."""
    lines = [
        "stateDiagram-v2",
        f"    [*] --> {first_state(running=True).value}: the job runs",
        f"    [*] --> {first_state(running=False).value}: the job waits",
        f"    [*] --> {first_state(running=True, by_blocks=True).value}: the job is one of blocks and runs",
    ]
    order = [*State]
    edges = sorted(EDGES, key=lambda edge: (order.index(edge.before), order.index(edge.after)))
    lines += [f"    {edge.before.value} --> {edge.after.value}" for edge in edges]
    lines += [f"    {state.value} --> [*]" for state in State if state.final and state is not State.ENDED]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
