"""From a job's history to the models that a policy weighs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import EpochPoint, JobHistory, JobRecord, NoisePoint, ThroughputPoint
from ones_db.shape import Shape
from ones_wrapper.protocol import Spec
from slurm_ones.learn.learner import JOIN_S, LEAVE_S, READY_S, RESIZE_S, SPARE, TERM_S, JobModel, Learner


def history(job_id: int, epochs: int, *, declared: int = 10, speed: float = 100.0) -> JobHistory:
    """A job of 1000 samples an epoch that was measured on one GPU."""
    return JobHistory(
        job=JobRecord(job_id, "train", "alice", 0.0, Shape(1, 1), elastic=True),
        spec=Spec(32, 256, 64, 1000, declared),
        epochs=tuple(EpochPoint(e, 2.0 / (e + 1), 0.1 * e, 10.0 * e, 0) for e in range(epochs)),
        throughput=(ThroughputPoint(Shape(1, 1), 32, speed, 5.0),) if speed else (),
        samples=1000.0 * epochs,
        batch=32,
        ended_runs_s=0.0,
        running_since=0.0,
        resizes=0,
        last_resize_end=None,
        epochs_since_change=epochs,
        first_loss=2.0,
    )


def speed_of(known: JobModel, gpus: int = 1) -> float:
    where = np.array([1]), np.array([gpus]), np.array([32 * gpus])
    return float(known.throughput.throughput(*where)[0])


def doubt_of(known: JobModel) -> float:
    one = np.array([1])
    return float(known.throughput.uncertainty(one, one, np.array([32]))[0])


def worth_of(known: JobModel, batch: int) -> float:
    return float(known.efficiency.efficiency(np.array([batch]))[0])


def test_models_say_what_was_measured() -> None:
    """Throughput is the measured one where it was measured, and progress counts the epochs done."""
    known = Learner().about(history(1, 4))
    assert speed_of(known) == pytest.approx(100.0, rel=0.02)
    assert known.progress.mean == pytest.approx(0.4)
    assert known.samples == 4000.0
    assert known.losses == ((1.0, 2.0), (2.0, 1.0), (3.0, 2.0 / 3), (4.0, 0.5))


def test_an_unknown_job_is_taken_for_a_typical_one() -> None:
    """Without a measurement of its own, a job is expected to be as fast as those that finished."""
    learner = Learner()
    others = [(i, speed, Spec(32, 256, 64, 2000 + i, 10)) for i, speed in enumerate((50.0, 80.0, 500.0))]
    learner.finished([replace(history(i, 10, speed=speed), spec=spec) for i, speed, spec in others])
    fresh = learner.about(history(9, 0, speed=0.0))
    assert 80.0 < speed_of(fresh) < 150.0
    assert doubt_of(fresh) > 1.0
    assert learner.about(None).progress.mean < 0.5


def test_who_tells_its_bytes_teaches_those_who_have_told_nothing() -> None:
    """Protects the first decision on a job: it has not run, so nobody knows what it sends."""
    learner = Learner()
    specs = [Spec(32, 256, 64, 2000 + i, 10, gradient_bytes=10**8 * (i + 1)) for i in range(3)]
    speeds = (50.0, 80.0, 500.0)
    learner.finished([replace(history(i, 10, speed=speed), spec=specs[i]) for i, speed in enumerate(speeds)])
    assert 80.0 < speed_of(learner.about(history(9, 0, speed=0.0))) < 150.0
    told = replace(history(9, 0, speed=0.0), spec=replace(specs[2], dataset=5000))
    assert 80.0 < speed_of(learner.about(told)) < 150.0


def test_a_job_that_ran_before_is_known_from_its_start() -> None:
    """A job with the spec of three that finished runs their script: their speed, with little doubt, and their noise."""
    learner = Learner()
    noisy = (NoisePoint(320.0, 1.0),)
    mine = [replace(history(i, 10, speed=500.0), noise=noisy) for i in range(3)]
    others = [replace(history(i, 10, speed=5.0), spec=Spec(32, 256, 64, 777 + i, 10)) for i in range(3, 8)]
    learner.finished([*mine, *others])
    known, stranger = (
        learner.about(replace(history(n, 0, speed=0.0), spec=Spec(32, 256, 64, dataset, 10)))
        for n, dataset in ((20, 1000), (21, 55))
    )
    assert speed_of(known) == pytest.approx(500.0, rel=0.4)
    assert speed_of(stranger) < 50.0
    assert doubt_of(known) < 0.7 * doubt_of(stranger)
    assert worth_of(known, 320) == pytest.approx((320 + 32) / (320 + 320))


def test_progress_is_refitted_when_a_job_finishes() -> None:
    """Jobs that end long before the epochs they declare teach that others will too."""
    learner = Learner()
    before = learner.about(history(99, 3, declared=100)).progress.mean
    learner.finished([history(i, 5, declared=100) for i in range(8)])
    after = learner.about(history(99, 3, declared=100)).progress.mean
    assert before < 0.05
    assert after > 0.3


def test_reported_progress_counts_instead_of_samples() -> None:
    """A job that used 4000 samples in large batches has made the progress it says: what is to come is longer."""
    plain, told = (Learner().about(replace(history(1, 4), progress=p)) for p in (None, 2500.0))
    assert (plain.samples, told.samples) == (4000.0, 2500.0)
    assert told.progress.alpha == pytest.approx(2.5)
    assert told.progress.beta == pytest.approx(7.5)


def test_noise_its_own_or_typical_or_cautious() -> None:
    """What a job measured comes first, then what its like did, then others, then caution."""
    learner = Learner()
    own = replace(history(1, 1), noise=(NoisePoint(96.0, 1.0), NoisePoint(96.0, 2.0), NoisePoint(1e9, 3.0)))
    assert worth_of(learner.about(own), 128) == pytest.approx((96 + 32) / (96 + 128))
    assert worth_of(learner.about(history(2, 1)), 128) == pytest.approx((4 * 32 + 32) / (4 * 32 + 128))
    learner.finished([replace(history(3, 9), spec=Spec(10, 99, 99, 99, 99), noise=(NoisePoint(10.0, 1.0),))])
    assert worth_of(learner.about(history(2, 1)), 128) == pytest.approx((32 + 32) / (32 + 128))
    unknown = replace(history(4, 1), spec=None, job=replace(history(4, 1).job, name="other"))
    assert worth_of(learner.about(unknown), 10**6) == 1.0


def test_a_job_that_has_not_run_is_taken_for_its_namesakes() -> None:
    """What it can do and how fast it is follows from its user's jobs of that name, a number at the end set aside; never
    from another user's, and what it tells itself comes first."""
    learner = Learner()

    def job(number: int, name: str, user: str = "alice", spec: Spec | None = None) -> JobHistory:
        told = history(number, 0, speed=0.0)
        return replace(told, spec=spec, job=replace(told.job, name=name, user=user))

    learner.finished([replace(history(i, 10, speed=500.0), job=job(i, f"sweep-{i}").job) for i in range(3)])
    new = learner.about(job(9, "sweep-17"))
    assert new.spec == history(1, 1).spec
    assert speed_of(new) == pytest.approx(500.0, rel=0.4)
    assert new.progress.beta == pytest.approx(10.0)
    for stranger in (job(9, "sweep-17", "mallory"), job(9, "sweep"), job(9, "17")):
        assert (learner.about(stranger).spec is None) == (stranger.job.name != "sweep")
    own = Spec(7, 7, 7, 7, 7)
    assert learner.about(job(9, "sweep-17", spec=own)).spec == own


