"""A tick's look: what is stored of the queue and of the jobs' reports, and what is left alone."""

from __future__ import annotations

import errno
import getpass
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event

from ones_db import ActionRecord, RunRecord, Store, StoreError
from ones_wrapper.protocol import Batch, Checkpoint, Epoch, First, Report, Spec, Throughput, encode, encode_report
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.jobs.observer import DrainReports, Observer, StopFile
from slurm_ones.slurm.model import JobState, SlurmJob
from tests.db.make import actions, node_changes
from tests.jobs.make import HELLO, Queue, job

ME = os.geteuid()
SPEC = Spec(32, 256, 64, 1000, 5)


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """With one job, whose directory is below the test's."""
    found = Queue()
    found.jobs[1] = job(work_dir=str(tmp_path))
    return found


@pytest.fixture
def observer(queue: Queue, store: Store) -> Observer:
    return Observer(queue, store, Settings())  # type: ignore[arg-type]


def write(directory: Path, job_id: int, *reports: Report, restart: int = 0, spec: Spec | None = SPEC) -> None:
    """What a job's wrapper would have written."""
    folder = directory / f"ones-{job_id}"
    folder.mkdir(exist_ok=True)
    if spec is not None:
        (folder / "spec.json").write_bytes(encode(spec))
    lines = [encode_report(i + 1, 900.0 + i, report) for i, report in enumerate(reports)]
    (folder / f"reports-{restart}.jsonl").write_bytes(b"".join(lines))


def test_reports_reach_the_database_once(queue: Queue, store: Store, tmp_path: Path) -> None:
    """A companion that starts anew reads on where the last one stopped, and stores nothing twice."""
    done = (HELLO, Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0), Epoch(0, 32, 1000, 1.5, 0.5))
    write(tmp_path, 1, *done[:2])
    Observer(queue, store, Settings()).observe()  # type: ignore[arg-type]
    write(tmp_path, 1, *done)
    for _ in range(2):
        Observer(queue, store, Settings()).observe()  # type: ignore[arg-type]
    history = store.histories([1])[1]
    assert history.samples == 1000
    assert [(p.samples_per_s, p.batch) for p in history.throughput] == [(160.0, 32)]
    assert [(e.epoch, e.accuracy) for e in history.epochs] == [(0, 0.5)]
    assert history.spec is not None
    assert history.spec.max_local_batch == 64


def test_a_job_that_slurm_forgot_is_closed(queue: Queue, observer: Observer, store: Store) -> None:
    """A job that ended while nobody looked does not run for ever in the database."""
    observer.observe()
    queue.jobs.clear()
    queue.now = 5000.0
    assert not observer.observe().elastic
    record = store.jobs([1])[1]
    assert (record.state, record.end_time) == ("UNKNOWN", 5000.0)
    assert "no longer knows how" in record.report_note


def test_a_job_whose_owner_opts_out_is_no_longer_weighed(queue: Queue, observer: Observer, store: Store) -> None:
    """Without the comment it is nobody's, but the database still learns how it ended."""
    assert 1 in observer.observe().elastic
    queue.jobs[1] = job(comment="mine")
    assert not observer.observe().elastic
    assert "opts in" in str(store.jobs([1])[1].refusal)
    queue.jobs[1] = job(comment="mine", state=JobState.COMPLETED, end_time=2000.0)
    observer.observe()
    assert (store.jobs([1])[1].state, store.jobs([1])[1].end_time) == ("COMPLETED", 2000.0)


def test_a_job_whose_owner_opts_in_again_is_weighed_again(store: Store) -> None:
    """What the database holds is what was seen last, also where that is what was seen before."""
    queue = Queue()
    observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
    for comment, elastic in (("ones: gpus=1-4", True), ("mine", False), ("ones: gpus=1-4", True)):
        queue.jobs[1] = job(comment=comment)
        observer.observe()
        assert store.jobs([1])[1].elastic is elastic


def test_user_mode_reads_nobody_elses_files(store: Store, tmp_path: Path) -> None:
    """Another's job is named with the reason why it is left alone; its reports are not opened."""
    queue = Queue()
    queue.jobs[1] = job(uid=ME + 1, user="she", work_dir=str(tmp_path))
    write(tmp_path, 1, HELLO)
    observer = Observer(queue, store, Settings(scope="own"))  # type: ignore[arg-type]
    seen = observer.observe()
    assert "belongs to she" in str(seen.elastic[1].refusal)
    assert store.report_positions([1]) == {1: {}}
    assert not store.jobs([1])[1].report_note


