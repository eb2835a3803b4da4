"""Jobs from Slurm's accounting, beside those that the companion knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db import AccountingJob, Imported, JobRecord, RunRecord, Store
from ones_db.shape import Shape
from tests.db.make import SPEC, epoch, hello, job, report, run
from tests.db.test_views import fill_blocks

DAY = 86_400.0


def past(job_id: int = 7, *starts: float, user: str = "bob", submit: float = 1000.0, **other: Any) -> AccountingJob:
    """A job with a run of 100 s from each of these starts on; each but the last was requeued."""
    starts = starts or (submit + 10.0,)
    words = [*["REQUEUED"] * (len(starts) - 1), "COMPLETED"]
    runs = tuple(
        RunRecord(job_id, n, Shape(2, 4), ("n1", "n2"), start, start + 100.0, end_reason=words[n])
        for n, start in enumerate(starts)
    )
    values: dict[str, Any] = {"state": "COMPLETED", "end_time": starts[-1] + 100.0, "exit_code": 0} | other
    record = JobRecord(job_id, "rigid", user, submit, Shape(2, 4), account="lab", restart=len(starts) - 1, **values)
    return AccountingJob(record, runs, 3600.0)


def test_a_job_is_stored_with_its_runs(store: Store) -> None:
    one = past(7, 1010.0, 2000.0)
    assert store.add_accounting([one]) == Imported(new=1)
    assert store.jobs()[7] == one.job
    assert tuple(store.runs(7)) == one.runs
    (found,) = store.past_jobs(0.0, 5000.0)
    assert (found.start_time, found.runs, found.run_s, found.gpus, found.gpu_s) == (1010.0, 2, 200.0, 8, 1600.0)


def test_a_job_of_blocks_counts_by_its_blocks(store: Store) -> None:
    """Protects a site's GPU-hours from the size that a job has at its end."""
    fill_blocks(store)
    (found,) = store.past_jobs(0.0, 9 * DAY)
    assert (found.gpus, found.gpu_s) == (5, pytest.approx(200 * 1 + 310 * 4))


def test_a_requeued_job_read_in_parts(store: Store) -> None:
    """Protects a job of which one import saw the last run alone, and a later one, further back, the others."""
    whole = past(7, 1010.0, 2000.0, 3000.0)
    late = past(7, 3000.0, submit=2900.0)
    assert store.add_accounting([late]) == Imported(new=1)
    assert store.add_accounting([whole]) == Imported(changed=1)
    assert [(r.restart, r.start_time) for r in store.runs(7)] == [(0, 1010.0), (1, 2000.0), (2, 3000.0)]
    assert store.jobs()[7].submit_time == 1000.0 and len(store.past_jobs(0.0, 1e9)) == 1
    assert store.add_accounting([late]) == store.add_accounting([whole]) == Imported(same=1)
    # The other way round, with a run that came after the first import.
    assert store.add_accounting([past(8, 1010.0)]) == Imported(new=1)
    again = past(8, 4000.0, submit=3900.0, state="FAILED", exit_code=1)
    assert store.add_accounting([again]) == Imported(changed=1)
    assert [(r.restart, r.start_time) for r in store.runs(8)] == [(0, 1010.0), (1, 4000.0)]
    assert (store.jobs()[8].state, store.jobs()[8].submit_time, store.jobs()[8].restart) == ("FAILED", 1000.0, 1)


def test_what_the_companion_knows_is_left_alone(store: Store) -> None:
    """Protects what the companion saw itself, of living jobs and of ended ones, from a coarser account."""
    store.record_jobs([job(7), job(8, state="COMPLETED", end_time=1500.0)])
    store.record_runs([run(7), run(8)])
    before = store.jobs(), store.runs(7), store.runs(8)
    assert store.add_accounting([past(7, submit=1007.0), past(8, submit=1010.0)]) == Imported(companion=2)
    assert (store.jobs(), store.runs(7), store.runs(8)) == before


def test_the_same_id_long_after(store: Store) -> None:
    """Protects two jobs with one id, of which the companion saw one."""
    store.record_jobs([job(7, state="COMPLETED", end_time=1500.0)])
    told_of = [past(7, submit=5 * DAY), past(7, submit=9 * DAY, user="carol"), past(7, submit=9 * DAY + 200)]
    assert store.add_accounting(told_of) == Imported(new=3)
    assert store.add_accounting(told_of) == Imported(same=3)
    assert len(store.past_jobs(0.0, 1e9)) == 4


def test_a_renamed_user(store: Store) -> None:
    """Protects from an import that fails for ever where a login changed in between."""
    store.add_accounting([past(7)])
    assert store.add_accounting([past(7, user="robert")]) == Imported(changed=1)
    assert store.jobs()[7].user == "robert"


def test_a_job_that_the_companion_sees_later(store: Store) -> None:
    """Protects a job that came back to life: it is the companion's from then on, with its first submission."""
    store.add_accounting([past(7)])
    store.record_jobs([job(7, restart=1, submit_time=1500.0, user="bob")])
    assert store.jobs()[7].submit_time == 1000.0 and store.live_jobs() == {7}
    assert store.add_accounting([past(7)]) == Imported(companion=1)


def test_neither_learning_nor_the_tables_see_them(store: Store) -> None:
    """Protects the companion's tick, its plots and `slurm-ones jobs` from a site's whole past."""
    store.add_accounting([past(n, submit=1000.0 + n) for n in range(100, 200)])
    store.record_jobs([job(7)])
    report(store, 7, 0, spec=SPEC, hello=hello(), epochs=[epoch(2, 0)], offset=1, number=2)
    assert store.live_jobs() == {7} and list(store.histories()) == [7] and store.finished_histories() == []
    assert [line.job_id for line in store.job_summaries()] == [7] == [row.job_id for row in store.timeline()]
    assert [line.job_id for line in store.job_summaries([100])] == [100]
    assert len(store.past_jobs(0.0, 1e9)) == 100


def test_odd_jobs(store: Store) -> None:
    """Protects from a job without a run, names that are no text, and large numbers."""
    odd = AccountingJob(replace(past(7).job, name="a\x1b[2J\ufffd|'--🧪", exit_code=2**53, state="CANCELLED"), ())
    assert store.add_accounting([odd]) == Imported(new=1)
    assert store.add_accounting([odd]) == Imported(same=1)
    (found,) = store.past_jobs(0.0, 1e9)
    assert (found.start_time, found.run_s, found.gpus) == (None, 0.0, 0)
