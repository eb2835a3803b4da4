"""What several checks do: keep a device busy, count its memory, read a job's reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.devices import streams
from ones_wrapper.protocol import Report, decode_report, reports_name

MIB = 1 << 20
_SPIN = 100_000_000
"""Cycles by which a spinning kernel is measured: some 50 ms."""
_LAUNCHES = 300
"""Kernels of a step: the launch queue, of 1024, then holds three steps, as of a model."""

R = TypeVar("R", bound=Report)


class Work:
    """Keeps a device busy without making the processor wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda._sleep(_SPIN // 10)
            streams.wait(device)
            began = time.perf_counter()
            torch.cuda._sleep(_SPIN)
            streams.wait(device)
            self._per_ms = _SPIN / (1000 * (time.perf_counter() - began))
            self._small = torch.zeros(1, device=device)

    def __call__(self, ms: float) -> None:
        if not self._cuda:
            time.sleep(ms / 1000)
            return
        for _ in range(_LAUNCHES):
            self._small.add_(1)
        torch.cuda._sleep(int(ms * self._per_ms))


def used(device: torch.device) -> int:
    """MiB of the device's memory in use, by anybody; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) // MIB


def resident() -> int:
    """MiB of this process's host memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // MIB


def threads() -> int:
    """Of this process."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def reports(kind: type[R], restart: int = 0) -> list[R]:
    """Of this job so far."""
    path = Path(os.environ["ONES_JOB_DIR"]) / reports_name(restart)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = (decode_report(line)[2] for line in lines if line.endswith(b"\n"))
    return [report for report in found if isinstance(report, kind)]


def perceptron(width: int = 64, layers: int = 2) -> torch.nn.Module:
    """Some equal layers."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers)]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(width, 1))


class Training:
    """An elastic job of one epoch with this number of steps."""

    def __init__(
        self,
        steps: int,
        batch: int = 8,
        width: int = 64,
        layers: int = 2,
        prepare: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
        **options: Any,
    ) -> None:
        self.job = ones.init(batch=batch, epochs=1, **options)
        self.model = self.job.ddp(prepare(perceptron(width, layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = self.job.register(model=self.model, optimizer=self.optimizer)
        x = torch.randn(steps * batch, width, generator=torch.Generator().manual_seed(1))
        self.loader = self.job.loader(TensorDataset(x), seed=3)
        self.device = self.job.device

    def steps(self) -> Iterator[torch.Tensor]:
        """The samples of each step."""
        for _ in self.job.epochs():
            for (x,) in self.loader:
                yield x

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """One pass, and the optimizer's step."""
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.job.loss(loss)
        return loss
