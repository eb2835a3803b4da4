"""Jobs of blocks over several ticks: their terms, reports, blocks, and what of it a hostile job could invent."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ones_db import Store
from ones_db.shape import Shape
from ones_wrapper.protocol import Bye, Membership, Report, Spec, Throughput, encode, encode_report
from slurm_ones.config import Settings
from slurm_ones.jobs import terms
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.jobs.observer import DrainReports, Observer
from slurm_ones.jobs.reports import BURST, MAX_LINES
from slurm_ones.jobs.terms import AT_ONCE, next_term
from slurm_ones.slurm.model import JobState, SlurmJob
from tests.jobs.make import HELLO, Queue
from tests.jobs.test_elastic import ended, task

ME = os.geteuid()


class Arrays(Queue):
    """A client that knows the tasks of arrays too."""

    def tasks(self, array: int) -> tuple[SlurmJob, ...]:
        return tuple(job for job in self.jobs.values() if job.array_id == array)


class Site:
    """A queue with one array of blocks, whose files lie in a directory."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.store = store
        self.queue = Arrays()
        self.queue.now = 10_000.0
        self.directory = directory
        self.observer = self.companion()
        (directory / "ones-100").mkdir()

    def companion(self) -> Observer:
        """Another one, that knows what the database knows."""
        return Observer(self.queue, self.store, Settings())  # type: ignore[arg-type]

    def tasks(self, *jobs: SlurmJob) -> None:
        own = {"uid": ME, "user": "me", "work_dir": str(self.directory), "submit_time": 1000.0}
        self.queue.jobs = {job.job_id: replace(job, **own) for job in jobs}  # type: ignore[arg-type]

    def says(self, term: int, *reports: Report, hot: bool = True, spec: int | None = None) -> None:
        folder = self.directory / "ones-100"
        said = Spec(32, 256, 64, 1000, 5, term=term if spec is None else spec, hot=hot)
        (folder / "spec.json").write_bytes(encode(said))
        lines = [encode_report(i + 1, 9000.0 + 10 * term + i, report) for i, report in enumerate(reports)]
        (folder / f"reports-{term}.jsonl").write_bytes(b"".join(lines))


@pytest.fixture
def site(store: Store, tmp_path: Path) -> Iterator[Site]:
    return Site(store, tmp_path)  # type: ignore[return-value]


def member(generation: int, *blocks: int, **other: Any) -> Membership:
    values: dict[str, Any] = {"nodes": len(blocks), "gpus_per_node": 1, "world": len(blocks), "step": 10, "batch": 32}
    return Membership(generation, blocks, tuple(0 for _ in blocks), **(values | {"pause_s": 0.2} | other))


def test_a_term_is_a_run(site: Site) -> None:
    """Its reports are in its own file, and the job goes on in the next one when its leader has left."""
    site.tasks(task(0, "n1"), task(1), task(2))
    site.says(0, HELLO, member(1, 0))
    seen = site.observer.observe().elastic
    assert list(seen) == [100] and seen[100].job.restart == 0 and len(seen[100].job.blocks) == 3
    site.tasks(ended(0), task(1, "n1"), task(2))
    site.says(0, HELLO, member(1, 0), member(2, 0, 1, order=7), Bye("moved", 20))
    site.says(1, HELLO, member(3, 1))
    assert site.observer.observe().elastic[100].job.restart == 1
    runs = site.store.runs(100)
    assert [(run.restart, run.end_reason) for run in runs] == [(0, "moved"), (1, None)]
    assert [run.start_time for run in runs] == [2000.0, 9010.0]
    assert [(one.term, one.report.generation) for one in site.store.memberships(100)] == [(1, 3), (0, 2), (0, 1)]
    assert site.store.jobs([100])[100].restart == 1
    (found,) = [site.store.membership(100, order=7)]
    assert found is not None and found.report.blocks == (0, 1)


def test_terms_while_no_companion_ran(site: Site) -> None:
    """Each is read as far as its file is there; so are the last words of the one before."""
    site.tasks(task(0, "n1"), task(1))
    site.says(0, HELLO)
    site.observer.observe()
    for term in (1, 2, 4):
        site.says(term, HELLO, member(term, 0))
    site.says(0, HELLO, Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0))
    site.says(5, HELLO, member(5, 0))
    observer = site.companion()
    assert observer.observe().elastic[100].job.restart == 5
    assert [run.restart for run in site.store.runs(100)] == [0, 1, 2, 4, 5]
    assert site.store.histories([100])[100].throughput


