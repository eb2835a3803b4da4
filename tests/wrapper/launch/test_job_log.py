"""What a job's log shows when ranks stop or fail: no tracebacks of what was asked for, and each error once."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ones_wrapper.protocol import Bye, Epoch
from tests.wrapper.runs import Run

LOADERS = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
import ones_wrapper as ones
job = ones.init(batch=8, epochs=1000)
model = job.ddp(torch.nn.Linear(4, 1))
optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
x = torch.ones(64, 4)
loader = job.loader(TensorDataset(x, x[:, :1]), num_workers=1)
evaluate = DataLoader(TensorDataset(x), batch_size=32, num_workers=1, persistent_workers=True)
for epoch in job.epochs():
    for inputs, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        time.sleep(0.02)
    for _ in evaluate:
        pass
"""
FAILS = """
import os, pathlib, sys, time, torch
import ones_wrapper as ones
job = ones.init(batch=8, epochs=1)
def after(rank):
    while job.rank != rank and not list(pathlib.Path(os.environ["ONES_JOB_DIR"]).glob(".exit-*-error-*")):
        time.sleep(0.02)
    return job.rank != rank
def train():
    {what}
train()
"""


def below(pid: int) -> list[int]:
    """The processes that a process started, and theirs; none if it ended meanwhile."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *below(child)]
    return found


@pytest.mark.slow
def test_signals_to_every_process_of_a_step(tmp_path: Path) -> None:
    """Slurm sends its signals to loader workers too, whose end ends their rank with an error."""
    (tmp_path / "script.py").write_text(LOADERS)
    run = Run(tmp_path / "job", ranks=2, script=tmp_path / "script.py")
    run.wait_for(Epoch)
    assert len(below(run.process.pid)) >= 5  # two ranks and their workers, below the node launcher
    for number in (signal.SIGURG, signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM):
        for pid in below(run.process.pid):
            with suppress(ProcessLookupError):  # after SIGTERM those that are struck first may have ended by now
                os.kill(pid, number)
        time.sleep(0.3 if number == signal.SIGUSR1 else 0.05)
    assert (run.end(), run.errors, run.output) == (143, "", "")
    assert run.of(Bye)[-1].reason == "signal"


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        # the same error on all
        ("raise ValueError('no such file')", ["failed first", "ValueError: no such file"]),
        # on one, which breaks the group of the others
        (
            "job.rank == 1 and 1 / 0; torch.distributed.barrier()",
            [
                "rank 1 failed first",
                "ZeroDivisionError: division by zero",
                "lost other ranks at",
                "lost other ranks at",
            ],
        ),
        # different ones
        (
            "time.sleep(after(2) and 1.0); raise KeyError(job.rank)",
            [
                "rank 2 failed first",
                "KeyError: 2",
                "failed too at script.py:10: KeyError",
                "failed too at script.py:10",
            ],
        ),
    ],
)
def test_an_error_is_shown_once(tmp_path: Path, what: str, shown: list[str]) -> None:
    """Protects the one traceback that says what went wrong, from those of all the ranks that fail with it."""
    (tmp_path / "script.py").write_text(FAILS.format(what=what))
    run = Run(tmp_path / "job", ranks=3, script=tmp_path / "script.py")
    assert run.end() == 1
    lines = run.errors.splitlines()
    assert run.errors.count("Traceback") == 1, run.errors
    own = [line for line in lines if line.startswith("ones: rank") or "Error: " in line]
    assert all(any(word in line for line in own) for word in shown), run.errors
    assert len(own) == len(shown), run.errors
    assert sum("ended with exit code" in line for line in lines) == 1
    # whole: nobody spoke in between
    first = next(n for n, line in enumerate(lines) if "failed first" in line)
    trace = lines[first + 1 : next(n for n, line in enumerate(lines) if "Error: " in line and n > first)]
    assert len([line for line in trace if "ones" in line.partition(":")[0]]) == 0, run.errors
