"""LARS and LAMB of the `pytorch-optimizer` package through checkpoints and resizes, as a user would take them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.protocol import Hello, Order, Throughput
from tests.wrapper.runs import Run, write_order

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Not as all tests are collected: with it comes transformers, two seconds of the processor in each worker."""
    pytest.importorskip("pytorch_optimizer")


SCRIPT = """
import json, os, sys, time
from pathlib import Path
from typing import Any
import torch
from pytorch_optimizer import LARS, Lamb
import ones_wrapper as ones

name, step_s = sys.argv[1], float(sys.argv[2])
job = ones.init(batch=16, max_batch=64, epochs=4)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = job.ddp(model.double())
optimizer = {
    "lars": lambda: LARS(model.parameters(), lr=1.0, weight_decay=1e-3),
    "lamb": lambda: Lamb(model.parameters(), lr=0.02, weight_decay=1e-3, weight_decouple=False),
}[name]()
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
x = torch.randn(97, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
y = x.square().sum(1, keepdim=True)
loss_of = torch.nn.functional.mse_loss
first = loss_of(model(x), y).item()
optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
loader = job.loader(torch.utils.data.TensorDataset(x, y), seed=3)
for _ in job.epochs():
    for inputs, target in loader:
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()
        time.sleep(step_s * (1 if job.progress.step < 4 else 20))  # it shall not end before it is stopped
    scheduler.step()
if job.rank == 0:
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    moments = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    found = {"parameters": parameters, "moment": float(sum(m.abs().sum() for m in moments)),
             "lr": optimizer.param_groups[0]["lr"], "losses": [first, loss_of(model(x), y).item()]}
    Path(os.environ["ONES_JOB_DIR"], "out.json").write_text(json.dumps(found))
"""


def train(job_dir: Path, name: str, sizes: list[int]) -> dict[str, Any]:
    """Train at the first size, stop in the middle, go on at the next …; what the script left at the end."""
    job_dir.mkdir()
    script = job_dir / "script.py"
    script.write_text(SCRIPT)
    write_order(job_dir, Order(1, 0, batch=32))
    for restart, ranks in enumerate(sizes):
        last = restart == len(sizes) - 1
        run = Run(job_dir, name, "0" if last else "0.1", ranks=ranks, restart=restart, script=script)
        if not last:
            run.wait_for(Throughput, lambda report: report.step >= 3)
            run.signal(signal.SIGTERM)
        assert run.end() == (0 if last else 143), run.errors
        assert (run.of(Hello)[0].step > 0) == (restart > 0)
        assert run.of(Hello)[0].lr_factor == pytest.approx(2**0.5)
    found: dict[str, Any] = json.loads((job_dir / "out.json").read_text())
    return found


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_resized_run_ends_where_the_uninterrupted_one_does(tmp_path: Path, name: str) -> None:
    """Protects the optimizers that larger batches ask for: their state is checkpointed, and the learning rate's factor
    reaches them."""
    whole = train(tmp_path / "whole", name, [1])
    resized = train(tmp_path / "resized", name, [1, 2])
    assert resized["lr"] == whole["lr"]
    for key in ("parameters", "moment", "losses"):
        assert resized[key] == pytest.approx(whole[key], rel=1e-8, abs=1e-10), key
    before, after = whole["losses"]
    assert after < before
