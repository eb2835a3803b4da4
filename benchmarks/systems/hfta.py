"""Fusion (HFTA) against as many trainings in turn: how far results are apart, and what it saves in processor time.

The models are tiny, as those that fusion is for: a model that fills the device gains nothing (docs/strategies/fuse.md).
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ones_wrapper as ones
from ones_wrapper.fusion import gain

STEPS = 60
BATCH = 16


def members(count: int, dtype: torch.dtype) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Models of one architecture with learning rates of their own."""
    torch.manual_seed(0)
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(dtype)
        for _ in range(count)
    ]
    return models, [torch.optim.AdamW(m.parameters(), lr=1e-3 * (i + 1)) for i, m in enumerate(models)]


def batch(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 64, generator=draw, dtype=dtype), torch.randint(0, 10, (BATCH,), generator=draw)


def max_error(count: int = 8) -> float:
    """The largest difference of any parameter after `STEPS` steps, in double precision."""
    models, alone = members(count, torch.float64)
    twins = copy.deepcopy(models)
    its = [torch.optim.AdamW(m.parameters(), lr=1e-3 * (i + 1)) for i, m in enumerate(twins)]
    fused, optimizer = ones.fuse(twins, its, loss=cross_entropy)
    for seed in range(STEPS):
        x, y = batch(seed, torch.float64)
        for model, own in zip(models, alone, strict=True):
            own.zero_grad()
            cross_entropy(model(x), y).backward()
            own.step()
        optimizer.zero_grad()
        fused(x, y).sum().backward()
        optimizer.step()
    found = [fused.member(str(i)) for i in range(count)]
    return max(
        float((tensor - found[i][key]).abs().max())
        for i, model in enumerate(models)
        for key, tensor in model.state_dict().items()
    )


def speedup(count: int) -> float:
    """Times as many steps of all members in the same processor time, on one thread."""
    models, optimizers = members(count, torch.float32)
    return gain(models, optimizers, loss=cross_entropy, batch=batch(0, torch.float32), steps=20).speedup


def measure() -> dict[str, float]:
    """`max_error`, `speedup_b8` and `speedup_b16`; a sweep needs a Slurm."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"max_error": max_error(), "speedup_b8": speedup(8), "speedup_b16": speedup(16)}
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(measure())
