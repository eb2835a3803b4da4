"""The states of a block in its job, which may follow which and why; each of its ranks holds the same one.

Only `BlockMachine.go` changes a state. A step that the table does not have is a fault of ours: it is taken and logged,
since nobody's training may end for it. The picture in docs/how_blocks_work.md is made from the table:
``python -m ones_wrapper.membership.machine``.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import NamedTuple

from ones_wrapper.membership.plan import Plan
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log


class BlockState(Enum):
    """The part of a block in its job."""

    OUTSIDE = "outside"
    """Its ranks have started, and know of nobody."""
    ADMITTED = "admitted"
    """Others train, and it is to join them."""
    LEADING = "leading"
    """It trains, and has rank 0."""
    MEMBER = "member"
    """It trains, and another block has rank 0."""
    CHANGING = "changing"
    """It prepares for a plan, and goes on as before."""
    PARTING = "parting"
    """Others go on without it, or the next term begins."""
    OVER = "over"
    """All is trained."""
    LOST = "lost"
    """Ranks of other blocks are gone, or the leader."""


class Carrier(Enum):
    """The way by which the state of training reaches the next membership's ranks. A plain job's is its requeue."""

    MEMORY = "memory"
    """Memory to memory, while the ranks stay."""
    CHECKPOINT = "checkpoint"
    """A checkpoint, from which the ranks of the next term begin."""


class BlockEdge(NamedTuple):
    """A step that a block may take."""

    before: BlockState
    after: BlockState
    why: str


_ALL_TRAINED = "all is trained, or its owner stopped it"
_OUTSIDE, _ADMITTED, _LEADING, _MEMBER, _CHANGING, _PARTING, _OVER, _LOST = BlockState

BLOCK_EDGES = (
    BlockEdge(_OUTSIDE, _ADMITTED, "others train"),
    BlockEdge(_OUTSIDE, _LEADING, "nobody leads: it claims the next term, by itself or with those that were announced"),
    BlockEdge(_OUTSIDE, _MEMBER, "the term begins with it, and another block leads"),
    BlockEdge(_OUTSIDE, _OVER, "the job has ended"),
    BlockEdge(_ADMITTED, _CHANGING, "a plan names it"),
    BlockEdge(_ADMITTED, _PARTING, "no order wants it, or it is to end"),
    BlockEdge(_LEADING, _CHANGING, "a plan is published"),
    BlockEdge(_MEMBER, _CHANGING, "a plan is published"),
    BlockEdge(_CHANGING, _ADMITTED, "the plan came to nothing"),
    BlockEdge(_CHANGING, _LEADING, "it has rank 0 of the plan, or the plan came to nothing"),
    BlockEdge(_CHANGING, _MEMBER, "another block has rank 0 of the plan, or the plan came to nothing"),
    BlockEdge(_CHANGING, _PARTING, "the plan is without it, or begins a term"),
    BlockEdge(_LEADING, _OVER, _ALL_TRAINED),
    BlockEdge(_MEMBER, _OVER, _ALL_TRAINED),
    BlockEdge(_CHANGING, _OVER, _ALL_TRAINED),
    BlockEdge(_PARTING, _OUTSIDE, "the next term is to begin with it: its launcher forks its ranks again"),
    BlockEdge(_LOST, _OUTSIDE, "its launcher forks its ranks again"),
)
"""The table. Besides, any state but the last ones may be followed by `lost`."""

LAST = frozenset({_PARTING, _OVER, _LOST})
"""A process that came to one of these ends, and what follows is another's."""

_STEPS = {state: {edge.after for edge in BLOCK_EDGES if edge.before is state} | {_LOST} for state in BlockState}


class BlockMachine:
    """The state of one rank's block, with the carrier of its next change, and its plan."""

    def __init__(self, state: BlockState, carrier: Carrier) -> None:
        self.state = self.settled = state
        """Present state; `settled` is the state before the change under way, or before the end."""
        self.carrier = carrier
        self.plan: Plan | None = None
        """The plan of the change that is under way."""
        self._lock = threading.Lock()

    def go(self, to: BlockState) -> None:
        """Change the state, unless it is a last one: a thread may find others lost while the script's goes on."""
        with self._lock:
            if self.state in LAST or to is self.state:
                return
            if to not in _STEPS[self.state]:
                log(f"a block went from {self.state.value} to {to.value}, which it never should: please report it")
            self.state = to
            if to in (_ADMITTED, _LEADING, _MEMBER):
                self.settled, self.plan = to, None
            FLAGS.leaving = FLAGS.leaving or to is _PARTING

    def prepare(self, plan: Plan) -> None:
        """Begin the change to a plan, in place of any other plan."""
        self.go(_CHANGING)
        self.plan = plan

    def back(self) -> None:
        """Return to the state before a change that came to nothing."""
        if self.state is _CHANGING:
            self.go(self.settled)


def block_picture() -> str:
    """The table as a Mermaid state diagram. What leads to `lost` is left out: every state that is not last does."""
    steps = [f"    {before.value} --> {after.value}" for before, after, _ in BLOCK_EDGES]
    return "\n".join(["stateDiagram-v2", "    [*] --> outside", *steps, "    parting --> [*]", "    over --> [*]"])


if __name__ == "__main__":
    print(block_picture())
