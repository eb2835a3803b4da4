"""States of a resize: which may follow which and why, and how long each may last.

A state is stored before its action is done, so it means "this is about to happen, or has happened". A step that is not
in the table raises `IllegalTransition`. ``python -m slurm_ones.act.transitions`` draws the table for
docs/architecture.md.

A resize is rolled back if Slurm refuses it, its owner opts out, or the job waits too long. Then it passes through the
same states to the job's old shape (`ResizeRecord.back`). A job that somebody else holds, or that waits for its earliest
start, gets its old shape without a hold of the companion.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ones_db import ResizeRecord
from slurm_ones.rules.blocks import BLOCKS, REQUEUE


class State(str, Enum):
    """States of a resize."""

    DRAINING = "draining"
    REQUEUING = "requeuing"
    PARKING = "parking"
    HOLDING = "holding"
    RESHAPING = "reshaping"
    RELEASING = "releasing"
    WAITING = "waiting"
    STARTING = "starting"
    PREPARING = "preparing"
    """Blocks that will join are held, and get their shapes."""
    OPENING = "opening"
    """The job gets the order to train with the new blocks, and the joining blocks are released."""
    JOINING = "joining"
    """The job trains on until all joining blocks are ready, then reports the new membership."""
    LEAVING = "leaving"
    """Blocks that left, or in a roll-back the joining blocks, end, and their tasks are held again."""
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    ABANDONED = "abandoned"
    """The job was left as it was."""
    ENDED = "ended"
    """The job ended while its resize was open."""

    @property
    def final(self) -> bool:
        return self in FINAL


class Direction(Enum):
    """Pairs of `Stage.back` before and after a transition: False is forward, True is rolled back."""

    THERE = ((False, False),)
    BACK = ((True, True),)
    EITHER = ((False, False), (True, True))
    TURN = ((False, True),)
    AFTER_ALL = ((True, False),)


class Stage(NamedTuple):
    """A state of a resize; `back` is True while the resize is being rolled back."""

    state: State
    back: bool = False

    @classmethod
    def of(cls, resize: ResizeRecord) -> Stage:
        return cls(State(resize.state), resize.back)

    def __str__(self) -> str:
        return self.state.value + "_back" * self.back


class Edge(NamedTuple):
    """A transition that is allowed."""

    mechanism: str
    """Mechanism of the resize: `BLOCKS`, or `REQUEUE` for a plain or a waiting job."""
    before: State
    direction: Direction
    after: State
    why: str


_CLOSED = "decided by the shape that Slurm shows, whichever was asked for last"
_FORGOTTEN = "slurmctld lost the release: the job is in our hold again; or, on the way back, in Slurm's own"
_THERE, _BACK, _EITHER, _TURN, _AFTER_ALL = Direction

EDGES = (
    Edge(REQUEUE, State.DRAINING, _THERE, State.REQUEUING, "the checkpoint that answers this drain is durable"),
    Edge(REQUEUE, State.DRAINING, _THERE, State.ABANDONED, "no checkpoint in time, or not wanted: it trains on"),
    Edge(REQUEUE, State.REQUEUING, _THERE, State.PARKING, "it waits in our hold, and is to have no GPUs"),
    Edge(REQUEUE, State.REQUEUING, _THERE, State.RESHAPING, "it waits in our hold"),
    Edge(REQUEUE, State.REQUEUING, _THERE, State.ABANDONED, "refused, others were faster, or its minute is over"),
    Edge(REQUEUE, State.PARKING, _THERE, State.DONE, "deferred, and in no hold: it starts without a companion too"),
    Edge(REQUEUE, State.PARKING, _THERE, State.ROLLED_BACK, "an operator holds it, and may release it"),
    Edge(REQUEUE, State.PARKING, _TURN, State.RELEASING, "not to be deferred, not wanted, or released by its owner"),
    Edge(REQUEUE, State.HOLDING, _EITHER, State.RESHAPING, "it waits in our hold"),
    Edge(REQUEUE, State.HOLDING, _TURN, State.RELEASING, "refused; or too late: it would act at the next requeue"),
    Edge(REQUEUE, State.HOLDING, _BACK, State.RELEASING, "refused: its shape is put back as it waits"),
    Edge(REQUEUE, State.HOLDING, _AFTER_ALL, State.RELEASING, "it started at the new shape, perhaps in our hold"),
    Edge(REQUEUE, State.HOLDING, _THERE, State.ABANDONED, "it started, others hold it, or the resize is not wanted"),
    Edge(REQUEUE, State.RESHAPING, _EITHER, State.RELEASING, "Slurm accepted the shape, or refused the old one"),
    Edge(REQUEUE, State.RESHAPING, _TURN, State.RESHAPING, "refused, perhaps after Slurm took a part; or not wanted"),
    Edge(REQUEUE, State.RELEASING, _EITHER, State.WAITING, "it is in no hold; on the way back, or in an operator's"),
    Edge(REQUEUE, State.RELEASING, _EITHER, State.STARTING, "it started before it was seen to wait"),
    Edge(REQUEUE, State.RELEASING, _TURN, State.RESHAPING, "Slurm took a shape that it never starts, or releases"),
    Edge(REQUEUE, State.RELEASING, _EITHER, State.RESHAPING, "slurmctld lost the requeue, and the new shape with it"),
    Edge(REQUEUE, State.RELEASING, _TURN, State.WAITING, "an operator's hold, which stays"),
    Edge(REQUEUE, State.WAITING, _EITHER, State.STARTING, "it runs"),
    Edge(REQUEUE, State.WAITING, _EITHER, State.DONE, f"of a job that waited, or on the way back: {_CLOSED}"),
    Edge(REQUEUE, State.WAITING, _EITHER, State.ROLLED_BACK, f"of a job that waited, or on the way back: {_CLOSED}"),
    Edge(REQUEUE, State.WAITING, _TURN, State.HOLDING, "it waits too long, or Slurm never starts it at this shape"),
    Edge(REQUEUE, State.WAITING, _TURN, State.WAITING, "it waits for a hold of others, a dependency, its --begin"),
    Edge(REQUEUE, State.WAITING, _EITHER, State.RESHAPING, _FORGOTTEN),
    Edge(REQUEUE, State.STARTING, _EITHER, State.DONE, f"it reported, ended or is silent: {_CLOSED}"),
    Edge(REQUEUE, State.STARTING, _EITHER, State.ROLLED_BACK, f"it reported, ended or is silent: {_CLOSED}"),
    Edge(REQUEUE, State.STARTING, _EITHER, State.RESHAPING, _FORGOTTEN),
    Edge(BLOCKS, State.PREPARING, _THERE, State.OPENING, "waiting tasks are held, and joining blocks have their shape"),
    Edge(BLOCKS, State.PREPARING, _TURN, State.LEAVING, "a task cannot be used, or others hold it; or not wanted"),
    Edge(BLOCKS, State.OPENING, _THERE, State.JOINING, "the order is written, and no joining block is in our hold"),
    Edge(BLOCKS, State.OPENING, _TURN, State.LEAVING, "no order could be written, a release was refused, not wanted"),
    Edge(BLOCKS, State.JOINING, _THERE, State.LEAVING, "the joining blocks run, and the job reports them"),
    Edge(BLOCKS, State.JOINING, _TURN, State.LEAVING, "a block ended, is held or waits too long: it trains on"),
    Edge(BLOCKS, State.LEAVING, _THERE, State.DONE, "blocks that left are in our hold, or run past the deadline"),
    Edge(BLOCKS, State.LEAVING, _BACK, State.ROLLED_BACK, "the order is cancelled, the joining blocks are in our hold"),
    Edge(BLOCKS, State.LEAVING, _AFTER_ALL, State.LEAVING, "the job followed the order before it could be cancelled"),
)
"""All allowed transitions, except those to `ended`, which may follow every state that is not final."""

FINAL = frozenset(State) - {edge.before for edge in EDGES}


def _steps() -> Iterator[tuple[Stage, Stage]]:
    for edge in EDGES:
        for before, after in edge.direction.value:
            yield Stage(edge.before, before), Stage(edge.after, after and edge.after not in FINAL)
            yield Stage(edge.before, before), Stage(State.ENDED)


TRANSITIONS = {stage: frozenset(after for before, after in _steps() if before == stage) for stage, _ in _steps()}
"""Stages that may follow each stage that is not final."""

LASTS = {
    State.DRAINING: "drain_timeout_s",
    State.HOLDING: "drain_timeout_s",
    State.WAITING: "max_wait_s",
    State.STARTING: "start_timeout_s",
    State.PREPARING: "drain_timeout_s",
    State.JOINING: "blocks_wait_s",
    State.LEAVING: "blocks_wait_s",
}
"""Field of `config.ResizeSettings` with the longest duration of a state, in seconds, by state."""

HOLDS_JOB = frozenset({State.REQUEUING, State.PARKING, State.HOLDING, State.RESHAPING, State.RELEASING})
"""States in which the companion may hold the job; it releases the job before it ends the resize."""

NEEDS_COMPANION = HOLDS_JOB | {State.DRAINING, State.PREPARING, State.OPENING, State.LEAVING}
"""States in which a job or GPUs would stay idle if no companion ran."""


class IllegalTransition(Exception):
    """Attempt at a transition that is not in the table."""


def first_state(mechanism: str, *, running: bool = True) -> State:
    """Return the first state of a resize by this mechanism, for a running or a pending job."""
    if mechanism == BLOCKS:
        return State.PREPARING
    return State.DRAINING if running else State.HOLDING


def picture() -> str:
    """Return the table as a Mermaid state diagram, without the state `ended`."""
    lines = [
        "stateDiagram-v2",
        f"    [*] --> {first_state(REQUEUE).value}: the job runs",
        f"    [*] --> {first_state(REQUEUE, running=False).value}: the job waits",
        f"    [*] --> {first_state(BLOCKS).value}: blocks join or leave",
    ]
    ways: dict[tuple[State, State], list[Direction]] = {}
    for edge in EDGES:
        ways.setdefault((edge.before, edge.after), []).append(edge.direction)
    order = [*State]
    for before, after in sorted(ways, key=lambda ends: (order.index(ends[0]), order.index(ends[1]))):
        taken = ", ".join(way.name.lower().replace("_", " ") for way in ways[before, after])
        lines.append(f"    {before.value} --> {after.value}: {taken}")
    lines += [f"    {state.value} --> [*]" for state in State if state.final and state is not State.ENDED]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
