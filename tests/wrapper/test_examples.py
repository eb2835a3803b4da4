"""The examples run as they are, and the guide shows what they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frameworks import CASES, lines_added, lines_changed
from ones_wrapper.protocol import Bye, Epoch, Hello
from slurm_ones.cli.check import examine
from tests.marks import nightly
from tests.wrapper.runs import Run

pytestmark = pytest.mark.slow

WRAPPER = Path(__file__).parents[2] / "wrapper"
EXAMPLES = WRAPPER / "examples"


def test_the_guide_shows_the_edits() -> None:
    """Protects who follows docs/loop.md: the example has the lines that it adds, and none that it takes away."""
    assert lines_added(WRAPPER.parent / "docs/loop.md", "import ones_wrapper as ones", "elastic.py") == 8


@pytest.mark.parametrize(("name", "most"), [("transformers", 3), ("accelerate", 3), ("lightning", 2)])
def test_the_guide_shows_the_edits_of_a_framework(name: str, most: int) -> None:
    """Protects who follows docs/trainer.md: the example has the lines that it adds, and none that it takes away."""
    assert lines_changed(CASES[name]) == most


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        nightly("elastic.py", ("--epochs", "2")),
        nightly("lm_fsdp.py", ("--epochs", "1", "--text-kb", "24")),
        nightly("lm_2d.py", ("--epochs", "1", "--text-kb", "24", "--layers", "1")),
        nightly("lm_ring.py", ("--double", "--epochs", "1", "--text-kb", "16", "--memory-mb", "11")),
        nightly("onebit.py", ("--epochs", "2", "--warmup-steps", "20")),
        nightly("fused.py", ("--epochs", "2", "--stop-after", "1")),
        nightly("decentralized.py", ("--epochs", "2", "--strategy", "lsgd", "--period", "4")),
        nightly("decentralized.py", ("--epochs", "2", "--strategy", "decentlam")),
        nightly("gpt.py", ("--epochs", "1", "--text-kb", "24", "--warm-up", "5")),
        nightly("uneven.py", ("--epochs", "2", "--pace", "9000,3000")),
        nightly("gan.py", ("--epochs", "1")),
        nightly("coreset.py", ("--epochs", "3", "--every", "2")),
    ],
)
def test_an_example_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...]
) -> None:
    """Protects the examples, and what they stand for: DDP, FSDP2, a sequence that two ranks hold, fusion, and ranks
    that go apart."""
    monkeypatch.chdir(tmp_path)  # where one writes its log
    run = Run(tmp_path, *arguments, ranks=2, script=EXAMPLES / name)
    assert run.end() == 0, run.errors
    assert run.of(Hello)[0].world == 2
    last = run.of(Epoch)[-1]
    assert last.accuracy is not None or last.loss is not None
    assert run.of(Bye)[-1].reason == "finished"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is None, reason="no MPI here")
def test_mpi_on_two_ranks(tmp_path: Path) -> None:
    """Protects the way of CPU nodes: a real MPI starts the ranks and carries the gradients; another size goes on."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
    for ranks, epochs in ((1, 1), (2, 2)):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ones_wrapper.launch", "--launcher=mpirun", "--backend=mpi"),
                *(f"--gpus-per-node={ranks}", str(EXAMPLES / "mpi_cpu.py"), f"--epochs={epochs}"),
            ],
            env=clean | {"PATH": path, "ONES_JOB_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(epochs - 1)},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
    run = Run.__new__(Run)
    run.job_dir, run.restart = tmp_path, 1
    hello = run.of(Hello)[-1]
    assert (hello.world, hello.epoch, hello.resizes) == (2, 1, 1)
    assert run.of(Bye)[-1].reason == "finished"


def test_the_script_to_copy_trains_and_is_elastic(tmp_path: Path) -> None:
    """Protects who copies it: at two sizes, and by its batch script, against which nothing stands."""
    page = (WRAPPER.parent / "docs/tutorial.md").read_text()
    script = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in script.splitlines() if line]) <= 30
    path = tmp_path / "train.py"
    path.write_text(script.replace("epochs = 100", "epochs = 2").replace("0.003 *", "0 *"))
    run = Run(tmp_path / "job", ranks=2, script=path)
    assert run.end() == 0, run.errors
    assert run.of(Bye)[-1].reason == "finished" and "on 2 GPUs" in run.output
    verdict = examine(page.split("```bash\n")[1].split("```")[0])
    assert verdict.elastic and verdict.findings == ()
