"""Jobs and runs as snapshots show them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ones_db import PromiseRecord, Store, StoreError, UnknownRecord
from ones_db.reasons import Reason
from ones_db.shape import Shape
from tests.db.make import SPEC, hello, job, report, resize, run, said


def test_jobs_come_back_as_they_went_in(store: Store) -> None:
    odd = job(
        1,
        name="'); DROP TABLE jobs;--",
        comment="ones: \x1b[31m gpus=1-4 \u202e ü 漢 🦒 \x07",
        work_dir="/scratch/a b",
        account="a%sb",
        partition="gpu",
        elastic=False,
        refusal=said("submitted with task counts"),
        exit_code=3,
        end_time=5000.25,
        report_note="line 3: not JSON",
    )
    store.record_jobs([odd, job(2)])
    assert store.jobs() == {1: odd, 2: job(2)}
    assert store.live_jobs() == {2}
    assert store.jobs([1, 99]) == {1: odd}


def test_one_odd_name_does_not_keep_a_snapshot_out(store: Store) -> None:
    """Protects from undecodable bytes, which Python hands on as lone surrogates, and from zeros."""
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")
    store.record_jobs([job(1, name=odd), job(2), job(3, name="a\0b", comment="tab\t and \x1b")])
    assert [store.jobs()[n].name for n in (1, 2, 3)] == ["caf\\udce9", "job2", "a\\x00b"]
    assert store.jobs()[3].comment == "tab\t and \x1b"


def test_seeing_a_job_again_updates_it(store: Store) -> None:
    store.record_jobs([job(1, state="PENDING")])
    report(store, 1, 0, spec=SPEC, offset=0, number=None)
    store.record_jobs([job(1, requested_shape=Shape(1, 4), comment="new")])
    assert store.jobs()[1] == job(1, comment="new")
    assert store.histories([1])[1].spec == SPEC


def test_a_requeue_is_the_same_job(store: Store) -> None:
    """Protects the JCT: Slurm gives a requeued job a new submission time, after it raised the restart
    count."""
    store.record_jobs([job(1)])
    store.record_jobs([job(1, restart=1)])
    store.record_jobs([job(1, restart=1, submit_time=3000.0)])
    store.record_jobs([job(1, restart=2, submit_time=4000.0, state="COMPLETED", end_time=5000.0)])
    (summary,) = store.job_summaries()
    assert summary.jct_s == 5000.0 - 1001.0


def test_a_term_that_the_job_reports_before_the_next_snapshot_runs(store: Store) -> None:
    """Protects a job of blocks whose leader has changed: until the next tick it is not shown as one that waits."""
    store.record_jobs([job(1)])
    store.record_runs([run(1, 0), run(1, 1, gpus=4)])
    (summary,) = store.job_summaries()
    assert summary.running and summary.shape == Shape(1, 4)


@pytest.mark.parametrize("end_time", [None, 5000.0])
def test_a_job_whose_last_run_slurm_forgot_is_the_same_job(store: Store, end_time: float | None) -> None:
    """Protects its resizes, by which a hold is known as the companion's. With an end, Slurm forgot that too."""
    store.record_jobs([job(1)])
    store.record_jobs([job(1, restart=2, submit_time=4000.0, end_time=end_time)])
    begun = store.begin_resize(resize(1))
    store.record_jobs([job(1, restart=1, submit_time=3000.0)])
    assert [*store.resizes_of(1)] == [begun.id] and store.live_jobs() == {1}


def test_a_job_id_used_again_is_another_job(store: Store) -> None:
    """Protects a new job from the history of an old one that had the same id."""
    store.record_jobs([job(1, restart=2, end_time=1500.0, state="COMPLETED")])
    store.record_runs([run(1, 2)])
    store.record_jobs([job(1, submit_time=9000.0, name="other")])
    assert store.jobs()[1].name == "other"
    assert store.runs(1) == []
    store.record_runs([run(1, 0, start_time=9100.0)])
    assert [row.name for row in store.timeline()] == ["job1", "other"]
    assert [row.name for row in store.timeline(job_id=1)] == ["other"]
    assert [row.name for row in store.job_summaries()] == ["other"]


def test_an_old_record_does_not_move_the_newest_job(store: Store) -> None:
    store.record_jobs([job(1)])
    store.record_jobs([job(1, submit_time=9000.0, name="other")])
    store.record_jobs([job(1, state="FAILED")])
    assert store.jobs()[1].name == "other"


