"""Decisions, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ones_db import DecisionJobRecord, Store, UnknownRecord
from ones_db.reasons import Reason, reason
from tests.db.make import ask, decision, job, resize, run, said


def test_decisions_of_a_job_and_of_all(store: Store) -> None:
    """Protects `why JOB`: the newest first, the reason of each job, and of that job alone."""
    store.record_jobs([job(1), job(2), job(3)])
    waits = DecisionJobRecord(2, None, None, said("no GPU is free"))
    ids = [store.add_decision(decision(100.0 * n, 1)) for n in (1, 2)]
    both = decision(300.0, 1)
    both = replace(both, jobs=(*both.jobs, waits), generations=40, mode="advise")
    ids.append(store.add_decision(both))
    assert [d.id for d in store.decisions(1)] == ids[::-1]
    assert [d.id for d in store.decisions(1, limit=1)] == ids[2:]
    assert store.decisions(2)[0] == replace(both, id=ids[2], jobs=(waits,))
    assert store.decisions(3) == []
    assert store.recent_decisions(2)[0] == replace(both, id=ids[2])
    assert [d.id for d in store.recent_decisions(2)] == [ids[2], ids[1]]


def test_the_newest_is_the_last_even_if_the_clock_was_set_back(store: Store) -> None:
    """Protects `why JOB` from hours in which an older decision, or resize, passes for the newest."""
    store.record_jobs([job(1)])
    ids = [store.add_decision(decision(time, 1)) for time in (9000.0, 5000.0)]
    assert [d.id for d in store.decisions(1)] == [d.id for d in store.recent_decisions()] == ids[::-1]
    first = store.begin_resize(resize(1, started=9000.0)).id
    store.end_resize(first, "abandoned", said("it was lost"), 9100.0)
    store.end_resize(store.begin_resize(resize(1, started=5000.0)).id, "done", said("it took effect"), 5100.0)
    assert [one.id for one in store.resizes(1)] == [first, first + 1]
    assert store.histories([1])[1].failures == 0


def test_a_decision_on_an_earlier_job_of_the_same_id(store: Store) -> None:
    """Protects users from each other: what was decided of a job is not shown of the next one with its id."""
    store.record_jobs([job(1), job(2)])
    store.add_decision(decision(100.0, 1, 2))
    store.record_jobs([job(1, submit_time=9000.0, user="bob")])
    assert [[one.job_id for one in d.jobs] for d in store.recent_decisions()] == [[2]]


def test_the_same_decision_again(store: Store) -> None:
    store.record_jobs([job(1)])
    assert store.add_decision(decision(1.0, 1)) == store.add_decision(decision(1.0, 1))
    assert store.add_decision(decision(1.0, 1, policy="fifo")) == 2


def test_scores_that_are_no_numbers(store: Store) -> None:
    """Protects from a policy without a score, whose NaN databases keep in different ways."""
    store.record_jobs([job(1)])
    store.add_decision(decision(1.0, 1, score=float("nan")))
    assert store.decisions(1)[0].score is None


def test_a_decision_on_an_unknown_job_is_not_stored(store: Store) -> None:
    store.record_jobs([job(1)])
    with pytest.raises(UnknownRecord, match="job 2"):
        store.add_decision(decision(1.0, 1, 2))
    assert store.recent_decisions() == []


CAPPED = reason("account_cap", account="lab", gpus=8, setting="limits.share")


def test_reasons_come_back_as_they_went_in(store: Store, url: str) -> None:
    """Protects causes from being uncountable: of every reason its code and its arguments, with their types."""
    store.record_jobs([job(1, elastic=False, refusal=CAPPED)])
    store.record_runs([run(1)])
    store.add_decision(replace(decision(1.0), jobs=(DecisionJobRecord(1, None, None, CAPPED, outcome=CAPPED),)))
    number = store.begin_resize(resize(1)).id
    store.step_resize(number, "draining", time=2501.0, detail=CAPPED)
    ended = store.end_resize(number, "done", CAPPED, 2502.0)
    decided = store.decisions(1)[0].jobs[0]
    steps = [step.detail for step in store.resize_steps(number)]
    found = [store.jobs()[1].refusal, decided.reason, decided.outcome, ended.outcome, *steps[1:]]
    assert found == [CAPPED] * 6 and not steps[0]
    (summary,) = store.job_summaries()
    assert (summary.refusal, summary.refusal_code) == (str(CAPPED), "account_cap")
    stored = '{"account": "lab", "gpus": 8, "setting": "limits.share"}'
    assert ask(url, "SELECT reason_code, reason_arguments, outcome_code FROM decisions_explained") == [
        ("account_cap", stored, "account_cap")
    ]
    assert ask(url, "SELECT outcome_code, outcome_arguments FROM resize_cost") == [("account_cap", stored)]


def test_arguments_that_json_or_a_database_has_not(store: Store) -> None:
    """Protects a decision from a job's name, or a number, that no database keeps."""
    store.record_jobs([job(1)])
    odd = Reason("odd", (("name", "\ud800\0é"), ("worth", float("inf"))))
    record = replace(decision(1.0), jobs=(DecisionJobRecord(1, None, None, odd),))
    store.add_decision(record)
    assert store.decisions(1)[0].jobs[0].reason.arguments == (("name", "\\ud800\\x00é"), ("worth", "inf"))
