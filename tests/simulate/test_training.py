"""A simulated job: what it reports, and how it obeys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ones_wrapper.protocol import (
    CHECKPOINTS,
    DRAIN_WAIT_S,
    MANIFEST,
    ORDERS,
    SPEC,
    Batch,
    Bye,
    Checkpoint,
    Epoch,
    First,
    Hello,
    Order,
    Report,
    Throughput,
    decode_report,
    decode_spec,
    encode,
    reports_name,
)
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.simulate.training.application import Application, Position, Submission, TrainingCurve
from slurm_ones.simulate.training.reports import JobFiles
from slurm_ones.simulate.training.training import Training
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from tests.simulate.harness import QUIET

RESIZE_S = 40.0
CIFAR = build(replace(KINDS["resnet18-cifar10"], epochs=90))


class Bench:
    """One training on its own, in runs that the test starts and stops."""

    def __init__(
        self,
        directory: Path,
        application: Application = CIFAR,
        settings: ClusterSettings = QUIET,
        *,
        gpus: int = 2,
        batch: int = 128,
        elastic: bool = True,
    ) -> None:
        self.timeline = Timeline(1000.0)
        self.files = JobFiles(directory, 1)
        submission = Submission("job", 0.0, application.name, gpus, batch, elastic)
        files = self.files if elastic else None
        rng = np.random.default_rng(0)
        self.training = Training(submission, application, files, self.timeline, settings, RESIZE_S, rng)
        self.exits: list[float] = []
        self.training.exited = lambda task, code: self.exits.append(self.timeline.now)
        self.restart = -1

    def start(self, *gpus: int) -> None:
        """The next run, on nodes that give so many GPUs each."""
        self.restart += 1
        self.training.program().start(self.restart, {f"n{i}": count for i, count in enumerate(gpus)})

    def wait(self, seconds: float) -> None:
        """Let the job hear orders, and time pass."""
        self.training.check_orders()
        self.timeline.run(self.timeline.now + seconds)
        self.files.flush()

    def order(self, number: int, **what: object) -> None:
        text = encode(Order(number, self.restart, **what))  # type: ignore[arg-type]
        new = self.files.directory / "new"
        new.write_bytes(text)
        new.rename(self.files.directory / ORDERS)

    def reports(self, restart: int | None = None) -> list[tuple[float, Report]]:
        path = self.files.directory / reports_name(self.restart if restart is None else restart)
        lines = [decode_report(line) for line in path.read_bytes().splitlines()]
        assert [number for number, _, _ in lines] == list(range(1, len(lines) + 1))
        return [(time, report) for _, time, report in lines]

    def of(self, kind: type, restart: int | None = None) -> list:  # type: ignore[type-arg]
        return [report for _, report in self.reports(restart) if isinstance(report, kind)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)


def test_a_first_start_costs_its_launch_and_then_says_what_it_is(bench: Bench) -> None:
    """The companion decides on nothing before the spec, which says that one GPU takes all batches."""
    bench.start(2)
    bench.wait(RESIZE_S * 0.5 - 1)
    assert not bench.files.directory.exists()
    bench.wait(2)
    time, hello = bench.reports()[0]
    assert isinstance(hello, Hello)
    assert time == 1000.0 + RESIZE_S * 0.5
    assert (hello.nodes, hello.gpus_per_node, hello.world, hello.batch, hello.checkpoint) == (1, 2, 2, 128, "")
    spec = decode_spec((bench.files.directory / SPEC).read_bytes())
    assert (spec.base_batch, spec.max_batch, spec.max_local_batch) == (128, 16384, 16384)
    assert (spec.dataset, spec.epochs) == (50_000, 90)


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_start_is_told_by_phase(tmp_path: Path, gpus: int) -> None:
    """As a real run tells it: launch with imports, process group, and the first step before all that comes of it."""
    bench = Bench(tmp_path)
    bench.start(gpus)
    bench.wait(200)
    (time, hello), (first_time, first), _ = bench.reports()[:3]
    assert isinstance(hello, Hello) and isinstance(first, First)
    assert hello.launch_s + hello.group_s == RESIZE_S * 0.5
    assert 0 < hello.import_s < hello.launch_s
    assert (hello.queue_s, hello.resizes, hello.attempt) == (0.0, 0, 0)
    assert first.step == 1
    # The last step of an epoch has fewer samples.
    assert first.seconds == pytest.approx(128 / CIFAR.placed_speed((gpus,), 128.0), rel=0.01)
    assert first_time == pytest.approx(time + first.seconds, abs=0.002)
    assert len(bench.of(First)) == 1


def test_it_trains_as_fast_as_its_application_and_says_so(tmp_path: Path) -> None:
    """A first report soon, then each five minutes where the site asks for that, every sample in one of them."""
    bench = Bench(tmp_path, settings=replace(QUIET, report_s=300.0))
    bench.start(2)
    bench.wait(1000)
    found = bench.of(Throughput)
    truth = CIFAR.placed_speed((2,), 128.0)
    assert [report.samples / report.seconds for report in found] == pytest.approx([truth] * len(found))
    times = [time for time, report in bench.reports() if isinstance(report, Throughput)]
    hello = 1000.0 + RESIZE_S * 0.5
    assert times[0] == pytest.approx(hello + 30, abs=0.2)
    assert times[1] == pytest.approx(times[0] + 300, abs=0.2)
    last = found[-1]
    assert sum(report.samples for report in found) == last.epoch * 50_000 + last.cursor
    assert last.step * 128 >= last.cursor


def test_measured_noise_is_not_the_truth(tmp_path: Path) -> None:
    """Reports scatter about the truth, the training itself does not."""
    speeds, ends = [], []
    for noise in (0.0, 0.1):
        bench = Bench(tmp_path / str(noise), settings=ClusterSettings(speed_noise=noise, report_s=20.0))
        (tmp_path / str(noise)).mkdir()
        bench.start(1)
        bench.wait(3000)
        speeds.append(np.array([report.samples / report.seconds for report in bench.of(Throughput)]))
        ends.append(bench.exits)
    assert ends[0] == ends[1] != []
    assert np.log(speeds[1] / speeds[0]).std() == pytest.approx(0.1, rel=0.3)


def test_each_pass_is_reported_with_its_loss_and_accuracy(bench: Bench) -> None:
    bench.start(2)
    bench.wait(20_000)
    epochs = bench.of(Epoch)
    assert [report.epoch for report in epochs] == list(range(90))
    assert {report.samples for report in epochs} == {50_000}
    losses, accuracies = [r.loss for r in epochs], [r.accuracy for r in epochs]
    assert losses == sorted(losses, reverse=True)
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] == pytest.approx(CIFAR.metric[-1, 0])


def test_it_ends_when_its_progress_is_made(bench: Bench) -> None:
    """At the base batch after its epochs, in the seconds that its application says."""
    bench.start(2)
    bench.wait(5000)
    seconds = CIFAR.seconds(1, 2, 128.0, 0.0)
    assert bench.exits == [pytest.approx(1000 + RESIZE_S * 0.5 + seconds, abs=1.0)]
    assert bench.training.finished
    assert bench.reports()[-1][1] == Bye("finished", bench.training.durable.step)


def test_a_large_batch_uses_more_samples_for_the_same_progress(tmp_path: Path) -> None:
    """Efficiency below one: more passes than declared, and the seconds that its application says."""
    bench = Bench(tmp_path, batch=4096)
    bench.start(4)
    bench.wait(20_000)
    last = bench.of(Throughput)[-1]
    used = last.epoch * 50_000 + last.cursor
    assert used > 1.5 * CIFAR.total
    assert last.progress == pytest.approx(CIFAR.total, rel=0.01)
    seconds = CIFAR.seconds(1, 4, 4096.0, 0.0)
    assert bench.exits == [pytest.approx(1000 + RESIZE_S * 0.5 + seconds, rel=0.01)]
    scale = bench.of(Throughput)[0].noise
    assert scale == pytest.approx(CIFAR.noise(0.0, 4096.0), rel=0.01)


def test_patience_ends_a_training_before_its_last_epoch(tmp_path: Path) -> None:
    """Where a pass brings little: at a batch of low efficiency failing fast looks like finishing fast."""
    impatient = build(replace(KINDS["resnet18-cifar10"], epochs=40, patience=5, noise=(100.0, 200.0)))
    passes = {}
    for batch in (128, 16384):
        (tmp_path / str(batch)).mkdir()
        bench = Bench(tmp_path / str(batch), impatient, batch=batch)
        bench.start(4)
        bench.wait(50_000)
        assert bench.training.finished
        passes[batch] = (len(bench.of(Epoch)), bench.training.durable.progress)
    assert passes[128][0] == 40
    assert passes[16384][1] < 0.9 * passes[128][1]


def test_a_drain_checkpoints_waits_and_carries_on(bench: Bench) -> None:
    """At the next step boundary; durable after its part of a resize's cost; and after a minute it trains on."""
    bench.start(2)
    bench.wait(100)
    bench.order(1, drain=True)
    bench.wait(RESIZE_S * 0.1 + 1)
    time, saved = bench.reports()[-1]
    assert isinstance(saved, Checkpoint)
    assert (saved.order, saved.seconds) == (1, RESIZE_S * 0.1)
    assert time == pytest.approx(1100 + RESIZE_S * 0.1, abs=0.2)
    manifest = bench.files.directory / CHECKPOINTS / saved.name / MANIFEST
    assert manifest.stat().st_size > 0
    before = bench.training.position
    bench.wait(DRAIN_WAIT_S - 5)
    assert bench.training.position == before
    bench.wait(20)
    assert bench.training.position.step > before.step


