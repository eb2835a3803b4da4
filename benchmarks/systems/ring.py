"""Attention over a ring of ranks: equality with dense attention in float64, bytes on the wire, and what layers keep.

Real gloo ranks on this machine; the bytes are payload, counted where operations of torch.distributed are dispatched.
"""

from __future__ import annotations

from itertools import product

import torch

from ones_wrapper.group import Group
from ones_wrapper.strategies.ring.transformer_sizes import Transformer
from tests.wrapper.forked import Team
from tests.wrapper.layouts import attention_ranks, layer_ranks
from tests.wrapper.traffic import Traffic

SIZES = (1, 2, 4, 8)


def sent_over_formula(group: Group, size: int, causal: bool) -> float:
    """Of a forward and a backward pass of one layer's attention in single precision."""
    with Traffic() as sent:
        attention_ranks.sent(group, size, "ring", causal)
    width = attention_ranks.HEADS * attention_ranks.WIDTH
    said = Transformer(1, width, attention_ranks.HEADS).ring_bytes(attention_ranks.LENGTH, size)
    return sent.bytes / (attention_ranks.BATCH * said)


def measure() -> dict[str, float]:
    """The worst over rings of 1, 2, 4 and 8 ranks, and over both kinds of attention where it is an error: causal and
    not, with and without padding and dropout. Ratios are those farthest from 1.
    """
    team = Team(8)
    try:
        cases = product(SIZES, attention_ranks.FUNCTIONS, (False, True), (False, True), (0.0, 0.3))
        errors = [team.run(attention_ranks.errors, *case, torch.float64) for case in cases]
        layers = [team.run(layer_ranks.layer_errors, size, causal) for size in SIZES for causal in (False, True)]
        wire = [
            one
            for size, causal in product(SIZES[1:], (False, True))
            for one in team.run(sent_over_formula, size, causal)
        ]
        kept = [team.run(layer_ranks.kept_bytes, size, False) for size in SIZES]
        paper = [team.run(layer_ranks.kept_bytes, size, True) for size in SIZES]
    finally:
        team.close()
    memory = [found / said for ranks in (*kept, *paper) for found, said in ranks]
    return {
        "max_error": max(value for ranks in (*errors, *layers) for rank in ranks for value in rank),
        "wire_over_formula": max(wire, key=lambda ratio: abs(ratio - 1)),
        "memory_over_formula": max(memory, key=lambda ratio: abs(ratio - 1)),
        "memory_at_8_over_1": kept[-1][0][0] / kept[0][0][0],
        "two_pass_over_ring_memory_at_8": paper[-1][0][0] / kept[-1][0][0],
    }