def test_many_terms_at_once_are_followed_in_steps(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one job costs a tick no more than so many files; none is left out."""
    monkeypatch.setattr(terms, "AT_ONCE", 3)
    site.tasks(task(0, "n1"), task(1))
    for term in range(9):
        site.says(term, HELLO, member(term, 0))
    followed = [site.observer.observe().elastic[100].job.restart for _ in range(3)]
    assert followed == [3, 6, 8]
    assert [run.restart for run in site.store.runs(100)] == list(range(9))


def test_terms_that_are_not_believed() -> None:
    """They only rise, by a few at a time, and no faster than a job can change its leader."""
    assert next_term(5, 5, 0.0, 100.0) == (5, "")
    assert next_term(5, 7, 0.0, 100.0) == (7, "")
    back, problem = next_term(5, 4, 0.0, 100.0)
    assert back == 5 and "term 4 is below 5" in problem
    assert next_term(0, 60, 0.0, 0.0) == (AT_ONCE, "")
    for said in (75, 2**53):
        fast, problem = next_term(0, said, 0.0, 100.0)
        assert fast == 0 and "above what a job of this age can reach (74)" in problem


def test_a_hostile_spec_costs_its_job_alone(site: Site) -> None:
    """A term out of all bounds, one that goes back, no spec at all: the last believed one stays, and the owner is
    told."""
    site.tasks(task(0, "n1"), task(1))
    site.says(1, HELLO)
    assert site.observer.observe().elastic[100].job.restart == 1
    for spec, word in ((2**53, "above what a job of this age can reach"), (0, "is below 1")):
        site.says(1, HELLO, member(1, 0), spec=spec)
        assert site.observer.observe().elastic[100].job.restart == 1
        site.observer.observe()
        assert word in site.store.jobs([100])[100].report_note
    for text in (b"{", b"[]", b'{"term": -1}', b'{"term": "x"}'):
        (site.directory / "ones-100" / "spec.json").write_bytes(text)
        assert site.observer.observe().elastic[100].job.restart == 1


def test_terms_do_not_multiply_reports(site: Site) -> None:
    site.queue.now = 1000.0
    site.tasks(task(0, "n1"), task(1))
    site.directory.joinpath("ones-100", "spec.json").write_bytes(encode(Spec(1, 1, 1, 1, 1, term=3)))
    line = Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0)
    text = b"".join(encode_report(number, 1000.0, line) for number in range(1, MAX_LINES + 1))
    for term in range(4):
        (site.directory / "ones-100" / f"reports-{term}.jsonl").write_bytes(text)
    for _ in range(4):
        site.observer.observe()
    assert sum(run.report_number for run in site.store.runs(100)) == BURST


def test_a_new_array_with_an_old_id(site: Site) -> None:
    site.tasks(task(0, "n1"))
    site.says(3, HELLO)
    assert site.observer.observe().elastic[100].job.restart == 3
    (site.directory / "ones-100" / "spec.json").unlink()
    site.queue.jobs = {101: replace(site.queue.jobs[100], job_id=101, submit_time=9500.0)}
    assert site.companion().observe().elastic[100].job.restart == 0
    assert [job.submit_time for job in site.store.jobs([100]).values()] == [9500.0]


def test_blocks_are_rows(site: Site) -> None:
    """One for each start, closed when it ended or when Slurm no longer tells of it, whoever looks."""
    site.tasks(task(0, "n1"), task(1, "n1", "n2", gpus=2), task(2))
    site.observer.observe()
    first, second = site.store.blocks(100)
    assert (first.task, first.slurm_id, str(first.shape), first.end_time) == (0, 100, "1x1", None)
    assert (second.task, second.node_list, second.start_time) == (1, ("n1", "n2"), 2001.0)
    site.tasks(ended(0), task(1, "n3", restart=1, start_time=9999.0), task(2))
    other = site.companion()
    other.observe()
    rows = [(one.task, one.restart, one.state, one.end_time) for one in site.store.blocks(100)]
    assert rows == [(0, 0, "COMPLETED", 3000.0), (1, 0, "UNKNOWN", 10_000.0), (1, 1, "RUNNING", None)]
    assert [(one.task, one.restart) for one in site.store.open_blocks()] == [(1, 1)]
    site.queue.jobs.clear()
    other.observe()
    assert site.store.open_blocks() == []


@pytest.mark.parametrize(
    ("now", "state"),
    [
        ({"state": JobState.PREEMPTED, "end_time": 3000.0}, "PREEMPTED"),
        ({"state": JobState.PENDING, "restart": 1}, "PREEMPTED"),  # requeued by Slurm, held by nobody
        ({"state": JobState.PENDING, "restart": 1, "held": True}, "UNKNOWN"),  # or put back by us
        ({"state": JobState.COMPLETED, "end_time": 3000.0}, "COMPLETED"),
    ],
)
def test_a_guest_that_slurm_took_is_known(site: Site, now: dict[str, Any], state: str) -> None:
    """Whether its site cancels or requeues guests."""
    companion = Observer(site.queue, site.store, Settings(guests={"gpu": {"qos": "guest"}}))  # type: ignore[arg-type]
    guest = task(1, "n1", qos="guest")
    site.tasks(task(0, "n1"), guest)
    companion.observe()
    assert [block.guest for block in site.store.blocks(100)] == [False, True]
    site.tasks(task(0, "n1"), replace(guest, **now))
    companion.observe()
    assert [block.state for block in site.store.blocks(100) if block.task == 1] == [state]


def test_the_job_ends_and_held_blocks_are_left(site: Site) -> None:
    """It is over in the database; who acts is told of blocks that nobody would let go."""
    site.tasks(task(0, "n1"), task(1))
    site.says(0, HELLO)
    site.observer.observe()
    site.tasks(ended(0, JobState.FAILED, exit_code=3), task(1))
    for observer in (site.observer, site.observer, site.companion()):
        seen = observer.observe()
        assert not seen.elastic and list(seen.left) == [100]
        record = site.store.jobs([100])[100]
        assert (record.state, record.exit_code, record.end_time) == ("FAILED", 3, 3000.0)
    assert seen.left[100].job.ended and seen.left[100].job.tasks[1].held


def test_an_owner_who_opts_out_is_left_alone(site: Site) -> None:
    """The words may go while blocks run: then it is nobody's, and the database still learns how it goes on."""
    site.tasks(task(0, "n1"), task(1))
    site.observer.observe()
    site.queue.jobs = {id_: replace(job, comment="mine") for id_, job in site.queue.jobs.items()}
    seen = site.observer.observe()
    assert not seen.elastic and not seen.left and seen.snapshot.jobs.keys() == {100, 101}
    record = site.store.jobs([100])[100]
    assert (record.refusal.code, record.state, record.elastic) == ("opted_out", "RUNNING", False)


def test_the_task_with_the_arrays_id_is_not_the_job(site: Site) -> None:
    """Protects the state of a job whose owner opts out while its first task has ended and another trains on."""
    site.tasks(task(0, "n1"), task(1, "n2"))
    site.observer.observe()
    gone = [replace(job, comment="mine") for job in (ended(0), task(1, "n2"))]
    site.queue.jobs = {job.job_id: job for job in gone}
    site.observer.observe()
    record = site.store.jobs([100])[100]
    assert (record.refusal.code, record.state, record.end_time) == ("opted_out", "RUNNING", None)


@pytest.mark.parametrize("comment", ["ones: gpus=1-4", "ones: gpus=many", "one: gpus=1-4"])
def test_an_owner_who_takes_the_word_for_blocks_away(site: Site, comment: str) -> None:
    """Protects the job in the database from the task that has its id, and its blocks from being changed as jobs of
    their own, also by a companion that is started later; once the word is back all is as before."""
    tasks = (task(0, "n1"), task(1, "n2"), task(2))
    site.tasks(*tasks)
    site.says(0, HELLO, member(1, 0, 1))
    site.observer.observe()
    before = site.store.jobs([100])[100]
    site.tasks(*(replace(one, comment=comment) for one in tasks))
    for observer in (site.observer, site.observer, site.companion()):
        assert not observer.observe().elastic
        records = site.store.jobs([100, 101, 102])
        assert records.keys() == {100}
        record = replace(records[100], elastic=True, refusal=before.refusal)
        assert (records[100].refusal.code, record) == ("blocks_no_more", before)
    site.tasks(*tasks)
    for another in (observer, site.companion()):
        assert another.observe().elastic.keys() == {100}
        assert site.store.jobs([100])[100] == before


def test_a_sweep_that_never_was_blocks(site: Site) -> None:
    site.tasks(*(replace(one, comment="ones: gpus=1-4") for one in (task(1, "n1"), task(2, "n2"))))
    for observer in (site.observer, site.observer, site.companion()):
        assert observer.observe().elastic.keys() == {101, 102}


def test_a_membership_is_read_between_ticks(site: Site) -> None:
    """A change of blocks need not wait for the next tick to be seen, nor for the one who knows the job's term."""
    site.tasks(task(0, "n1"), task(1))
    site.says(0, HELLO, member(1, 0))
    whole = site.observer.observe().elastic[100].job
    site.says(1, HELLO, member(2, 1, order=9))
    for observer in (site.observer, site.companion()):
        found = DrainReports(observer, site.store, lambda: 10_001.0).membership(whole, 9)
        assert found is not None and (found.term, found.report.blocks) == (1, (1,))


def test_a_throttle_that_a_snapshot_does_not_show(site: Site) -> None:
    """Not all clients show it: such an array is asked about, and refused only where it has none."""
    site.tasks(*(replace(one, throttle=0) for one in (task(0, "n1"), task(1), task(2))))
    asked = []

    def details(job_ids: Collection[int]) -> dict[int, SlurmJob]:
        asked.append(set(job_ids))
        return {id_: replace(site.queue.jobs[id_], throttle=most) for id_ in job_ids}

    site.queue.details = details  # type: ignore[method-assign]
    most = 0
    assert str(site.observer.observe().elastic[100].refusal)
    most = 1
    assert not site.observer.observe().elastic[100].refusal
    count = len(asked)
    assert not site.observer.observe().elastic[100].refusal
    assert len(asked) <= count + 1


def test_a_companion_that_starts_amid_a_change_knows_the_term(site: Site) -> None:
    """It asks for the membership before it has looked at the queue, with a task that was used again: what was read
    stays read, and the job does not go back to an earlier term."""
    site.tasks(task(0, "n1"), task(1))
    for term in range(0, 41, 10):
        site.says(term, HELLO, member(term + 1, 0))
        site.observer.observe()
    assert site.store.jobs([100])[100].restart == 40
    samples = [Throughput(0, 10 * i, 320 * i, 320, 2.0, 32, 1.0, 2.0) for i in range(1, 21)]
    site.says(40, HELLO, member(41, 0), *samples, member(42, 1, order=9))
    one = WholeJob.of(replace(site.queue.jobs[101], restart=40, submit_time=9_999.0), 100)
    observer = site.companion()
    found = DrainReports(observer, site.store, lambda: 10_001.0).membership(one, 9)
    assert found is not None and (found.term, found.report.generation) == (40, 42)
    assert observer.observe().elastic[100].job.restart == 40
    assert site.store.jobs([100])[100].restart == 40
    assert not site.store.jobs([100])[100].report_note


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": ()},
        {"blocks": (0, 0), "restarts": (0, 0)},
        {"restarts": (0, 0)},
        {"nodes": 0},
        {"nodes": 4},
        {"gpus_per_node": 4},
        {"world": 0},
    ],
)
def test_memberships_that_cannot_be(site: Site, changes: dict[str, Any]) -> None:
    site.tasks(task(0, "n1"), task(1))
    site.says(0, HELLO, member(1, 0), replace(member(2, 1), **changes), member(3, 0))
    site.observer.observe()
    assert [one.report.generation for one in site.store.memberships(100)] == [3, 1]
    site.observer.observe()
    assert "membership: " in site.store.jobs([100])[100].report_note


