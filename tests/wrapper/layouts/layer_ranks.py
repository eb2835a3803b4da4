"""What ranks do in the tests of a layer over a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ones_wrapper.group import Group
from ones_wrapper.strategies.ring.attention_module import RingAttention
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategies.ring.transformer_sizes import Transformer
from tests.wrapper.traffic import saved_bytes
from wrapper.examples.lm_ring import Block

SAMPLES, LENGTH, WIDTH, HEADS = 8, 16, 12, 3


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, and which of their tokens are real: each has at least its first."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return x, torch.arange(LENGTH) < lengths


def _bound(group: Group, size: int, causal: bool) -> tuple[Ring, slice]:
    """The ring, and which samples are this replica's."""
    ring = Ring(LENGTH, causal=causal, ranks=size)
    ring.bind(group)
    each = SAMPLES // ring.replicas(group.world)
    replica = group.rank // size
    return ring, slice(replica * each, (replica + 1) * each)


def layer_errors(group: Group, size: int, causal: bool) -> list[float]:
    """The largest differences of the output and of each parameter's gradient from `nn.MultiheadAttention`'s."""
    torch.manual_seed(0)
    own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    x, real = _inputs()
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if causal else None
    wanted = own(x, x, x, key_padding_mask=~real, attn_mask=hidden, need_weights=False)[0]
    whole = ((wanted.square().sum(-1) * real).sum(1) / real.sum(1)).mean()
    torch.autograd.backward(whole)

    ring, chosen = _bound(group, size, causal)
    layer = RingAttention(ring, WIDTH, HEADS).double()
    layer.load_state_dict(own.state_dict())
    found = layer(ring.shard(x[chosen]), real[chosen])
    loss = ring.mean(found.square().sum(-1), real[chosen]) * (len(x[chosen]) / SAMPLES)  # as job.ddp weighs it
    torch.autograd.backward(loss)
    dist.all_reduce(total := loss.detach())
    errors = [float((found - ring.shard(wanted[chosen])).detach().abs().max()), float((total - whole.detach()).abs())]
    for mine, its in zip(layer.parameters(), own.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        dist.all_reduce(mine.grad)
        errors.append(float((mine.grad - its.grad).abs().max()))
    return errors


def dropped_gradients(group: Group, size: int, rate: float = 0.4) -> list[float]:
    """Of the first replica's samples, added up over its ranks; the same samples whatever the size."""
    ring, _ = _bound(group, size, True)
    torch.manual_seed(0)
    layer = RingAttention(ring, WIDTH, HEADS, dropout=rate).double()
    x, _ = _inputs()
    torch.manual_seed(5)
    loss = ring.mean(ring.dropout(layer(ring.shard(x)), rate).square().sum(-1))
    torch.autograd.backward(loss)
    found = []
    for parameter in layer.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        found += (parameter.grad * size / group.world).flatten().tolist()
    return found


def kept_bytes(group: Group, size: int, two_pass: bool) -> tuple[int, int]:
    """What a transformer layer keeps, and what the formula says."""
    samples, length, width, heads = 2, 256, 64, 4
    ring = Ring(length, ranks=size, two_pass=two_pass)
    ring.bind(group)
    block = Block(ring, width, heads)
    x = torch.randn(samples, ring.tokens, width, requires_grad=True)
    with saved_bytes(block) as kept:
        out = block(x)
    torch.autograd.backward(out.sum())
    return kept[0], samples * Transformer(1, width, heads).layer_bytes(length, size, two_pass)
