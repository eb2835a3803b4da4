"""What guests are worth: as long as they are expected to live, less what losing them costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.ones import Ones, OnesOptions
from slurm_ones.ones.sizes import Borrowed
from slurm_ones.policy.contract import Borrows, JobView
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Round, cluster, job, rounds

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
DDP = {"resize_s": 0.5, "shrink_s": 0.05, "prepare_s": 8.0}
"""From memory to memory."""
FSDP2 = {"resize_s": 60.0, "shrink_s": None, "prepare_s": 8.0}
"""A term from a checkpoint, and half a checkpoint interval besides unless there is time to write one."""
LOSSES = {"DDP": (DDP, 0.05), "FSDP2": (FSDP2, 360.0), "FSDP2, graceful": (FSDP2, 60.0)}


def training(kind: str, life_s: float, held: int, own: int = 4, each: int = 1) -> JobView:
    costs, loss_s = LOSSES[kind]
    nodes = {f"n{1 + i}": min(4, held - 4 * i) for i in range(-(-held // 4))}
    smaller = {gpus: {"n1": min(gpus, 4)} for gpus in range(own, held)}
    return job(
        1, nodes, to_come=1000.0, epochs=20, gpus=tuple(range(4, 9)), requested=own, joins=True, smaller=smaller,
        running_s=DAY, borrows=Borrows(own, each, 1.0 / life_s, loss_s), **costs,  # type: ignore[arg-type]
    )  # fmt: skip


def gets(view: JobView, **options: bool) -> int:
    schedule = Ones(OnesOptions(**options)).decide(cluster(2), [view], 2 * DAY, seeded())
    check(cluster(2), [view], schedule)
    return schedule.allocations[1].shape.gpus


@pytest.mark.parametrize(
    ("kind", "life_s", "each", "takes"),
    [
        ("DDP", 5 * MINUTE, 1, 8),
        ("DDP", 5 * MINUTE, 4, 8),
        ("DDP", 4.0, 1, 4),  # gone before it is ready
        ("FSDP2", 5 * MINUTE, 1, 4),
        ("FSDP2", 5 * MINUTE, 4, 4),
        ("FSDP2", HOUR, 4, 8),
        ("FSDP2", DAY, 1, 8),
        ("FSDP2, graceful", 5 * MINUTE, 1, 4),  # each of four costs a minute in five
        ("FSDP2, graceful", 5 * MINUTE, 4, 8),
    ],
)
def test_who_takes_guests(kind: str, life_s: float, each: int, takes: int) -> None:
    """A job with 4 GPUs of its own, on a cluster of 8: the more a loss costs, the longer a guest has to live."""
    assert gets(training(kind, life_s, 4, each=each)) == takes
    assert gets(training(kind, life_s, 4, each=each), borrowed=False) == 8


@pytest.mark.parametrize(("kind", "life_s", "keeps"), [("DDP", 4.0, 8), ("FSDP2", 5 * MINUTE, 4), ("FSDP2", DAY, 8)])
def test_who_gives_guests_up(kind: str, life_s: float, keeps: int) -> None:
    """What it has joined is ready; it goes again once waiting for its loss costs more than it brings."""
    assert gets(training(kind, life_s, 8)) == keeps


def test_what_is_its_own_costs_nothing() -> None:
    assert gets(training("FSDP2", MINUTE, 4, own=8)) == 8


@given(rounds(), st.integers(0, 99))
def test_who_borrows_nothing_is_decided_about_as_before(drawn: Round, seed: int) -> None:
    """To the last digit, whatever the rule would say of others."""
    view, jobs = drawn
    policy, without = Ones(), Ones(OnesOptions(borrowed=False))
    without.search.terms = tuple(term for term in without.search.terms if not isinstance(term, Borrowed))
    found, expected = (one.decide(view, jobs, 100.0, seeded(seed)) for one in (policy, without))
    assert (found.allocations, found.reasons, found.weighed, found.gains) == (
        expected.allocations,
        expected.reasons,
        expected.weighed,
        {},
    )
    assert repr(found.score) == repr(expected.score)


@given(rounds(), st.integers(0, 99), st.floats(0.0, 1e9), st.sampled_from([0, 1, 4]))
def test_any_loss_leaves_a_schedule(drawn: Round, seed: int, loss_s: float, each: int) -> None:
    view, jobs = drawn
    jobs = [replace(one, borrows=Borrows(one.requested, each, loss_s / 1e6, loss_s)) for one in jobs]
    check(view, jobs, Ones().decide(view, jobs, 100.0, seeded(seed)))


def test_what_a_gpu_brings_orders_the_release() -> None:
    """Of two that grow, each says what a GPU of it is worth."""
    views = [replace(training("DDP", DAY, 4), job_id=i, nodes={f"n{i}": 4}, smaller={}) for i in (1, 2)]
    views[1] = replace(views[1], progress=replace(views[1].progress, beta=100.0))
    found = Ones().decide(cluster(4), views, 2 * DAY, seeded())
    assert {i: got.shape.gpus for i, got in found.allocations.items()} == {1: 8, 2: 8}
    assert found.gains.keys() == {1, 2} and 0 < found.gains[1] != found.gains[2]