def test_a_newer_order_calls_a_drain_off(bench: Bench) -> None:
    bench.start(2)
    bench.wait(100)
    bench.order(1, drain=True)
    bench.wait(10)
    before = bench.training.position
    bench.order(2, batch=512)
    bench.wait(10)
    assert bench.training.position.step > before.step
    assert bench.of(Batch)[-1] == Batch(bench.of(Batch)[-1].step, 512, 4.0, 2)


def test_a_drained_run_is_followed_by_one_that_repeats_nothing(bench: Bench) -> None:
    bench.start(2)
    bench.wait(100)
    bench.order(1, drain=True, batch=1024)
    bench.wait(10)
    at = bench.training.position
    assert bench.training.program().stop() == RESIZE_S * 0.1
    bench.wait(30)
    assert bench.reports()[-1][1] == Bye("drained", at.step, 143)
    bench.start(4, 4)
    bench.wait(RESIZE_S * 0.8 + 0.01)
    (hello,) = bench.of(Hello)
    assert (hello.epoch, hello.cursor, hello.step) == (at.epoch, at.cursor, at.step)
    assert (hello.world, hello.batch, hello.checkpoint) == (8, 1024, f"step-{at.step:09d}")
    assert hello.load_s == RESIZE_S * 0.3
    assert (hello.resizes, hello.queue_s) == (1, pytest.approx(30, abs=0.01))
    assert bench.training.lost_samples == 0


