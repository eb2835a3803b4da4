"""From a job's history to the models that a policy weighs."""

from __future__ import annotations

import numpy as np

from ones_db import EpochPoint, JobHistory, JobRecord, SpecRecord, ThroughputPoint
from slurm_ones.learn.knowledge import Learner


def history(job_id: int, epochs: int, *, declared: int = 10, speed: float = 100.0) -> JobHistory:
    """A job of 1000 samples an epoch that was measured on one GPU."""
    return JobHistory(
        job=JobRecord(job_id, "train", "alice", 0.0, 1, 1, elastic=True),
        spec=SpecRecord(32, 256, 64, 1000, declared),
        epochs=tuple(EpochPoint(e, 2.0 / (e + 1), 0.1 * e, 10.0 * e, 0) for e in range(epochs)),
        throughput=(ThroughputPoint(1, 1, 32, speed, 5.0),) if speed else (),
        samples=1000.0 * epochs,
        batch=32,
        first_start=0.0,
        ended_runs_s=0.0,
        running_since=0.0,
        resizes=0,
        last_resize_end=None,
        epochs_since_change=epochs,
        first_loss=2.0,
    )


def test_models_say_what_was_measured() -> None:
    """Throughput is the measured one where it was measured, and progress counts the epochs done."""
    known = Learner().about(history(1, 4))
    assert np.isclose(known.throughput.throughput(np.array([1]), np.array([32]))[0], 100.0)
    assert np.isclose(known.progress.mean, 0.4)


def test_an_unknown_job_is_taken_for_a_typical_one() -> None:
    """Without a measurement of its own, a job is expected to be as fast as those that finished."""
    learner = Learner()
    learner.finished([history(i, 10, speed=speed) for i, speed in enumerate((50.0, 80.0, 500.0))])
    fresh = learner.about(history(9, 0, speed=0.0))
    assert np.isclose(fresh.throughput.throughput(np.array([1]), np.array([32]))[0], 80.0)
    assert learner.about(None).progress.mean < 0.5


def test_progress_is_refitted_when_a_job_finishes() -> None:
    """Jobs that end long before the epochs they declare teach that others will too."""
    learner = Learner()
    before = learner.about(history(99, 3, declared=100)).progress.mean
    learner.finished([history(i, 5, declared=100) for i in range(8)])
    after = learner.about(history(99, 3, declared=100)).progress.mean
    assert before < 0.05
    assert after > 0.3
