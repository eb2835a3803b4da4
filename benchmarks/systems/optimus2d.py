"""Optimus-2D on a mesh of 2 × 2 ranks: how far training is from the dense model's, what it sends against Megatron's
tensor parallelism over as many ranks (torch's own), and its memory against the formula that the scheduler plans by.

Bytes are payloads of collectives, counted at each call; memory is what torch's tracker has seen at most in a step.
"""

from __future__ import annotations

from ones_wrapper.group import Group
from ones_wrapper.strategies.optimus import Optimus2D
from tests.wrapper.forked import Team
from tests.wrapper.layouts import mesh_ranks
from tests.wrapper.layouts.mesh_ranks import largest_memory

Q = 2
BLOCK = (16, 256, 64, 4)
"""Samples, length, hidden and heads of the block whose bytes are counted: 4,096 tokens."""
SAMPLES = 32
MODEL = Optimus2D(q=Q, hidden=64, heads=4, vocab=256, layers=4, length=64)


def _memory(group: Group) -> tuple[float, float]:
    """The largest memory of a step on this rank, and the formula's."""
    costs = MODEL.costs
    return largest_memory(group, Q, costs, SAMPLES), 4 * float(costs.fixed(Q) + SAMPLES * costs.sample(Q))


def measure() -> dict[str, float]:
    """`max_error` of logits, loss, gradients and parameters over two steps in double precision, `bytes_over_1d` of a
    block's forward and backward pass, `memory_over_formula`; besides, the 1D and the 2D bytes a rank."""
    team = Team(Q * Q)
    try:
        errors = team.run(mesh_ranks.training, Q, 5)
        (ours, *_), (theirs, *_) = (
            team.run(function, ranks, *BLOCK)
            for function, ranks in ((mesh_ranks.sent_on_mesh, Q), (mesh_ranks.sent_by_megatron, Q * Q))
        )
        memory = team.run(_memory)
    finally:
        team.close()
    return {
        "max_error": max(max(worst.values()) for worst in errors),
        "bytes_over_1d": ours / theirs,
        "memory_over_formula": max(found / said for found, said in memory),
        "bytes_2d": ours,
        "bytes_1d": theirs,
    }


if __name__ == "__main__":
    print(measure())
