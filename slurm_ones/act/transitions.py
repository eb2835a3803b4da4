"""The states of a resize, and which may follow which.

A state is written to the database before its action is taken, so it reads "this is about to happen, or has". Only
`ResizeMachine` writes one, and a write that `TRANSITIONS` does not allow raises `IllegalTransition`. The picture in
docs/architecture.md is made from the table: ``python -m slurm_ones.act.transitions``.

The way there is draining → requeuing → reshaping → releasing → waiting → starting → done, for a job that waits from
`holding` on, and `parking` for one that is to be stopped. The way back, where Slurm refuses, the owner opts out or the
queue is too long, are the states that end in ``_back``. A job that others hold, or that waits for its earliest start,
goes on at `waiting_back`, where it gets its old shape in whatever hold it is: Slurm does not say whether it would ever
start at the new one.

A job of blocks changes while it trains: preparing → opening → joining → leaving → done. `withdrawing` is its way back.
"""

from __future__ import annotations

from collections.abc import Mapping
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

NEEDS_COMPANION = HOLDS_JOB | {State.DRAINING, State.PREPARING, State.OPENING, State.LEAVING, State.WITHDRAWING}
"""States in which a job, or GPUs, would stand idle without a companion. In the others the job waits in the queue,
starts or trains, whether or not somebody looks."""

_NEXT: dict[State, set[State]] = {
    State.DRAINING: {State.REQUEUING, State.ABANDONED},
    State.REQUEUING: {State.PARKING, State.RESHAPING, State.ABANDONED},
    State.PARKING: {State.DONE, State.ROLLED_BACK, State.RELEASING_BACK},
    State.HOLDING: {State.RESHAPING, State.RELEASING_BACK, State.ABANDONED},
    State.RESHAPING: {State.RELEASING, State.RESHAPING_BACK},
    State.RELEASING: {State.WAITING, State.STARTING, State.RESHAPING_BACK, State.WAITING_BACK},
    # After a release back to reshaping: Slurm went back in time, and the job stands in our hold again.
    State.WAITING: {
        State.STARTING,
        State.DONE,
        State.ROLLED_BACK,
        State.HOLDING_BACK,
        State.WAITING_BACK,
        State.RESHAPING,
    },
    State.STARTING: {State.DONE, State.ROLLED_BACK, State.RESHAPING},
    State.HOLDING_BACK: {State.RESHAPING_BACK, State.RELEASING_BACK, State.RELEASING},
    State.RESHAPING_BACK: {State.RELEASING_BACK},
    State.RELEASING_BACK: {State.WAITING_BACK, State.STARTING_BACK},
    State.WAITING_BACK: {State.STARTING_BACK, State.DONE, State.ROLLED_BACK, State.RESHAPING_BACK},
    State.STARTING_BACK: {State.DONE, State.ROLLED_BACK, State.RESHAPING_BACK},
    State.PREPARING: {State.OPENING, State.WITHDRAWING},
    State.OPENING: {State.JOINING, State.WITHDRAWING},
    State.JOINING: {State.LEAVING, State.WITHDRAWING},
    State.LEAVING: {State.DONE},
    # To leaving: it trained with them after all.
    State.WITHDRAWING: {State.ROLLED_BACK, State.LEAVING},
}

TRANSITIONS: Mapping[State, frozenset[State]] = {
    # A job may end at any time.
    state: frozenset(_NEXT[state] | {State.ENDED}) if state in _NEXT else frozenset()
    for state in State
}
"""The states that may follow each state; none follows a final one."""


class IllegalTransition(Exception):
    """A resize was to go where the table does not let it."""


def first_state(running: bool, *, by_blocks: bool = False) -> State:
    """Where the resize of a job that runs, or waits, begins; `by_blocks` where blocks of it join or leave."""
    if by_blocks:
        return State.PREPARING
    return State.DRAINING if running else State.HOLDING


def check_transition(before: State, after: State) -> None:
    """Raises `IllegalTransition` for a step that `TRANSITIONS` does not have."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"a resize does not go from {before.value} to {after.value}")


def picture() -> str:
    """The table as a Mermaid state diagram. What leads to `ended` is left out: every state that is not final does."""
    lines = [
        "stateDiagram-v2",
        f"    [*] --> {first_state(running=True).value}: the job runs",
        f"    [*] --> {first_state(running=False).value}: the job waits",
        f"    [*] --> {first_state(running=True, by_blocks=True).value}: the job is one of blocks and runs",
    ]
    for state in State:
        lines += [
            f"    {state.value} --> {after.value}"
            for after in State
            if after in TRANSITIONS[state] and after is not State.ENDED
        ]
    lines += [f"    {state.value} --> [*]" for state in State if state.final and state is not State.ENDED]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
