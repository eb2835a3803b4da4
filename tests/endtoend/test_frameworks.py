"""Frameworks' scripts on a real Slurm: Hugging Face's Trainer, Lightning and Accelerate are resized, by a requeue and
as blocks, and what knows nothing of us is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.frameworks import CASES, EXAMPLES, INTERRUPTED
from ones_wrapper.protocol import Bye, Hello, Report
from tests.endtoend.harness import BLOCKS, TEMPLATE, Harness
from tests.wrapper.runs import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

EPOCHS, SAMPLES = 12, 200
STRANGER = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while not Path(sys.argv[1]).exists():
    weight.grad = torch.ones(1)
    dist.all_reduce(weight.grad)
    optimizer.step()
    time.sleep(0.1)
dist.destroy_process_group()
"""


def submit(
    harness: Harness, name: str, words: str, *arguments: object, template: Path = TEMPLATE, slow_s: float = 0.6
) -> tuple[Path, int]:
    """Submit a framework's example with these words in its comment; the folder that it runs in, and the job. A step
    takes so long until there is a file `hurry` in the folder."""
    case = CASES[name]
    if case.missing:
        pytest.skip(f"{name} is not installed")
    folder = harness.folder(name)
    inside = f"/scratch/{folder.name}"
    job_id = harness.submit(
        *map(str, (INTERRUPTED, EXAMPLES / case.elastic, *arguments)),
        options=(f"--comment=ones: gpus=1-4 {words}", "--time=15", "--cpus-per-gpu=1", f"--chdir={inside}"),
        template=template,
        ONES_TRACE=f"{inside}/trace-{{restart}}-{{rank}}.jsonl",
        ONES_SLOW=f"{slow_s}:{inside}/hurry",
        ONES_PRELOAD=case.preload,
        ONES_JOB_DIR=f"{inside}/job",
        HF_HUB_OFFLINE="1",
    )
    return folder, job_id


def resized(harness: Harness, folder: Path, job_id: int, steps: list[list[int]], first: int) -> str:
    """Have a companion bring the job, of this batch at first, to these shapes and batches; its log once it ended."""
    harness.trains(job_id)
    harness.carry_out(harness.settings(scope='"own"'), {job_id: steps}, 180.0)
    (folder / "hurry").touch()
    job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    words = "".join(path.read_text() for path in folder.glob("*.out"))
    assert (job.state.value, job.restart) == ("COMPLETED", len(steps)), words
    hellos = [next(r for r in harness.reports(job_id, n) if isinstance(r, Hello)) for n in range(job.restart + 1)]
    assert [(hello.world, hello.batch) for hello in hellos] == [
        (1, first),
        *((gpus, batch) for _, gpus, batch in steps),
    ]
    return words


def test_a_trainer_is_resized_and_torchrun_alone_is_not(harness: Harness) -> None:
    """The Trainer's example, 1 → 2 → 1 GPUs with another batch: no sample lost or repeated, its log whole. Beside it
    two jobs that opted in and start a plain script by torchrun and by ones-run: nothing says what they can do, so they
    keep their sizes though GPUs are free, with a reason that says what to do. The steps of the one by ones-run are
    counted.
    """
    folder, job_id = submit(harness, "transformers", "batch=16-64", "--epochs", EPOCHS, "--samples", SAMPLES)
    inside = f"/scratch/{folder.name}"
    (folder / "stranger.py").write_text(STRANGER)
    torchrun = f"exec {harness.cluster.python} -m torch.distributed.run --nproc-per-node=1"
    options = ["--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1", "--comment=ones: gpus=1-4", f"--chdir={inside}"]
    strangers = [
        int(harness.cluster.run(["sbatch", "--parsable", *options, f"--wrap={by} stranger.py {inside}/leave"]).stdout)
        for by in (f"{torchrun} --master-port=29684", "exec ones-run")
    ]
    resized(harness, folder, job_id, [[1, 2, 64], [1, 1, 16]], 16)
    assert_exactly_once(folder, EPOCHS, SAMPLES)
    assert [bye.reason for bye in harness.reports(job_id, 2) if isinstance(bye, Bye)] == ["finished"]
    state = json.loads((folder / "trainer-output/trainer_state.json").read_text())
    evaluated = [entry["epoch"] for entry in state["log_history"] if "eval_loss" in entry]
    assert evaluated == [*range(1, EPOCHS + 1)] and state["global_step"] == EPOCHS * 13

    # A policy that gives free GPUs away.
    settings = harness.settings(scope='"own"')
    with harness.running(settings, "--act"):
        harness.ticks(settings)
    (folder / "leave").touch()
    for stranger, word in zip(strangers, ("ones-run", "does its script call ones.init?"), strict=True):
        other = harness.wait(stranger, lambda job: job.ended, "ended")
        assert (other.state.value, other.restart, other.nodes, other.gpus_per_node) == ("COMPLETED", 0, 1, 1)
        assert word in json.dumps(harness.why(settings, stranger))
        with harness.store(settings) as store:
            assert not store.resizes(stranger)
        said = harness.cluster.run(["slurm-ones", "why", str(stranger), "--config", settings]).stdout
        counted = re.findall(r"Run 0 took (\d+) optimizer steps on 1x1, (\S+) a second", said)
        assert len(counted) == (stranger == strangers[1]), said
    assert int(counted[0][0]) > 10 and 1 < float(counted[0][1]) < 10


