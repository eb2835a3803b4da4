"""Models in other layouts than plain data parallel: on a card in bf16 as on the CPU in fp32, through a checkpoint."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from benchmarks.gpu.harness import TOP, Lab
from ones_wrapper import testing
from ones_wrapper.strategies.optimus import Optimus2D
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategies.ring.transformer_sizes import Transformer

STEPS, HALF = 10, 5
LENGTH = 32


def _example(name: str) -> ModuleType:
    sys.path.append(str(TOP / "wrapper" / "examples"))  # examples import each other
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop()


class _Layout:
    """A language model of the examples in one layout: what `init` and the loss need."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._sizes = Transformer(layers=2, width=64, heads=4, vocabulary=256, element_bytes=4)
        self.strategy: Any = {
            "ring": lambda: Ring(LENGTH, causal=True, model=self._sizes),
            "optimus": lambda: Optimus2D(q=[1], hidden=64, heads=4, vocab=256, layers=2, length=LENGTH),
            "lsgd": lambda: ones.strategies.Lsgd(period=4),
            "decentlam": lambda: ones.strategies.DecentLam("ring", momentum=0.9),
        }.get(kind, lambda: None)()

    def model(self, job: ones.Job) -> torch.nn.Module:
        torch.manual_seed(0)
        if self.kind == "ring":
            return job.ddp(_example("lm_ring").LanguageModel(self.strategy, self._sizes))
        if self.kind == "optimus":
            return job.ddp(_example("lm_2d").LanguageModel(self.strategy, 64, 2))
        plain = _example("lm_fsdp")
        if self.kind == "fsdp":
            return job.fsdp(plain.LanguageModel(), modules=plain.Block)
        return job.ddp(plain.LanguageModel())

    def loss(self, model: torch.nn.Module, pieces: torch.Tensor) -> torch.Tensor:
        strategy = self.strategy
        if self.kind == "ring":
            found: torch.Tensor = strategy.mean(_example("lm_ring").losses(model, strategy, pieces))
        elif self.kind == "optimus":
            rows = strategy.rows(pieces)
            found = strategy.cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        else:
            found = cross_entropy(model(pieces[:, :-1]), pieces[:, 1:].flatten())
        return found


def _trained(kind: str) -> int | None:
    layout = _Layout(kind)
    job = ones.init(batch=4, epochs=1, scale_lr=False, strategy=layout.strategy)
    model = layout.model(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = job.register(model=model, optimizer=optimizer)
    pieces = torch.randint(256, (4 * STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader, device, last = job.loader(TensorDataset(pieces), seed=3), job.device, 0.0
    for _ in job.epochs():
        for (some,) in loader:
            if job.progress.step == HALF and os.environ["SLURM_RESTART_COUNT"] == "0":
                job.checkpoint()
                return job.world
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = layout.loss(model, some.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            last = job.mean(float(loss.detach()), 1)
    testing.put(last)
    return None


def layouts(lab: Lab, kinds: tuple[str, ...], ranks: int = 1) -> None:
    for kind in kinds:
        here = lab.ranks(_trained, kind, ranks=ranks)[0]
        cpu = lab.ranks(_trained, kind, ranks=ranks, ONES_DEVICE="cpu", ONES_BACKEND="gloo")[0]
        lab.require(f"{kind} trains", 0.0 < cpu < 10.0)
        lab.measure(f"{kind}: loss over the CPU's, less 1", abs(here / cpu - 1.0), most=1e-2)