def test_a_plain_job_has_no_memberships(site: Site) -> None:
    """At which size it runs is Slurm's word, whatever it writes."""
    plain = replace(task(0, "n1"), comment="ones: gpus=1-4", array=False, array_id=0, array_tasks=(), job_id=100)
    site.tasks(plain)
    site.says(0, HELLO, member(1, 0))
    site.observer.observe()
    assert site.store.memberships(100) == [] and len(site.store.runs(100)) == 1
    site.observer.observe()
    assert "not one of blocks" in site.store.jobs([100])[100].report_note


def test_blocks_that_share_a_node_are_one_node(site: Site) -> None:
    """Which nodes they have is Slurm's word, also of blocks that started since the last tick; else throughput would be
    learnt at a shape that the job never has."""
    site.tasks(task(0, "n1", gpus=2), task(1, "n1", gpus=2), task(2))
    both = member(1, 0, 1, gpus_per_node=2, world=4)
    site.says(0, HELLO, both)
    whole = site.observer.observe().elastic[100]
    assert whole.shape == Shape(1, 4)
    (found,) = site.store.memberships(100)
    assert (found.report.nodes, found.report.gpus_per_node) == (1, 4)
    site.tasks(task(0, "n1", gpus=2), task(1, "n1", gpus=2), task(2, "n2", "n3", gpus=4))
    more = member(2, 0, 1, 2, nodes=4, gpus_per_node=0, world=12, order=9)
    site.says(0, HELLO, both, more)
    seen = DrainReports(site.observer, site.store, lambda: 10_001.0).membership(whole.job, 9)
    assert seen is not None and (seen.report.nodes, seen.report.gpus_per_node) == (3, 4)
    # It says that it has other GPUs than Slurm has given it: then all of it is its own word.
    site.says(0, HELLO, both, more, member(3, 0, nodes=1, gpus_per_node=1, world=1))
    site.observer.observe()
    newest = site.store.membership(100)
    assert newest is not None and (newest.report.nodes, newest.report.world) == (1, 1)