def test_the_last_complaint_about_reports_stays(observer: Observer, store: Store, tmp_path: Path) -> None:
    """A bad line costs itself alone, and its owner still finds why after the next look."""
    write(tmp_path, 1, HELLO)
    path = tmp_path / "ones-1/reports-0.jsonl"
    path.write_bytes(b"{nonsense\n" + path.read_bytes())
    for _ in range(3):
        observer.observe()
    assert "1 unreadable line" in store.jobs([1])[1].report_note
    assert store.runs(1)[0].batch == 32


def test_a_complaint_goes_once_its_cause_is_gone(
    queue: Queue, observer: Observer, store: Store, tmp_path: Path
) -> None:
    """Protects owners from looking for what they have put right: it says since when it is so, then when it last was,
    and an hour later nothing."""
    write(tmp_path, 1, HELLO)
    spec = tmp_path / "ones-1/spec.json"
    good = spec.read_bytes() if spec.exists() else None
    spec.write_bytes(b"{nonsense")

    def note(at: float) -> str:
        queue.now = at
        observer.observe()
        observer.observe()
        return store.jobs([1])[1].report_note

    began = queue.now
    held = note(began)
    assert "spec.json: " in held and "(since " in held
    assert note(began + 7200.0) == held
    spec.unlink() if good is None else spec.write_bytes(good)
    assert "(last seen " in note(began + 7260.0)
    assert note(began + 7200.0 + 3700.0) == ""


def test_noise_and_progress_reach_the_database(observer: Observer, store: Store, tmp_path: Path) -> None:
    """What a job says of its gradient is stored; progress beyond what its samples can be worth is not believed."""
    stretch = Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0, noise=64.0, progress=300.0)
    liar = replace(stretch, cursor=640, progress=9999.0)
    write(tmp_path, 1, HELLO, stretch, liar)
    observer.observe()
    history = store.histories([1])[1]
    assert [point.noise for point in history.noise] == [64.0, 64.0]
    assert (history.samples, history.progress) == (640.0, 640.0)


def test_a_job_that_does_not_know_its_datasets_length(observer: Observer, store: Store, tmp_path: Path) -> None:
    """Samples add up over the epochs that ended, each of its own length; progress up to that is believed."""
    hello = replace(HELLO, dataset=0)
    done = [
        Throughput(0, 15, 480, 480, 2.0, 32, 1.0, 2.0, progress=470.0),
        Epoch(0, 16, 500, 1.5),
        Throughput(1, 30, 440, 460, 2.0, 32, 1.0, 2.0, progress=900.0),
        Epoch(1, 32, 520, 1.2),
        Throughput(2, 34, 64, 144, 2.0, 32, 1.0, 2.0, progress=1050.0),
    ]
    spec = replace(SPEC, dataset=0)
    expected = [(480.0, None), (500.0, 500.0), (940.0, 500.0), (1020.0, 510.0), (1084.0, 510.0)]
    for number, (samples, length) in enumerate(expected, 1):
        write(tmp_path, 1, hello, *done[:number], spec=spec)
        observer.observe()
        history = store.histories([1])[1]
        assert (history.samples, history.epoch_samples) == (samples, length)
        assert history.progress is not None and history.progress <= samples
    assert history.progress == 1050.0


def test_what_a_job_says_of_its_starts_reaches_the_database(observer: Observer, store: Store, tmp_path: Path) -> None:
    """How the start went, how often the ranks were started again, passes, and losses that are no numbers."""
    hello = replace(HELLO, queue_s=9.0, launch_s=5.0, import_s=4.0, group_s=0.5, load_s=0.25, resizes=2, note="slow")
    again = replace(hello, attempt=1, launch_s=3.0, import_s=2.0, note="a rank died")
    odd = Throughput(0, 10, 320, 320, 2.0, 32, 1.0, None, nonfinite=10)
    changed = Batch(11, 128, 4.0, passes=2, momentum_power=0.25)
    write(tmp_path, 1, hello, First(1, 0.5), again, First(1, 0.75), odd, changed, spec=replace(SPEC, max_passes=3))
    observer.observe()
    (run,) = store.runs(1)
    assert (run.queue_s, run.launch_s, run.import_s, run.first_step_s) == (9.0, 3.0, 2.0, 0.75)
    assert (run.resizes, run.attempts, run.note, run.hello_time) == (2, 1, "slow; a rank died", 900.0)
    assert (run.nonfinite, run.nonfinite_step) == (10, 10)
    spec = store.histories([1])[1].spec
    assert spec is not None and spec.max_passes == 3
    (summary,) = store.job_summaries()
    assert (summary.batch, summary.passes, summary.local_batch) == (128, 2, 64)
    assert (summary.attempts, summary.nonfinite, summary.nonfinite_step) == (1, 10, 10)


