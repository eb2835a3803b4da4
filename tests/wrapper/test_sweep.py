"""The example of an Optuna sweep: a resize in the middle of a trial starts no other one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ones_wrapper.protocol import First
from tests.wrapper.runs import Run

optuna = pytest.importorskip("optuna")
SWEEP = Path(__file__).parents[2] / "wrapper/examples/sweep.py"


@pytest.mark.slow
def test_a_trial_goes_on_at_another_size(tmp_path: Path) -> None:
    """Protects sweeps: the same trial and hyper-parameters before and after, told to the study once."""
    study, job = tmp_path / "study.log", tmp_path / "job"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(study)))
    # A learning rate that learns: the sampler may draw one of 1.0, at which this model stays at chance.
    optuna.create_study(study_name="digits", storage=storage, direction="maximize").enqueue_trial({"lr": 0.05})
    first = Run(job, "--epochs", "10", "--study", str(study), script=SWEEP)
    first.wait_for(First)
    first.signal(signal.SIGTERM)
    assert first.end() == 143, first.errors
    second = Run(job, "--epochs", "10", "--study", str(study), script=SWEEP, ranks=2, restart=1)
    assert second.end() == 0, second.errors
    (trial,) = optuna.load_study(study_name="digits", storage=storage).trials
    assert trial.state.name == "COMPLETE" and trial.params == {"lr": 0.05} and trial.value > 0.8
