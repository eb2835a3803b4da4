"""Fusion (HFTA) against as many trainings in turn: how far results are apart, and what it saves in processor time.

The models are tiny, as those that fusion is for: a model that fills the device gains nothing (docs/strategies/fuse.md).
"""

from __future__ import annotations

import copy
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ones_wrapper as ones
from ones_wrapper.strategies.fusion import gain
from tests.cluster import Cluster, unavailable
from tests.conftest import quick
from tests.endtoend.harness import HERE, Harness

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
    fused, optimizer = ones.strategies.fuse(twins, its, loss=cross_entropy)
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


def sweep_s(harness: Harness, count: int, act: bool) -> float:
    """Seconds from the first submission until the last of `count` jobs of a sweep has ended, on one emulated GPU of a
    real Slurm: with the companion that fuses them, or with Slurm alone. A step sleeps for 60 ms, also a fused one."""
    blockers = [harness.rigid("--nodelist=n1", "--gres=gpu:1") for _ in range(3)]
    for blocker in blockers:
        harness.wait(blocker, lambda job: job.running, "RUNNING")
    began, options = time.monotonic(), ["--nodelist=n1"]
    script = str(HERE / "swept.py")
    if not act:
        options.append("--comment=none")
    ids = []
    for place in range(count):
        words = ("--lr", f"{(place + 1) / 100}", "--epochs", "20")
        env = {} if act else {"ONES_ALONE": "1"}
        ids.append(harness.submit(script, *words, options=tuple(options), template=HERE / "swept.sbatch", **env))
    for one in ids:
        job = harness.wait(one, lambda job: job.ended, "over", 600.0)
        assert job.exit_code == 0, harness.log(one)
    return time.monotonic() - began


def sweep_jct_ratio(count: int = 16) -> float:
    """The sweep's time with fusion over that without."""
    with Cluster("gres") as cluster:
        quick(cluster)
        harness = Harness(cluster)
        try:
            settings = harness.settings(scope='"own"')
            with harness.running(settings, "--act"):
                fused = sweep_s(harness, count, act=True)
            harness.clear()
            return fused / sweep_s(harness, count, act=False)
        finally:
            harness.clear()


def measure() -> dict[str, float]:
    """All of them; without root, or a Slurm to start, without `sweep_jct_ratio`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {"max_error": max_error(), "speedup_b8": speedup(8), "speedup_b16": speedup(16)}
        return found if unavailable() else found | {"sweep_jct_ratio": sweep_jct_ratio()}
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(measure())