def test_a_tick_writes_all_reports_at_once(store: Store, tmp_path: Path) -> None:
    """Protects a busy cluster's tick: as many transactions with fifty jobs as with one."""
    commits: list[object] = []
    event.listen(store._engine, "commit", commits.append)
    counts, queue = [], Queue()
    observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
    observer.observe()  # which stores the nodes, once
    for number in (1, 50):
        queue.jobs |= {n: job(n, work_dir=str(tmp_path)) for n in range(100 * number, 100 * number + number)}
        for job_id in queue.jobs:
            write(tmp_path, job_id, HELLO, Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0))
        commits.clear()
        observer.observe()
        counts.append(len(commits))
        assert all(store.histories(list(queue.jobs)).values())
    assert counts[0] == counts[1]


def test_nodes_are_stored_when_they_change(store: Store) -> None:
    """A node that goes down leaves a trace; jobs that come and go on it, and a companion that starts again, none."""
    queue = Queue()
    observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
    observer.observe()
    before = node_changes(store)
    name = before[0][1].name
    assert {node.state for _, node in before} == {"UP"}
    queue.nodes = {**queue.nodes, name: replace(queue.nodes[name], state="ALLOCATED", gpus_used=1, idle=False)}
    observer.observe()
    Observer(queue, store, Settings()).observe()  # type: ignore[arg-type]
    assert node_changes(store) == before
    queue.nodes = {**queue.nodes, name: replace(queue.nodes[name], state="DOWN*", usable=False)}
    queue.now += 60.0
    observer.observe()
    queue.nodes = {name: replace(queue.nodes[name], state="IDLE")}
    queue.now += 60.0
    observer.observe()
    *_, (time, down), (_, last) = node_changes(store, name)
    assert (time, down.state, down.usable, last.state) == (1060.0, "DOWN*", False, "RESERVED")


def test_the_gpus_of_jobs_that_did_not_opt_in(queue: Queue, observer: Observer, store: Store) -> None:
    """Protects the line in the page's picture: what others hold, each number once, and nothing of ours or waiting."""
    runs, waits = JobState.RUNNING, JobState.PENDING
    for comment, state in (("mine", runs), ("mine", runs), ("ones: gpus=1-4", runs), ("mine", waits)):
        queue.now += 60.0
        queue.jobs[2] = job(2, comment=comment, state=state, gpus_total=3)
        observer.observe()
    assert store.other_gpus(0.0) == [(1060.0, 3), (1180.0, 0)]
    assert store.other_gpus(1100.0) == [(1060.0, 3), (1180.0, 0)] and store.other_gpus(1180.0) == [(1180.0, 0)]


def test_a_spec_that_changes_is_stored_again(observer: Observer, store: Store, tmp_path: Path) -> None:
    """A script may learn its dataset late; what it says last counts, also after a requeue."""
    for spec in (SPEC, replace(SPEC, dataset=5000)):
        write(tmp_path, 1, HELLO, spec=spec)
        observer.observe()
        told = store.histories([1])[1].spec
        assert told is not None
        assert told.dataset == spec.dataset


def test_replayed_reports_change_nothing(queue: Queue, observer: Observer, store: Store, tmp_path: Path) -> None:
    """A file that is written anew as it was, and what a companion that starts anew finds in it, is neither stored nor
    checked again; more seconds of training than the run has lasted stay out, and its owner reads so once."""
    stretch = Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0)
    lie = replace(stretch, step=20, cursor=640, seconds=3200.0)
    told = (HELLO, stretch, lie, replace(stretch, step=30, cursor=960))
    write(tmp_path, 1, *told)
    observer.observe()
    before = store.histories([1])[1]
    assert [point.samples_per_s for point in before.throughput] == [160.0, 160.0]
    write(tmp_path, 1, *told)
    for again in (observer, observer, Observer(queue, store, Settings())):  # type: ignore[arg-type]
        if again is observer:
            again.observe()
            assert "1 of its reports not believed" in store.jobs([1])[1].report_note
        again.observe()
        assert store.histories([1])[1].throughput == before.throughput
        assert store.runs(1)[0].report_number == 4


