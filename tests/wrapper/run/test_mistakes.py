"""The first hour of a new user: each mistake ends, or goes on, with a message that says what was wrong and what to do.

A row is one mistake: what of a script that is right is replaced by what, the exit code, and the words in the job's log.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ones_wrapper.protocol import Bye, Hello, decode_report
from tests.wrapper.preloaded import Started
from tests.wrapper.runs import Run

SCRIPT = """import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import ones_wrapper as ones
job = ones.init(batch=8, max_batch=16, max_local_batch=8, epochs=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
model, optimizer, loader = job.prepare(model, optimizer, data)
for epoch in job.epochs():
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
STEP = "        optimizer.step()\n"
PREPARE = "model, optimizer, loader = job.prepare(model, optimizer, data)\n"
DDP = "model = job.ddp(model)\n"
REGISTER = "optimizer = job.register(model=model, optimizer=optimizer)\n"
LOADER = "loader = job.loader(data)\n"
RAISES = "def bad(items):\n    raise KeyError('label')\n"


@dataclass(frozen=True)
class Mistake:
    """What is replaced, and what comes of it."""

    old: str
    new: str
    code: int
    says: str
    once: bool = False
    """The words stand in the log once, though there are two ranks."""


MISTAKES = {
    "none at all": Mistake("", "", 0, ""),
    "no argument": Mistake(
        "import sys\n",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n",
        2,
        "the following arguments are required: data",
    ),
    "no such module": Mistake("import sys", "import torchvisionx", 1, "No module named 'torchvisionx'"),
    "init twice": Mistake("model = torch", "job = ones.init(batch=8)\nmodel = torch", 1, "init: a job is one training"),
    "batch above max_batch": Mistake("batch=8,", "batch=32,", 1, "batch=32 must be from 1 to max_batch=16"),
    "batch larger than the dataset": Mistake(
        "batch=8, max_batch=16", "batch=64, max_batch=64", 0, "batch=64 is larger than the dataset (20 samples)", True
    ),
    "no epochs": Mistake(
        ", epochs=2)", ")", 0, "init has no epochs=…, so job.epochs() has no end and nobody knows", True
    ),
    "nccl without GPUs": Mistake("epochs=2", "epochs=2, backend='nccl'", 2, "2 ranks of this node see 0"),
    "CUDA without GPUs": Mistake("Linear(4, 1)", "Linear(4, 1).to('cuda')", 1, "write job.device in place of"),
    "no prepare": Mistake(PREPARE, "loader = DataLoader(data, 8)\n", 1, "training starts without model and optimizer"),
    "no data": Mistake(PREPARE, DDP + REGISTER + "loader = DataLoader(data)\n", 1, "training starts without data"),
    "another batch": Mistake("optimizer, data)", "optimizer, DataLoader(data, 4))", 1, "batch_size is 4, and init's"),
    "no ddp": Mistake(PREPARE, REGISTER + LOADER, 1, "model is not the one that job.ddp"),
    "a loader of a loader": Mistake(
        PREPARE, "loader = job.loader(DataLoader(data))\n", 1, "give it the dataset itself, not a DataLoader"
    ),
    "two loaders": Mistake(PREPARE, PREPARE + LOADER, 1, "evaluate on another use job.evaluate or an ordinary"),
    "batch_size": Mistake(
        PREPARE, DDP + REGISTER + "job.loader(data, batch_size=4)\n", 1, "batch_size cannot be given; ones.init"
    ),
    "an empty dataset": Mistake(
        "data = T", "data = torch.utils.data.Subset([], [])\nT", 1, "loader: the dataset is empty"
    ),
    "an error in a worker": Mistake(
        "optimizer, data)\n", "optimizer, DataLoader(data, 8, collate_fn=bad, num_workers=1))\n", 1, "KeyError: 'label'"
    ),
    "a rank that exits": Mistake(STEP, f"{STEP}        if job.rank == 1:\n            sys.exit(5)\n", 5, "exit code 5"),
    "a rank that fails": Mistake(
        STEP, f"{STEP}        if job.rank == 1:\n            raise ValueError('mine')\n", 1, "ValueError: mine"
    ),
    "no optimizer step": Mistake(STEP, "", 0, "the optimizer has not stepped by step 20", True),
    "prints on all ranks": Mistake(PREPARE, PREPARE + "print('hello')\n", 0, "hello"),
}
LONG = {
    "no optimizer step": ("epochs=2", "epochs=8"),
    "no epochs": (STEP, STEP + "    if epoch == 1: break\n"),
    "an error in a worker": ("job = ones", RAISES + "job = ones"),
}
"""What else these scripts need to show it."""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs a script with two ranks: its exit code and log."""

    def start(text: str, restart: int = 0) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "job").mkdir(exist_ok=True)
        env = {
            "ONES_JOB_DIR": str(tmp_path / "job"),
            "ONES_NODES": "1",
            "ONES_GPUS_PER_NODE": "2",
            "ONES_LAUNCHED": "1",
            "ONES_LAUNCHER": "local",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # nothing listens there: ranks meet at the store
            "SLURM_RESTART_COUNT": str(restart),
        }
        log = tmp_path / f"log-{restart}"
        return Started([str(tmp_path / "train.py")], os.environ | env, log, "node").wait(), log.read_text()

    return start


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_mistake_ends_with(name: str, run: Callable[..., tuple[int, str]]) -> None:
    """Protects new users: no mistake hangs, none is silent, and the exit code tells Slurm."""
    mistake, (old, new) = MISTAKES[name], LONG.get(name, ("", ""))
    assert mistake.old in SCRIPT and old in SCRIPT
    code, log = run(SCRIPT.replace(mistake.old, mistake.new, 1).replace(old, new, 1))
    assert code == mistake.code, log
    assert mistake.says in log
    if mistake.once:
        assert log.count(mistake.says) == 1, log
    if name == "prints on all ranks":  # whose lines may run into each other
        assert log.count(mistake.says) == 2 and log.replace(mistake.says, "").strip() == "", log
    if name == "none at all":
        assert log == ""


def test_a_finished_run_and_another_dataset(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """Protects a run that had come to its end: started again it says so in one line, ends well, begins nothing, and
    goes on where there are more epochs; with another dataset it says what differs."""
    assert run(SCRIPT) == (0, "")
    checkpoints = sorted(path.name for path in (tmp_path / "job/checkpoints").iterdir())
    code, log = run(SCRIPT, restart=1)
    assert (code, log.count("\n")) == (0, 1) and "this run is finished (2 of 2 epochs): raise epochs" in log
    reports = [decode_report(line)[2] for line in (tmp_path / "job/reports-1.jsonl").read_bytes().splitlines()]
    assert [(type(one), one.reason) for one in reports if isinstance(one, Bye)] == [(Bye, "finished")] and not any(
        isinstance(one, Hello) for one in reports
    )
    assert sorted(path.name for path in (tmp_path / "job/checkpoints").iterdir()) == checkpoints
    code, log = run(SCRIPT.replace("randn(20", "randn(30").replace("epochs=2", "epochs=3"), restart=2)
    assert code == 1 and "was taken with 20 samples an epoch, the dataset now has 30" in log
    assert "ONES_JOB_DIR" in log
    assert run(SCRIPT.replace("epochs=2", "epochs=3"), restart=3) == (0, "")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    """Protects: a wrong file name costs no GPU time, and the message says where it was looked for."""
    run = Run(tmp_path, script=tmp_path / "trian.py")
    assert run.end() == 2 and "trian.py: there is no such file (looked from" in run.errors
