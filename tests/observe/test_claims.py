"""What a run claims: believed where it agrees with Slurm's clock and with itself, and bounded where it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ones_db import ReportLine
from ones_wrapper.protocol import Batch, Epoch, First, Hello, Report, Throughput
from slurm_ones.observe.validator import DUTY, GRACE_S, LENGTHS, SKEW_S, Claimed, Judged, Run, judge

START = 10_000.0
RUN = Run(START, START + 50_000.0, 4, 1000, 32)
HELLO = Hello(1, 4, 4, 32, 1.0, 32, 256, 1000, 50, 0, 0, 0, "")


@dataclass
class Training:
    """An honest job: what its wrapper would report of steps that take `step_s` each."""

    step_s: float = 0.1
    batch: int = 32
    dataset: int = 1000
    noise: float | None = None
    skew_s: float = 0.0
    now: float = START + 20.0
    epoch: int = 0
    cursor: int = 0
    step: int = 0
    progress: float = 0.0

    def __post_init__(self) -> None:
        self.lines: list[ReportLine] = []
        self.say(replace(HELLO, batch=self.batch, epoch=self.epoch, cursor=self.cursor, progress=self.progress))
        self.warm = 2

    def say(self, report: Report) -> None:
        self.lines.append(ReportLine(len(self.lines) + 1, self.now + self.skew_s, report))

    def stretch(self, steps: int, jitter: float = 1.0) -> None:
        """So many steps, and what is said of them."""
        samples = timed = 0
        for _ in range(steps):
            used = min(self.batch, self.dataset - self.cursor)
            self.cursor, self.step, self.now = self.cursor + used, self.step + 1, self.now + self.step_s
            self.progress += used * self.worth
            if self.step == 1:
                self.say(First(1, self.step_s))
            if self.warm:
                self.warm -= 1
            else:
                samples, timed = samples + used, timed + 1
            if self.cursor == self.dataset:
                self.say(Epoch(self.epoch, self.step, self.dataset, 1.0, 0.5))
                self.epoch, self.cursor = self.epoch + 1, 0
        if timed:
            seconds = timed * self.step_s * jitter
            place = (self.epoch, self.step, self.cursor)
            self.say(
                Throughput(*place, samples, seconds, self.batch, 1.0, 1.0, noise=self.noise, progress=self.progress)
            )

    @property
    def worth(self) -> float:
        if self.noise is None or self.batch <= 32:
            return 1.0
        return (self.noise + 32) / (self.noise + self.batch)


def speeds(judged: Judged) -> list[float]:
    """Samples/s that are believed."""
    return [line.report.samples / line.report.seconds for line in judged.lines if isinstance(line.report, Throughput)]


def lie(training: Training, change: Callable[[Throughput], Throughput]) -> Judged:
    """What is believed of an honest job's reports with every stretch changed."""
    lines = [
        replace(line, report=change(line.report)) if isinstance(line.report, Throughput) else line
        for line in training.lines
    ]
    return judge(lines, RUN, Claimed())


def honest(stretches: int = 40, **known: float) -> Training:
    training = Training(**known)  # type: ignore[arg-type]
    for _ in range(stretches):
        training.stretch(20)
    return training


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.floats(0.96, 1.04), st.sampled_from(["", "evaluates", "restarts", "batch"])),
        max_size=30,
    ),
    st.floats(-SKEW_S, SKEW_S),
    st.sampled_from([0.01, 0.3, 5.0]),
    st.sampled_from([None, 5.0, 4000.0]),
    st.integers(1, 7),
)
def test_an_honest_job_is_never_doubted(
    stretches: list[tuple[int, float, str]], skew_s: float, step_s: float, noise: float | None, looks: int
) -> None:
    """Whatever its clock is off by, how its timing jitters, whether it evaluates, starts its ranks again or changes its
    batch: every line is kept as it is, in one look or in many."""
    job = Training(step_s=step_s, noise=noise, skew_s=skew_s)
    for steps, jitter, event in stretches:
        job.stretch(steps, jitter)
        if event == "evaluates":
            job.now += 0.9 * (job.now - START) * (1 - DUTY) / 10
        elif event == "restarts":
            job.say(replace(HELLO, batch=job.batch, epoch=job.epoch, cursor=job.cursor, progress=job.progress))
            job.warm = 2
        elif event == "batch":
            job.batch = 32 + (job.batch * 3) % 225
            job.say(Batch(job.step, job.batch, 1.0))
    run, told, kept = replace(RUN, end=job.now), Claimed(), []
    for first in range(0, len(job.lines), looks):
        judged = judge(job.lines[first : first + looks], run, told)
        assert judged.doubt == ""
        told = judged.claimed
        kept += judged.lines
    assert kept == job.lines