def test_what_could_not_be_stored_is_judged_again(
    observer: Observer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that fails once costs an honest job nothing: its reports are believed at the next look."""
    write(tmp_path, 1, HELLO, Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0))
    with monkeypatch.context() as broken:
        broken.setattr(store, "add_reports", lambda told: (_ for _ in ()).throw(StoreError("away")))
        with pytest.raises(StoreError):
            observer.observe()
    observer.observe()
    observer.observe()
    assert len(store.histories([1])[1].throughput) == 1
    assert not store.jobs([1])[1].report_note


def test_task_counts_that_a_snapshot_does_not_show(tmp_path: Path, store: Store) -> None:
    """Such a job would be drained and requeued in vain, so it is looked at closely, and once."""
    queue = Queue()
    queue.jobs = {1: job(work_dir=str(tmp_path)), 2: job(2, comment="", work_dir=str(tmp_path))}
    asked = []

    def details(job_ids: Collection[int]) -> dict[int, SlurmJob]:
        asked.append(set(job_ids))
        return {job_id: replace(queue.jobs[job_id], task_counts=True) for job_id in job_ids}

    queue.details = details  # type: ignore[method-assign]
    observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
    for _ in range(2):
        (elastic,) = observer.observe().elastic.values()
        assert "task counts" in str(elastic.refusal)
    assert asked == [{1}]


def test_the_throttle_of_other_arrays_is_read_once(tmp_path: Path, store: Store) -> None:
    """Squeue's columns do not show it: of ten tasks that wait, two may start. Nobody asks where no elastic job runs."""
    queue = Queue()
    waits = job(50, comment="", state=JobState.PENDING, array_id=50, array_tasks=(3, 4, 5), node_list=())
    queue.jobs = {50: waits, 60: replace(waits, job_id=60, array_id=60)}
    asked = []

    def details(job_ids: Collection[int]) -> dict[int, SlurmJob]:
        asked.append({*job_ids})
        return {job_id: replace(queue.jobs[job_id], throttle=2 * (job_id == 50)) for job_id in job_ids}

    queue.details = details  # type: ignore[method-assign]
    observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
    assert observer.observe().snapshot.jobs[50].throttle == 0 and asked == []
    queue.jobs[1] = job(work_dir=str(tmp_path))
    for _ in range(2):
        seen = observer.observe().snapshot.jobs
        assert (seen[50].throttle, seen[60].throttle) == (2, 0)
    assert asked == [{50, 60}, {1}]


def test_a_job_that_reports_more_after_its_checkpoint_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its requeue in silence: no clock need tell when its minute is over."""
    found = (3, 995.0, Checkpoint("step-1", 0, 0, 1, 0, 0.0, order=7))
    for answer, last, stands, expected in (
        (found, 3, True, 995.0),
        (found, 4, True, None),
        (found, 3, False, None),
        (None, 3, True, None),
    ):
        store = SimpleNamespace(
            checkpoint_for_order=lambda job, restart, order, answer=answer: answer,
            report_positions=lambda jobs, last=last: {1: {0: (100, last)}},
        )
        monkeypatch.setattr("slurm_ones.jobs.observer.checkpoint_stands", lambda job, name, stands=stands: stands)
        reports = DrainReports(SimpleNamespace(collect=lambda jobs, now: None), store, lambda: 1000.0)  # type: ignore[arg-type]
        assert reports.drained(WholeJob.of(job()), 0, 7) == expected


@pytest.mark.parametrize(
    ("restart", "end", "gone"), [(0, "drained", True), (1, "drained", False), (0, "error", False), (0, None, False)]
)
def test_a_run_that_said_that_it_ends_for_a_requeue_is_gone(restart: int, end: str | None, gone: bool) -> None:
    store = SimpleNamespace(runs=lambda job: [RunRecord(1, restart, end_reason=end)])
    reports = DrainReports(SimpleNamespace(collect=lambda jobs, now: None), store, lambda: 1000.0)  # type: ignore[arg-type]
    assert reports.gone(WholeJob.of(job()), 0) == gone


def test_the_stop_file_is_recorded_once(tmp_path: Path, store: Store) -> None:
    """Protects an admin's question who stopped the resizes: made, removed and made again, whoever starts meanwhile."""
    path = tmp_path / "stop"
    file = StopFile(path, store)
    file.check(10.0)
    assert actions(store) == []
    path.touch()
    os.utime(path, (20.0, 20.0))
    for looks in (file, file, StopFile(path, store)):
        looks.check(30.0)
    made = ActionRecord(20.0, getpass.getuser(), "stop file made", str(path))
    assert actions(store) == [made]
    path.unlink()
    file.check(40.0)
    file.check(50.0)
    assert actions(store) == [ActionRecord(40.0, "", "stop file removed", str(path)), made]


def test_a_stop_file_that_nobody_can_look_for_stops_too(
    queue: Queue, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its server may be down: then no job may be resized, each in a hold goes back, and nobody has removed the file."""
    path, stat = tmp_path / "stop", Path.stat

    def stale(self: Path, **options: Any) -> os.stat_result:
        if self == path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(self, **options)

    path.touch()
    settings, file = Settings(stop_file=path), StopFile(path, store)
    file.check(10.0)
    monkeypatch.setattr(Path, "stat", stale)
    file.check(20.0)
    observer = Observer(queue, store, settings)  # type: ignore[arg-type]
    assert not observer.may_resize(WholeJob.of(queue.jobs[1])) and settings.stopped
    assert [one.action for one in actions(store)] == ["stop file made"]
    assert f"{path}: the stop file cannot be checked: Stale file handle" in caplog.text
