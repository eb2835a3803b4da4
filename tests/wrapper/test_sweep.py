"""The example of an Optuna sweep: a resize in the middle of a trial starts no other one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ones_wrapper.protocol import First
from tests.wrapper.runs import Run

optuna = pytest.importorskip("optuna")
SWEEP = Path(__file__).parents[2] / "wrapper/examples/sweep.py"
PACED = f"""
import runpy, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: Path("hurry").exists() or time.sleep(0.2))
runpy.run_path({str(SWEEP)!r}, run_name="__main__")
"""
"""The example, which may train to its end sooner than a signal reaches it: its steps take time until it shall hurry."""


@pytest.mark.slow
def test_a_trial_goes_on_at_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects sweeps: the same trial and hyper-parameters before and after, told to the study once."""
    monkeypatch.chdir(tmp_path)
    study, job, paced = tmp_path / "study.log", tmp_path / "job", tmp_path / "paced.py"
    paced.write_text(PACED)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(study)))
    # A learning rate that learns: the sampler may draw one of 1.0, at which this model stays at chance.
    optuna.create_study(study_name="digits", storage=storage, direction="maximize").enqueue_trial({"lr": 0.05})
    first = Run(job, "--epochs", "10", "--study", str(study), script=paced)
    first.wait_for(First)
    first.signal(signal.SIGTERM)
    assert first.end() == 143, first.errors
    (tmp_path / "hurry").touch()
    second = Run(job, "--epochs", "10", "--study", str(study), script=paced, ranks=2, restart=1)
    assert second.end() == 0, second.errors
    (trial,) = optuna.load_study(study_name="digits", storage=storage).trials
    assert trial.state.name == "COMPLETE" and trial.params == {"lr": 0.05} and trial.value > 0.8