def test_what_no_checkpoint_holds_is_done_again(bench: Bench) -> None:
    """A node died: the run begins where its last checkpoint was taken, ten minutes into the run."""
    bench.start(1)
    bench.wait(900)
    (saved,) = bench.of(Checkpoint)
    assert saved.order is None
    at = bench.training.position
    bench.training.program().stop()
    bench.start(1)
    bench.wait(100)
    (hello,) = bench.of(Hello)
    assert (hello.epoch, hello.cursor) == (saved.epoch, saved.cursor)
    lost = (at.epoch - saved.epoch) * 50_000 + at.cursor - saved.cursor
    assert bench.training.lost_samples == lost > 0


def test_a_batch_changes_at_a_boundary_without_a_restart(bench: Bench) -> None:
    """What was measured before is reported at the old batch."""
    bench.start(2)
    bench.wait(60)
    bench.order(5, batch=1024)
    bench.wait(400)
    kinds = [report for _, report in bench.reports() if isinstance(report, (Throughput, Batch))]
    at = kinds.index(next(report for report in kinds if isinstance(report, Batch)))
    assert {report.batch for report in kinds[:at]} == {128}
    assert {report.batch for report in kinds[at:]} == {1024}
    assert len(bench.of(Hello)) == 1
    after = [report for report in kinds[at + 1 :] if isinstance(report, Throughput)]
    speed = sum(r.samples for r in after) / sum(r.seconds for r in after)
    assert speed == pytest.approx(CIFAR.placed_speed((2,), 1024.0))


def test_an_order_that_waits_is_heard_at_the_start(bench: Bench) -> None:
    """A batch counts from the first step; an old run's drain concerns nobody; a new run's is obeyed."""
    bench.start(2)
    bench.wait(60)
    bench.order(1, drain=True, batch=256)
    bench.training.program().stop()
    bench.start(2)
    bench.order(2, drain=True, batch=512)
    bench.wait(60)
    (hello,) = bench.of(Hello)
    assert hello.batch == 512
    assert [report.order for report in bench.of(Checkpoint)] == [2]


def test_progress_is_the_same_in_small_stretches_and_large_ones() -> None:
    course = TrainingCurve(CIFAR, 1.0)
    whole = course.use(Position(), 40_000, 4096, 10).progress
    at = Position()
    for _ in range(40):
        at = course.use(at, 1000, 4096, 1)
    assert at.progress == pytest.approx(whole)
    assert course.samples_left(at, 4096) == pytest.approx(course.samples_left(Position(), 4096) - 40_000)
    assert math.isclose(course.use(Position(), 1000, 128, 8).progress, 1000.0)


@pytest.mark.parametrize(("declares", "told"), [(1.0, 45), (0.0, 0), (2.0, 90), (0.001, 1)])
def test_a_job_declares_what_its_user_says(declares: float, told: int, tmp_path: Path) -> None:
    """Its spec has the epochs that it says it trains, which are not those that it does."""
    files = JobFiles(tmp_path, 1)
    submission = Submission("job", 0.0, CIFAR.name, 2, 128, epochs=0.5, declares=declares)
    training = Training(submission, CIFAR, files, Timeline(1000.0), QUIET, RESIZE_S, np.random.default_rng(0))
    assert training._reporter.spec.epochs == told
    assert training.curve.epochs == 45