def test_ever_new_names_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users choose them, and the companion lives for months: those that were not seen longest are forgotten."""
    monkeypatch.setattr("slurm_ones.learn.learner.SCRIPTS", 5)
    learner = Learner()
    for number in range(12):
        told = history(number, 1)
        kept = replace(told, job=replace(told.job, job_id=99, name="kept"))
        learner.look([kept, replace(told, job=replace(told.job, name="x" * (number + 1)))])
    assert len(learner._scripts) == 5 and ("alice", "kept") in learner._scripts


def test_jobs_that_went_are_forgotten() -> None:
    """A companion lives for months: models are kept of the jobs that are looked at, and of some more."""
    learner = Learner()
    for first in range(0, 6 * SPARE, 10):
        learner.look([history(first + number, 1) for number in range(10)])
        assert len(learner._learned) <= 10 + SPARE
    assert 6 * SPARE - 1 in learner._learned and 0 not in learner._learned


def test_what_is_expected_is_forgotten_too() -> None:
    """Where no job ends any more, jobs that tell ever new specs leave nothing behind."""
    learner = Learner()
    learner.finished([history(0, 10)])
    for told in range(3 * SPARE):
        learner.look([replace(history(1, 1), spec=Spec(32, 256, 64, 5000 + told, 10))])
    assert len(learner._priors) <= 1 + SPARE
    assert speed_of(learner.about(history(1, 1))) == pytest.approx(100.0, rel=0.1)


def test_what_a_resize_costs() -> None:
    """A job's own pauses, else the site's, else half a minute."""
    learner = Learner()
    assert learner.about(None).resize_s == learner.about(history(1, 1)).resize_s == 30.0
    learner.finished([replace(history(i, 3), pause_s=pause) for i, pause in enumerate((10.0, None, 12.0, 99.0))])
    assert learner.about(history(9, 1)).resize_s == 12.0
    assert learner.about(replace(history(9, 1), pause_s=77.0)).resize_s == 77.0


def test_what_a_change_of_blocks_costs() -> None:
    """A job's own changes, else those of jobs of its spec whoever leads them, else of all, else half a second; and
    nothing of it is said of a job that is requeued."""
    learner, told = Learner(), history(0, 1).spec
    assert told is not None
    spec = replace(told, hot=True)
    new = learner.about(None, blocks=True)
    assert (new.resize_s, new.shrink_s, new.prepare_s) == (JOIN_S, LEAVE_S, READY_S)
    other = replace(spec, base_batch=7)
    learner.finished(
        [
            replace(history(1, 3), spec=replace(spec, term=4), join_s=2.0, switch_s=1.0),
            replace(history(2, 3), spec=other, join_s=6.0, switch_s=3.0),
            replace(history(3, 3), spec=spec, switch_s=0.01),
        ]
    )
    mine = replace(history(9, 1), spec=spec)
    known = learner.about(mine, blocks=True)
    assert (known.resize_s, known.shrink_s, known.prepare_s) == (2.0, 0.01, READY_S)
    assert learner.about(replace(mine, spec=replace(spec, base_batch=9)), blocks=True).resize_s == 4.0
    assert learner.about(replace(mine, join_s=0.7, switch_s=0.4), blocks=True).resize_s == 0.7
    assert learner.about(history(9, 1)).resize_s == RESIZE_S
    assert learner.about(history(9, 1)).shrink_s is None


def test_what_a_change_costs_that_begins_a_term() -> None:
    """As long where blocks leave as where they join, and learnt apart from changes from memory to memory: the job's
    own, else those of jobs of its spec, else of all such, else some seconds."""
    learner, job = Learner(), history(9, 1)
    assert job.spec is not None and not job.spec.hot
    new = learner.about(job, blocks=True)
    assert (new.resize_s, new.shrink_s, new.prepare_s) == (TERM_S, None, READY_S)
    hot = replace(history(1, 3), spec=replace(job.spec, hot=True), join_s=0.3, switch_s=0.2)
    other = replace(history(2, 3), spec=replace(job.spec, base_batch=7), switch_s=4.0)
    learner.finished([hot, other])
    assert learner.about(job, blocks=True).resize_s == 4.0
    learner.finished([hot, other, replace(history(3, 3), join_s=3.0, switch_s=2.0)])
    assert learner.about(job, blocks=True).resize_s == 2.0
    assert learner.about(replace(job, switch_s=1.5), blocks=True).resize_s == 1.5
    assert learner.about(replace(job, spec=hot.spec), blocks=True).resize_s == 0.3


def test_a_job_with_nothing_new_is_not_learned_again() -> None:
    """A tick costs what changed: the same measurements give the very same model, new ones or new finished jobs
    another."""
    learner = Learner()
    now = history(1, 3)
    learner.look([now, history(2, 3)])
    first = learner.about(now).throughput
    assert learner.about(replace(now, samples=3500.0)).throughput is first
    faster = replace(now, throughput=(*now.throughput, ThroughputPoint(Shape(1, 2), 64, 190.0, 9.0)))
    learner.look([faster])
    assert speed_of(learner.about(faster), 2) == pytest.approx(190.0, rel=0.05)
    again = learner.about(now).throughput
    learner.finished([history(7, 5)])
    assert learner.about(now).throughput is not again


figures = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(figures, figures, figures), max_size=6), figures, st.integers(0, 3))
def test_nonsense_in_a_history_breaks_nothing(
    noises: list[tuple[float, float, float]], progress: float, dataset: int
) -> None:
    """All models stay usable numbers, whatever a job told of itself, also for the jobs that learn from it."""
    told = replace(
        history(1, 4),
        spec=Spec(0, 0, 0, dataset, dataset),
        noise=tuple(NoisePoint(noise, time) for noise, time, _ in noises),
        throughput=tuple(ThroughputPoint(Shape(1, 1), 32, speed, time) for _, time, speed in noises),
        epochs=tuple(EpochPoint(e, loss, noise, 0.0, 0) for e, (noise, _, loss) in enumerate(noises)),
        progress=progress,
    )
    learner = Learner()
    learner.finished([replace(told, job=replace(told.job, job_id=n)) for n in range(10, 17)])
    for known in (learner.about(told), learner.about(history(3, 2)), learner.about(None)):
        assert 0 < speed_of(known) < np.inf
        assert 0 <= doubt_of(known) < np.inf
        assert 0 < worth_of(known, 999) <= 1
        assert 0 < known.progress.alpha < np.inf
        assert 0 < known.progress.beta < np.inf
        assert 0 <= known.progress.to_come(0.9) < np.inf