@settings(max_examples=60, deadline=None)
@given(st.floats(1.01, 1e6), st.integers(100, 400), st.floats(0.05, 2.0))
def test_who_divides_seconds_gains_little(by: float, stretches: int, step_s: float) -> None:
    """However far its seconds are divided, a job is believed 1 / DUTY of its true speed in the long run."""
    job = honest(stretches, step_s=step_s)
    judged = lie(job, lambda said: replace(said, seconds=said.seconds / by))
    elapsed, true = job.now - START - 20.0, job.batch / job.step_s
    last = speeds(judged)[-1]
    assert last <= true * min(by, 1.0 / DUTY) * (1.0 + (GRACE_S + 3 * step_s) * by / elapsed) * 1.2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda said: replace(said, samples=10 * said.samples), "cursor moved"),
        (lambda said: replace(said, cursor=said.cursor, epoch=said.epoch + said.step), "cursor moved"),
        (lambda said: replace(said, seconds=50 * said.seconds + 300.0), "of training in"),
        (lambda said: replace(said, batch=64), "while 32 is in force"),
    ],
    ids=["samples", "cursor", "seconds", "batch"],
)
def test_a_stretch_that_contradicts_itself_teaches_nothing(
    change: Callable[[Throughput], Throughput], word: str
) -> None:
    """More samples than the cursor moved by, a cursor ahead of them, more time than there was, a batch it has not: none
    of it is learnt, its owner reads why, and how often."""
    judged = lie(honest(), change)
    assert len(speeds(judged)) <= 1
    assert word in judged.doubt
    assert judged.doubt.startswith(f"{judged.claimed.doubted} of its reports not believed")


def test_reports_lie_within_their_run() -> None:
    """A claim from before the run, or from the time to come, is none; last words count, at the run's end."""
    job = honest(5)
    judged = judge([replace(line, time=line.time - 1000.0) for line in job.lines], RUN, Claimed())
    assert not speeds(judged)
    assert "before its run, by Slurm's clock" in judged.doubt
    job.say(replace(HELLO, epoch=job.epoch, cursor=job.cursor))
    late = judge(job.lines, replace(RUN, end=job.now - SKEW_S - 50.0), Claimed())
    assert late.lines[-1].time == job.now - 50.0


def test_a_start_of_the_ranks_goes_no_further_than_the_run_had_come() -> None:
    """A job that says it starts again near its end has come as far as it had before, and has the GPUs Slurm gave it."""
    job = honest(5)
    job.say(replace(HELLO, epoch=49, cursor=900, nodes=4))
    judged = judge(job.lines, RUN, Claimed())
    hello = judged.lines[-1].report
    assert isinstance(hello, Hello)
    assert (hello.epoch, hello.cursor) == (job.epoch, job.cursor)
    assert (hello.nodes, hello.gpus_per_node) == (0, 0)
    assert "Slurm gave it 4" in judged.doubt


def test_epochs_follow_each_other_and_take_their_time() -> None:
    """An epoch that comes out of turn, or long before its samples could be used, is not believed."""
    job = honest(10)
    job.say(Epoch(job.epoch + 5, job.step, 1000))
    assert "none ended between" in judge(job.lines, RUN, Claimed()).doubt
    rush = honest(10)
    first = rush.epoch
    for epoch in range(first, first + 400):
        rush.say(Epoch(epoch, rush.step, 1000))
    judged = judge(rush.lines, RUN, Claimed())
    ended = [line.report.epoch for line in judged.lines if isinstance(line.report, Epoch)]
    # 320 samples/s, for the slack of the clocks at most.
    assert max(ended) <= first + LENGTHS / DUTY * SKEW_S * 320 / 1000
    assert "were to come" in judged.doubt


def test_noise_and_progress_keep_to_physics() -> None:
    """At eight times the base batch: a noise scale that its own progress belies is not learnt from, and no sample is
    worth more than its batch allows."""
    job = Training(batch=256, noise=32.0)
    for _ in range(30):
        job.stretch(20)
    huge = lie(job, lambda said: replace(said, noise=1e9))
    assert all(line.report.noise is None for line in huge.lines[4:] if isinstance(line.report, Throughput))
    assert "noise scale" in huge.doubt
    whole = lie(job, lambda said: replace(said, progress=10.0 * (said.progress or 0.0)))
    told = [line.report.progress for line in whole.lines if isinstance(line.report, Throughput)]
    assert told[-1] is not None
    assert told[-1] <= 1.5 * job.progress + 1.5 * 256 * 3
    assert "worth of progress" in whole.doubt


def test_a_lost_line_costs_one_stretch_at_most() -> None:
    """Damage to a file is no lie: what follows a gap is judged against it no further than it can be."""
    job = honest(20)
    lines = [line for line in job.lines if line.number not in (7, 8, 15)]
    assert judge(lines, RUN, Claimed()).doubt == ""


def test_a_companion_that_starts_anew_goes_on() -> None:
    """What the one before knew of a run is not needed to believe an honest job, and a liar gets one report for it."""
    job = honest(20)
    half = len(job.lines) // 2
    assert judge(job.lines[half:], RUN, Claimed(number=half)).doubt == ""
    judged = judge(
        [
            replace(line, report=replace(line.report, samples=10 * line.report.samples))
            for line in job.lines[half:]
            if isinstance(line.report, Throughput)
        ],
        RUN,
        Claimed(number=half),
    )
    assert len(speeds(judged)) <= 1
    assert math.isfinite(sum(speeds(judged)))
