"""1-bit LAMB over four real ranks (gloo): bytes against half precision, and accuracy on digits with LAMB's beside it.

The ranks train scikit-learn's digits (pixels from 0 to 16) for 400 steps of 64 samples, a fifth of them warm-up, at a
learning rate of 0.005, from three seeds. Every 5 steps the number of ranks changes, 4 → 3 → 2 → 4 …; what ranks kept
back is carried as one vector, or dropped as a plain restart would. Gaps are in shares of the test's digits; LAMB is the
same optimizer whose warm-up never ends.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ones_wrapper.group import Group
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean
from ones_wrapper.strategies.onebit_lamb.optimizer import CompressedLamb
from tests.wrapper.forked import Team
from tests.wrapper.traffic import Traffic
from wrapper.examples.onebit import classifier, digits

RANKS, SIZES, EVERY = 4, (4, 3, 2), 5
STEPS, WARMUP, BATCH, LR = 400, 80, 64, 0.005
SEEDS = (0, 1, 2)
ELEMENTS = 2**20


def sent(group: Group) -> tuple[int, int]:
    """Bytes that a rank sends for a mean in one bit, and for a sum in half precision."""
    values = torch.randn(ELEMENTS)
    with Traffic() as one:
        OneBitMean()(values, torch.zeros(ELEMENTS))
    with Traffic() as half:
        dist.all_reduce(values.half())
    return one.bytes, half.bytes


def accuracy(group: Group, how: str, seed: int, steps: int = STEPS, warmup: int = WARMUP) -> float:
    """Of rank 0, which is among the ranks at any time. `how` is lamb, carried or reset."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    torch.manual_seed(seed)
    model, mean, world = classifier(), OneBitMean(groups[SIZES[0]]), SIZES[0]
    warm = steps + 1 if how == "lamb" else warmup
    optimizer = CompressedLamb(model.parameters(), mean, lr=LR, warmup_steps=warm, weight_decay=0.01)
    (x, y), (held_x, held_y) = (data.tensors for data in digits())
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if step and step % EVERY == 0:
            if group.rank < world and how == "carried":
                optimizer.settle()
            world = SIZES[step // EVERY % len(SIZES)]
            mean.group = groups[world]
            mean.ranks_changed()
            take_over(model, optimizer, how == "reset")
        chosen = torch.randint(len(x), (BATCH,), generator=draw)
        if group.rank >= world:
            continue
        mine = chosen.tensor_split(world)[group.rank]
        optimizer.zero_grad()
        (cross_entropy(model(x[mine]), y[mine]) * (len(mine) * world / BATCH)).backward()
        for parameter in model.parameters() if not optimizer.frozen else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=mean.group)
            parameter.grad /= world
        optimizer.step()
    return float((model(held_x).argmax(1) == held_y).float().mean())


def take_over(model: torch.nn.Module, optimizer: CompressedLamb, reset: bool) -> None:
    """All ranks go on from what rank 0 has, those that paused too; with `reset` without what was kept back."""
    content = [optimizer.state_dict()]
    dist.broadcast_object_list(content, 0)
    optimizer.load_state_dict(content[0])
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        if reset:
            optimizer.state[parameter]["residual"].zero_()


def measure() -> dict[str, float]:
    """The figures."""
    team = Team(RANKS)
    try:
        one, half = team.run(sent)[0]
        found = {
            how: statistics.mean(team.run(accuracy, how, seed)[0] for seed in SEEDS)
            for how in ("lamb", "carried", "reset")
        }
    finally:
        team.close()
    return {
        "bytes_over_fp16": one / half,
        "accuracy_gap": found["lamb"] - found["carried"],
        "accuracy_gap_reset": found["lamb"] - found["reset"],
        "accuracy_lamb": found["lamb"],
    }
