"""What others add is found by its name or by where it is."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from ones_wrapper.launch import LaunchOptions, plan
from ones_wrapper.launch.launchers import Ask, Find, Layout, Started
from ones_wrapper.process.placement import LaunchError
from ones_wrapper.protocol import Bye, Hello
from tests.marks import nightly
from tests.wrapper.runs import Run

THERE = f"{__name__}:prun"

EXCHANGE = """
from ones_wrapper.gradients.exchange import DdpExchange

class Counting(DdpExchange):
    passes = 0

    def during(self, passed):
        Counting.passes += 1
        return super().during(passed)
"""

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
import ones_wrapper as ones

job = ones.init(batch=4, epochs=1)
data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
model = job.exchange(torch.nn.Linear(2, 1), sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.register(model=model, optimizer=optimizer)
loader = job.loader(data)
for epoch in job.epochs():
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    job.report(loss=loss.item())
from site_exchange import Counting
assert Counting.passes == 4, Counting.passes
"""


def prun(layout: Layout, find: Find, ask: Ask) -> Started:
    return Started(["prun", str(layout.tasks), *layout.command], {"PRUN": "1"}, signal.SIGTERM)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that registers a launcher and an exchange."""
    info = tmp_path / "site_ones-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-ones\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[ones_wrapper.launchers]\nprun = {THERE}\nbroken = no.such:thing\n"
        "[ones_wrapper.exchanges]\ncounting = site_exchange:Counting\n"
    )
    (tmp_path / "site_exchange.py").write_text(EXCHANGE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def planned(launcher: str) -> list[str]:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[2-3]", "SLURM_GPUS_ON_NODE": "4"}
    launch = plan(env, "t.py", [], job_dir=Path("/jobs/7"), options=LaunchOptions(launcher))
    assert (launch.env["PRUN"], launch.stop) == ("1", signal.SIGTERM)
    return launch.command[: launch.command.index(sys.executable)]


def test_a_launcher_by_its_place() -> None:
    """`ones-run --launcher package.module:function`, nothing installed."""
    assert planned(THERE) == ["prun", "2"]


def test_a_launcher_by_its_name(package: Path) -> None:
    """`ones-run --launcher prun`, from a package's entry points."""
    assert planned("prun") == ["prun", "2"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pron", "none of srun, ibrun, mpirun, local, broken, prun, nor package.module:Name"),
        ("broken", "cannot be imported: No module named 'no'"),
        ("no.such:thing", "cannot be imported: No module named 'no'"),
        (f"{__name__}:nothing", "cannot be imported: module .* has no attribute 'nothing'"),
    ],
)
def test_a_launcher_that_is_not_there(package: Path, name: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        planned(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counting", nightly("site_exchange:Counting")])
def test_an_exchange(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = Run(tmp_path / "job", name, str(package), ranks=2, script=script)
    assert run.end() == 0, run.errors
    assert run.of(Hello)[0].world == 2
    assert run.of(Bye)[-1].reason == "finished"
