"""States of a block in its job, and the table of allowed transitions. All ranks of a block have the same state.

Only `BlockMachine.go` changes a state. A transition that is not in the table is an error of this package. It is logged
and made all the same, since it must not end a training. The picture in docs/how_blocks_work.md is made from the table:
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
    """State of a block in its job."""

    OUTSIDE = "outside"
    """The block's ranks have started, and have found no other block."""
    ADMITTED = "admitted"
    """Other blocks train, and this block waits to join them."""
    LEADING = "leading"
    """The block trains, and its first process has rank 0."""
    MEMBER = "member"
    """The block trains, and another block has rank 0."""
    CHANGING = "changing"
    """The block prepares for a plan, while it trains or waits to join."""
    PARTING = "parting"
    """The block's ranks end: other blocks train without them, or the next term begins."""
    OVER = "over"
    """Training is finished."""
    LOST = "lost"
    """The leader or ranks of other blocks are gone."""


class Carrier(Enum):
    """Way in which the next membership's ranks get the training state. In a plain job it is always the requeue."""

    MEMORY = "memory"
    """Transfer from memory to memory; ranks that stay keep running."""
    CHECKPOINT = "checkpoint"
    """A checkpoint, from which the ranks of the next term begin."""


class BlockEdge(NamedTuple):
    """A transition that a block may make, and its reason."""

    before: BlockState
    after: BlockState
    why: str


_ALL_TRAINED = "training is finished, or the job's owner stopped it"
_OUTSIDE, _ADMITTED, _LEADING, _MEMBER, _CHANGING, _PARTING, _OVER, _LOST = BlockState

BLOCK_EDGES = (
    BlockEdge(_OUTSIDE, _ADMITTED, "others train"),
    BlockEdge(_OUTSIDE, _LEADING, "no block leads: it claims the next term, for itself or for the announced blocks"),
    BlockEdge(_OUTSIDE, _MEMBER, "the term begins with it, and another block leads"),
    BlockEdge(_OUTSIDE, _OVER, "the job has ended"),
    BlockEdge(_ADMITTED, _CHANGING, "a plan names it"),
    BlockEdge(_ADMITTED, _PARTING, "no order names it, or it is asked to end"),
    BlockEdge(_LEADING, _CHANGING, "a plan is published"),
    BlockEdge(_MEMBER, _CHANGING, "a plan is published"),
    BlockEdge(_CHANGING, _ADMITTED, "the plan was dropped"),
    BlockEdge(_CHANGING, _LEADING, "it has rank 0 in the plan, or the plan was dropped"),
    BlockEdge(_CHANGING, _MEMBER, "another block has rank 0 in the plan, or the plan was dropped"),
    BlockEdge(_CHANGING, _PARTING, "it is not in the plan, or the plan begins a term"),
    BlockEdge(_LEADING, _OVER, _ALL_TRAINED),
    BlockEdge(_MEMBER, _OVER, _ALL_TRAINED),
    BlockEdge(_CHANGING, _OVER, _ALL_TRAINED),
    BlockEdge(_PARTING, _OUTSIDE, "it is a member of the next term: its launcher forks its ranks again"),
    BlockEdge(_LOST, _OUTSIDE, "its launcher forks its ranks again"),
)
"""Table of transitions. In addition `lost` may follow any state not in `LAST`."""

LAST = frozenset({_PARTING, _OVER, _LOST})
"""Final states of a block's ranks. After PARTING or LOST its launcher may start new ranks, which begin OUTSIDE."""

_STEPS = {state: {edge.after for edge in BLOCK_EDGES if edge.before is state} | {_LOST} for state in BlockState}


class BlockMachine:
    """State of one rank's block, with the plan and the carrier (`Carrier`) of its next change."""

    def __init__(self, state: BlockState, carrier: Carrier) -> None:
        self.state = self.settled = state
        """Present state. `settled` is the last state that was ADMITTED, LEADING or MEMBER."""
        self.carrier = carrier
        self.plan: Plan | None = None
        """Plan to which the block changes; None if it does not."""
        self._lock = threading.Lock()

    def go(self, to: BlockState) -> None:
        """Change to the state `to`, unless the present state is in `LAST`. Any thread may call this."""
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
        """Return to the settled state after a failed change; does nothing without a change."""
        if self.state is _CHANGING:
            self.go(self.settled)


def block_picture() -> str:
    """Return the table as a Mermaid state diagram. The transitions to `lost` are left out: every state except `LAST`
    has one."""
    steps = [f"    {before.value} --> {after.value}" for before, after, _ in BLOCK_EDGES]
    return "\n".join(["stateDiagram-v2", "    [*] --> outside", *steps, "    parting --> [*]", "    over --> [*]"])


if __name__ == "__main__":
    print(block_picture())
