"""A sweep by Optuna on a real Slurm, with the real library: the tasks of a job array are its trials."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.frameworks import EXAMPLES, INTERRUPTED
from ones_wrapper.protocol import Hello
from slurm_ones.slurm.parse import parse_jobs
from tests.endtoend.harness import Harness

optuna = pytest.importorskip("optuna")
SCRIPT = """#!/bin/bash
#SBATCH --array=0-1 --nodes=1 --gres=gpu:1 --cpus-per-gpu=1 --time=10
#SBATCH --requeue --open-mode=append --output=%x-%A_%a.out
#SBATCH --signal=B:USR2@120
#SBATCH --comment="ones: gpus=1-4 batch=32-256"
exec ones-run --preload optuna,sklearn.datasets "$@"
"""
RATES = [0.05, 0.1]
"""Learning rates at which this model learns; those that a sampler draws may not be."""


def ids(harness: Harness, array_id: int) -> dict[int, int]:
    text = harness.cluster.run(["squeue", "--json", "--states=all", f"--jobs={array_id}"], user="root").stdout
    found = parse_jobs(json.loads(text)).values()
    return {job.array_tasks[0]: job.job_id for job in found if len(job.array_tasks) == 1}


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_trial_is_resized_and_told_once(harness: Harness) -> None:
    """`examples/sweep.py` as two array tasks, by a script that `slurm-ones check` finds elastic: one of them goes 1 → 2
    GPUs in its trial. Each task asks for one trial and tells that one, at the learning rate that it was given."""
    folder = harness.folder("sweep")
    inside = f"/scratch/{folder.name}"
    (folder / "job.sbatch").write_text(SCRIPT)
    checked = json.loads(harness.cluster.run(["slurm-ones", "check", f"{inside}/job.sbatch", "--json"]).stdout)
    assert (checked["elastic"], checked["shape"], checked["optin"]["gpus"]) == (True, [1, 1], [1, 4])
    (last,) = checked["findings"]
    assert "the last task keeps its size" in last["text"]
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.log")))
    study = optuna.create_study(study_name="digits", storage=storage, direction="maximize")
    for rate in RATES:
        study.enqueue_trial({"lr": rate})
    (folder / "study.log").chmod(0o666)

    array_id = harness.submit(
        *map(str, (INTERRUPTED, EXAMPLES / "sweep.py", "--epochs", 3, "--study", f"{inside}/study.log")),
        template=Path(inside, "job.sbatch"),
        ONES_SLOW=f"0.5:{inside}/hurry",
    )
    harness.wait(array_id, lambda job: job.running, "RUNNING")
    of_task = ids(harness, array_id)
    (moved,) = {*of_task.values()} - {array_id}
    harness.trains(*of_task.values())
    harness.carry_out(harness.settings(scope='"own"'), {moved: [[1, 2, 64]]})
    (folder / "hurry").touch()
    for job_id in of_task.values():
        job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
        assert (job.state.value, job.restart) == ("COMPLETED", int(job_id == moved)), harness.log(job_id)
    hellos = [next(r for r in harness.reports(moved, n) if isinstance(r, Hello)) for n in range(2)]
    assert [(hello.world, hello.batch) for hello in hellos] == [(1, 32), (2, 64)] and hellos[1].checkpoint
    told = re.findall(r"^trial (\d): learning rate (\S+), accuracy (\S+)$", harness.log(array_id), re.MULTILINE)
    trials = optuna.load_study(study_name="digits", storage=storage).trials
    assert [(trial.state.name, trial.params) for trial in trials] == [("COMPLETE", {"lr": rate}) for rate in RATES]
    assert sorted(told) == [(str(t.number), f"{t.params['lr']:.4g}", f"{t.value:.3f}") for t in trials]
    assert min(trial.value for trial in trials) > 0.8