def test_runs_keep_what_a_later_record_does_not_know(store: Store) -> None:
    """Protects a run's start, and how far its reports were read, from a snapshot that knows less."""
    store.record_jobs([job(1)])
    full = run(1, 0, 2, 4, end_time=2500.0, node_list=("n1", "n2"), end_reason="TIMEOUT", launch_s=1.5)
    store.record_runs([full])
    report(store, 1, 0, offset=10, number=2)
    store.record_runs([run(1, 0, 0, 0, start_time=None, node_list=())])
    assert store.runs(1) == [replace(full, report_offset=10, report_number=2)]


def test_unknown_jobs_are_named(store: Store) -> None:
    store.record_jobs([job(1)])
    with pytest.raises(UnknownRecord, match="job 2"):
        store.record_runs([run(1), run(2)])
    assert store.runs(1) == []
    with pytest.raises(UnknownRecord, match="job 9"):
        report(store, 9, 0, hello=hello(), offset=1, number=1)


def test_clusters_do_not_mix(url: str, store: Store) -> None:
    store.record_jobs([job(1)])
    with Store.open(url, "old") as other:
        assert other.jobs() == {}
        other.record_jobs([job(1, name="elsewhere")])
        assert (store.jobs()[1].name, other.jobs()[1].name) == ("job1", "elsewhere")
    for wrong in ("grse", ""):
        with pytest.raises(StoreError, match=f"nothing of cluster '{wrong}'; it has gres, old"):
            Store.open(url, wrong, read_only=True)


def test_the_only_cluster_need_not_be_named(url: str, store: Store) -> None:
    store.record_jobs([job(1)])
    with Store.open(url, "", read_only=True) as reader:
        assert (list(reader.jobs()), reader.cluster) == ([1], "gres")
    with pytest.raises(StoreError, match="no cluster is named"):
        Store.open(url, "")


@pytest.mark.slow
def test_thousands_of_jobs_in_one_call(store: Store) -> None:
    """Protects from databases that limit the parameters of a statement, on reading as on writing."""
    many = [job(number) for number in range(1, 33_001)]
    store.record_jobs(many)
    assert len(store.jobs([record.job_id for record in many])) == len(many)


def test_a_deferral_is_kept_until_it_is_taken_back(store: Store) -> None:
    """Protects what a companion that starts must know: which waiting jobs it keeps from starting, snapshots or not."""
    store.record_jobs([job(1), job(2)])
    store.set_deferral(1, 5000.0)
    store.record_jobs([job(1, comment="new"), job(2)])
    assert store.deferrals() == {1: 5000.0}
    store.set_deferral(1, None)
    assert store.deferrals() == {}
    with pytest.raises(UnknownRecord, match="job 9"):
        store.set_deferral(9, 5000.0)


def test_a_deferral_does_not_pass_to_the_next_job_with_that_id(store: Store) -> None:
    store.record_jobs([job(1)])
    store.set_deferral(1, 5000.0)
    store.record_jobs([job(1, submit_time=4000.0)])
    assert store.deferrals() == {}


WHY = Reason("deadline_promised", (("gpus", 4),))


def test_the_newest_word_on_a_deadline_counts(store: Store) -> None:
    """Protects what a new companion goes on from: who was promised what, in place of what was said before."""
    store.record_jobs([job(1), job(2), job(3)])
    refused, given = PromiseRecord(1, 5000.0, 100.0, False), PromiseRecord(1, 5000.0, 200.0, True, WHY)
    store.record_promises([refused, PromiseRecord(2, 9000.0, 100.0, False)])
    store.record_promises([given])
    assert store.promises() == {1: given, 2: PromiseRecord(2, 9000.0, 100.0, False)}
    assert store.promises([1, 3]) == {1: given}


def test_an_ended_job_is_promised_nothing(store: Store) -> None:
    """But its own page still says what was; and a job that nobody knows is an error."""
    store.record_jobs([job(1)])
    given = PromiseRecord(1, 5000.0, 200.0, True, WHY)
    store.record_promises([given])
    store.record_jobs([job(1, state="COMPLETED", end_time=4000.0)])
    assert store.promises() == {}
    assert store.promises([1]) == {1: given}
    with pytest.raises(UnknownRecord):
        store.record_promises([PromiseRecord(7, 1.0, 1.0, True)])
