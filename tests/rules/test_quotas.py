"""Quotas of Slurm's: nothing grows into one, whoever uses it up, and what is used follows the jobs that are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db.shape import Shape
from slurm_ones.jobs.elastic import Elastic, Observation, whole_job
from slurm_ones.rules.caps import CapUse
from slurm_ones.rules.gate import Round
from slurm_ones.rules.quotas import QuotaReading
from slurm_ones.slurm.model import Quota, Quotas
from tests.rules.make import round_of
from tests.rules.test_views import running, seen, waiting

TWO = Shape(1, 2)
MINE = {"account": "lab", "qos": "normal", "comment": "ones: gpus=1-16"}
LAB = Quota("gres/gpu", 6, 2, account="lab")
PARENTS = {"lab": "school", "school": "root"}
BLOCKS = {"comment": "ones: gpus=1-16 array=blocks"}


def round_under(*quotas: Quota, look: Observation | None = None, **settings: Any) -> Round:
    """Job 1 of alice in account lab holds 2 GPUs and 8 CPUs, and what else is seen."""
    look = look or seen(running(1, TWO, "n1", cpus=8, memory_mb=4000, **MINE), used={"n1": 2})
    return replace(round_of(look, **settings), quotas=Quotas(quotas, PARENTS))


def most(round_: Round, job_id: int = 1) -> int:
    rules = round_.partition("gpu")
    use = CapUse(rules.caps, {id_: job.gpus for id_, job in rules.jobs.items()})
    due = rules.jobs[job_id].requested
    return max(gpus for gpus in range(17) if use.hindering(job_id, gpus, due) is None)


ROWS: dict[str, tuple[Quota, int]] = {
    "GrpTRES of the account": (LAB, 6),
    "of an account above it": (LAB._replace(account="root"), 6),
    "of another account": (LAB._replace(account="theirs"), 16),
    "used up": (LAB._replace(used=6), 2),
    "beyond it, since an admin lowered it": (LAB._replace(used=9), 2),
    "of the user's association": (LAB._replace(user="alice"), 6),
    "of another user's": (LAB._replace(user="bob"), 16),
    "of the user's association for this partition": (LAB._replace(user="alice", partition="gpu"), 6),
    "for another partition": (LAB._replace(user="alice", partition="long"), 16),
    "GrpTRES of the QOS": (Quota("gres/gpu", 5, 2, qos="normal"), 5),
    "of another QOS": (Quota("gres/gpu", 5, 2, qos="guest"), 16),
    "MaxTRESPU": (Quota("gres/gpu", 3, 2, qos="normal", user="alice"), 3),
    "MaxTRESPA": (Quota("gres/gpu", 4, 2, qos="normal", account="lab"), 4),
    "MaxTRESPJ": (Quota("gres/gpu", 7, account="lab", user="alice", per_job=True), 7),
    "of CPUs, of which it takes 4 a GPU": (Quota("cpu", 30, 8, account="lab"), 7),
    "of memory, 2000 MB a GPU": (Quota("mem", 9000, 4000, account="lab"), 4),
    "of nodes, of 4 GPUs each": (Quota("node", 3, 1, account="lab"), 10),
    "of a type of GPU that it does not ask for": (LAB._replace(resource="gres/gpu:a100"), 16),
    "of licences, which do not grow": (Quota("license/matlab", 1, 1, account="lab"), 16),
}


@pytest.mark.parametrize("row", ROWS)
def test_how_far_a_job_grows(row: str) -> None:
    """From its 2 GPUs, in words that name whose limit it is."""
    quota, expected = ROWS[row]
    round_ = round_under(quota)
    assert most(round_) == expected
    for cap in round_.partition("gpu").caps:
        words = str(cap.reason)
        named = f"QOS {quota.qos}" if quota.qos else f"account {quota.account}"
        assert named in words and str(quota.most) in words, words


def test_what_a_job_asked_for_is_no_exception() -> None:
    """It holds less than it asked for, and would wait for the rest after a requeue."""
    round_ = round_under(LAB._replace(used=6))
    rules = round_.partition("gpu")
    assert rules.jobs[1].requested == 2
    use = CapUse(rules.caps, {1: 2})
    assert use.hindering(1, 4, due=4) is not None
    # What it gives up it may always.
    assert use.hindering(1, 1, due=4) is None and use.hindering(1, 2, due=4) is None


def test_jobs_share_a_quota() -> None:
    """Two that run, one that waits, and one in another partition that is about to grow."""
    look = seen(
        running(1, TWO, "n1", **MINE), running(2, TWO, "n2", **MINE), waiting(3, TWO, **MINE), used={"n1": 2, "n2": 2}
    )
    rules = round_under(LAB._replace(most=9, used=4), look=look).partition("gpu")
    use = CapUse(rules.caps, {1: 2, 2: 2, 3: 2})
    assert [use.hindering(1, gpus, 2) is None for gpus in (5, 6)] == [True, False]
    use.count(1, 4)
    assert [use.hindering(2, gpus, 2) is None for gpus in (3, 4)] == [True, False]


def with_guests(one: Elastic) -> Elastic:
    """Of blocks: one of 2 GPUs that runs, and one that waits."""
    own = replace(one.job.first, array_id=1, array_tasks=(0,), **BLOCKS)
    assert one.optin is not None
    return replace(one, job=whole_job(1, [own]), optin=replace(one.optin, blocks=True))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (LAB._replace(used=6), 2),
        (Quota("gres/gpu", 2, 2, qos="normal"), 16),
        (Quota("gres/gpu", 4, 1, qos="guest"), 5),
        (Quota("gres/gpu", 4, 1, qos="guest", user="alice"), 5),
    ],
)
def test_guests_grow_in_their_own_queue(quota: Quota, expected: int) -> None:
    """The QOS of the guests binds them, and no longer that of the job; the account stays unless they have one."""
    look = seen(running(1, TWO, "n1", **MINE), used={"n1": 2})
    look = replace(look, elastic={1: with_guests(look.elastic[1])})
    assert most(round_under(quota, look=look, guests={"gpu": {"qos": "guest"}})) == expected
    if quota.account:
        apart = {"gpu": {"qos": "guest", "account": "guests"}}
        assert most(round_under(quota, look=look, guests=apart)) == 16


def test_a_partition_bounds_the_nodes_of_a_job() -> None:
    """MaxNodes, of a job that is one to Slurm."""
    look = seen(running(1, TWO, "n1", **MINE), used={"n1": 2})
    part = replace(look.snapshot.partitions["gpu"], max_nodes=2)
    look = replace(look, snapshot=replace(look.snapshot, partitions={"gpu": part}))
    assert most(round_under(look=look)) == 8
    assert most(round_under(look=replace(look, elastic={1: with_guests(look.elastic[1])}))) == 16


def test_an_association_for_a_partition_replaces_the_users_other() -> None:
    """Slurm counts the job there alone; the limits of its account stay."""
    others = LAB._replace(user="alice", most=3)
    assert most(round_under(others, others._replace(most=5, partition="gpu"), LAB._replace(most=9))) == 5
    there = Quotas((others, others._replace(most=5, partition="gpu")), PARENTS)
    look = seen(running(1, TWO, "n1", **MINE), used={"n1": 2})
    reading = QuotaReading.of(there, replace(look, snapshot=replace(look.snapshot, jobs={})))
    assert [quota.used for quota in reading.now(look).all] == [2, 4]


def test_what_is_used_follows_the_jobs_that_are_seen() -> None:
    """Others' that a companion does not see stay as they were read."""
    before = seen(running(1, TWO, "n1", cpus=8, **MINE), used={"n1": 2})
    quotas = (
        LAB._replace(most=64, used=12),
        Quota("cpu", 64, 20, account="root"),
        Quota("gres/gpu", 8, 2, qos="normal", user="alice"),
        Quota("gres/gpu", 8, 0, qos="limits"),
    )
    reading = QuotaReading.of(Quotas(quotas, PARENTS), before)
    theirs = {"account": "lab", "qos": "other", "user": "bob", "comment": ""}
    after = seen(running(2, Shape(1, 4), "n2", cpus=4, **theirs), used={"n2": 4})
    part = replace(after.snapshot.partitions["gpu"], qos="limits")
    after = replace(after, snapshot=replace(after.snapshot, partitions={"gpu": part}))
    assert [quota.used for quota in reading.now(before).all] == [12, 20, 2, 0]
    assert [quota.used for quota in reading.now(after).all] == [14, 16, 0, 4]
    assert QuotaReading().now(after) == Quotas()
