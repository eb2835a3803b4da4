"""The example of an Optuna sweep: a resize in the middle of a trial starts no other one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ones_wrapper.protocol import First
from tests.wrapper.runs import Run

optuna = pytest.importorskip("optuna")
SWEEP = Path(__file__).parents[2] / "wrapper/ones_wrapper/examples/sweep.py"


@pytest.mark.slow
def test_a_trial_goes_on_at_another_size(tmp_path: Path) -> None:
    """Protects sweeps: the same trial and hyper-parameters before and after, told to the study once."""
    study, job = tmp_path / "study.log", tmp_path / "job"
    first = Run(job, "--epochs", "60", "--study", str(study), script=SWEEP)
    first.wait_for(First)
    first.signal(signal.SIGTERM)
    assert first.end() == 143, first.errors
    second = Run(job, "--epochs", "60", "--study", str(study), script=SWEEP, ranks=2, restart=1)
    assert second.end() == 0, second.errors
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(study)))
    (trial,) = optuna.load_study(study_name="digits", storage=storage).trials
    assert trial.state.name == "COMPLETE" and trial.value > 0.3