def logged_by_lightning(folder: Path, words: str) -> None:
    """Each start has a log of its own, and one rank of each prints."""
    logs = "".join(path.read_text() for path in folder.glob("logs/lightning_logs/*/metrics.csv"))
    assert len(list(folder.glob("logs/lightning_logs/*"))) == 2 and "val_accuracy" in logs
    assert words.count("Trainable params") == 2


def logged_by_accelerate(folder: Path, words: str) -> None:
    """One rank prints each epoch's accuracy, and exports what it trained."""
    assert re.findall(r"^epoch (\d+): accuracy", words, re.MULTILINE) == [str(epoch) for epoch in range(2)], words
    assert (folder / "digits.pt").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "steps", "logged"),
    [
        pytest.param("lightning", [[1, 2, 128]], logged_by_lightning, id="lightning"),
        pytest.param("accelerate", [[1, 2, 64], [1, 1, 32]], logged_by_accelerate, id="accelerate"),
    ],
)
def test_lightning_and_accelerate_are_resized(
    harness: Harness, name: str, steps: list[list[int]], logged: Callable[[Path, str], None]
) -> None:
    """Their examples, 1 → 2 GPUs with another batch, Accelerate's and back to 1. They take ones-run's ranks rather than
    Slurm's and leave requeues to us; no sample is lost or repeated, and each epoch is evaluated once.
    """
    folder, job_id = submit(harness, name, "batch=32-128", "--epochs", 2)
    words = resized(harness, folder, job_id, steps, 32)
    assert_exactly_once(folder, 2, CASES[name].samples)
    logged(folder, words)


@pytest.mark.parametrize(
    ("name", "batch", "epochs"), [("transformers", 16, 8), ("lightning", 32, 3), ("accelerate", 32, 3)]
)
def test_blocks_of_a_framework_change_by_terms(harness: Harness, name: str, batch: int, epochs: int) -> None:
    """Their examples as jobs of blocks, 1 → 2 → 1 GPUs with another batch: no run is requeued, and each sample is used
    once."""
    words, arguments = f"batch={batch}-{2 * batch} array=blocks", (*CASES[name].arguments, "--epochs", epochs)
    folder, job_id = submit(harness, name, words, *arguments, template=BLOCKS, slow_s=2)
    harness.membership(job_id, lambda m: m.why == "first", "first membership")
    settings = harness.settings(scope='"own"', resize="max_wait_s = 60\ndwell_s = 0")
    harness.carry_out(settings, {job_id: [[0, 2, 2 * batch], [0, 1, batch]]}, 240.0)
    (folder / "hurry").touch()
    harness.ended(job_id)
    assert {task.state for task in harness.tasks(job_id).values()} <= {"COMPLETED", "CANCELLED"}
    told = harness.memberships(job_id)
    assert [(m.world, m.batch) for m in told] == [(1, batch), (2, 2 * batch), (1, batch)], harness.log(job_id)[-6000:]
    assert all(m.pause_s < 60 and not m.bytes for m in told)
    runs: list[list[Report]] = [harness.reports(job_id, term) for term in range(3)]
    byes = [report.reason for reports in runs for report in reports if isinstance(report, Bye)]
    assert byes == ["moved", "moved", "finished"]
    assert_exactly_once(folder, epochs, CASES[name].samples)
