"""What a job grows by as guests: in which pieces, what it may lose of it, and when Slurm's choice is waited for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from ones_db import GuestRun
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import parse_comment
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, whole_job
from slurm_ones.learn.learner import Learner
from slurm_ones.learn.workload import GuestLives
from slurm_ones.policy.contract import Allocation, JobView, Schedule
from slurm_ones.rules.blocks import guest_gpus
from slurm_ones.rules.gate import LOOK_S, Round
from slurm_ones.rules.plan import plan
from slurm_ones.rules.views import cluster_view, job_models, job_views
from slurm_ones.slurm.model import JobState, Partition
from tests.act.make import NOW, elastic, with_guests
from tests.rules.test_blocks import HOT, job_of_blocks, rules_for, task, told, waiting
from tests.rules.test_growth import asked

GUEST = {"gpu": {"qos": "guest"}}
EIGHT = {"n1": 3, "n2": 4}
"""Free beside a block of one GPU on n1."""


def small(tasks: int = 7, comment: str = "ones: gpus=1-8 array=blocks", *guests: tuple[int, int, str]) -> Elastic:
    """A job of one base GPU on n1, and of guests: task, GPUs and node."""
    blocks = [task(number, Shape(1, gpus), node, qos="guest") for number, gpus, node in guests]
    rest = [one for one in waiting(tasks) if one.array_tasks[0] not in {number for number, _, _ in guests}]
    one = job_of_blocks(task(0, Shape(1, 1), "n1"), *blocks, *rest)
    return replace(one, optin=parse_comment(comment))


def round_of(
    jobs: Collection[Elastic], free: dict[str, int], guests: Any = GUEST, *, requested: int = 1, **changes: Any
) -> Round:
    known = {one.job.job_id: told(one.job.job_id, job=asked(Shape(1, requested), one.job.job_id)) for one in jobs}
    round_, _ = rules_for(list(jobs), free, known)
    held = {one.job.job_id: frozenset(range(1, 20)) for one in jobs}
    settings = Settings.model_validate({"guests": guests})
    seen = replace(round_.seen, elastic=with_guests(round_.seen.elastic, settings))
    return replace(round_, seen=seen, held=held, settings=settings, **changes)


def grown(one: Elastic, gpus: int, free: dict[str, int], **other: Any) -> list[str] | None:
    """Shapes of the blocks that join; None if it does not grow."""
    round_ = round_of([one], free, **other)
    made = plan(Schedule({1: Allocation(Shape(1, gpus), 32)}), round_.partition("gpu"))
    moves = next((change.moves for change in made.begin), None)
    return [str(shape) for _, shape in moves.added] if moves else None


@pytest.mark.parametrize(
    ("one", "gpus", "other", "expected"),
    [
        # A spare task is left for a base block; so far guests of one GPU.
        (small(8), 8, {}, ["1x1"] * 7),
        (small(7), 8, {}, ["1x2"] * 3 + ["1x1"]),
        (small(7, "ones: gpus=1-4 array=blocks"), 4, {}, ["1x1"] * 3),
        (small(3), 8, {}, ["1x4", "1x3"]),
        (small(8), 8, {"guests": {"gpu": {"qos": "guest", "most": 4}}}, ["1x2"] * 3 + ["1x1"]),
        (small(8), 8, {"guests": {"gpu": {"qos": "guest", "most": 1}}}, ["1x4", "1x3"]),
        # What its user asked for comes in as few blocks as before.
        (small(8), 8, {"requested": 5}, ["1x4", "1x1", "1x1", "1x1"]),
        (small(8), 4, {"requested": 5}, ["1x2", "1x1"]),
        # Two blocks on one node would not see each other's GPUs.
        (small(8), 5, {"split_nodes": False, "free": {"n1": 0, "n2": 4}}, ["1x4"]),
        # Not if they are kept out, by its user or by the site.
        (small(8, "ones: gpus=1-8 array=blocks guests=off"), 8, {}, ["1x4", "1x2", "1x1"]),
        (small(8), 8, {"guests": {}}, ["1x4", "1x2", "1x1"]),
        (small(8), 8, {"guests": {"other": {"qos": "guest"}}}, ["1x4", "1x2", "1x1"]),
        # By its owner's steps.
        (small(8, "ones: gpus=1-7:3 array=blocks"), 7, {}, ["1x3", "1x3"]),
        # It has four guests of eight.
        (small(9, "ones: gpus=1-8 array=blocks", *((n, 1, "n2") for n in (1, 2, 3, 4))), 8,
         {"free": {"n1": 3, "n2": 0}}, ["1x1"] * 3),
    ],
)  # fmt: skip
def test_guests_are_small(one: Elastic, gpus: int, other: dict[str, Any], expected: list[str] | None) -> None:
    assert grown(one, gpus, other.pop("free", EIGHT), **other) == expected


@pytest.mark.parametrize(
    ("to_grow", "tasks", "node", "together", "expected"),
    [
        (7, 7, 4, 1, 1), (7, 6, 4, 1, 2), (15, 6, 4, 1, 4), (15, 0, 4, 1, 4), (15, 6, 8, 1, 4), (14, 20, 8, 2, 2),
        (9, 4, 6, 1, 3), (8, 8, 4, 3, 3), (8, 8, 4, 8, 4), (0, -1, 4, 1, 4), (1, 1, 0, 1, 1), (5, 5, 1, 1, 1),
    ],
)  # fmt: skip
def test_how_large_a_guest_is(to_grow: int, tasks: int, node: int, together: int, expected: int) -> None:
    """A part of a node that its tasks suffice for, all the way to its largest size; else a node."""
    assert guest_gpus(to_grow, tasks, node, together) == expected


HOT_S = 300.0
"""Life of a guest here."""
LIVES = GuestLives((GuestRun("gpu", NOW - 2 * HOT_S, NOW - HOT_S, True) for _ in range(2000)), NOW)


@pytest.mark.parametrize(
    ("hot", "changes", "loss_s"),
    [
        (True, {}, 0.05),
        (False, {}, 305.0),  # a term, and half of what is trained between two checkpoints
        (False, {"switch_s": 20.0}, 320.0),
        (False, {"grace_s": 60}, 5.0),
        (False, {"grace_s": 60, "switch_s": 20.0}, 20.0),
        (False, {"grace_s": 60, "switch_s": 90.0}, 390.0),  # a checkpoint that takes longer is not written
    ],
)
def test_what_a_job_may_lose(hot: bool, changes: dict[str, Any], loss_s: float) -> None:
    """Next to nothing from memory to memory; a term from a checkpoint else, and work to be done again."""
    one = small(8, "ones: gpus=1-8 array=blocks", (3, 1, "n1"))
    grace = {name: changes[name] for name in changes.keys() & {"grace_s"}}
    found = seen(one, {"gpu": {"qos": "guest", **grace}}, hot=hot, switch_s=changes.get("switch_s"))
    assert found.borrows is not None
    assert (found.borrows.own, found.borrows.each) == (1, 1)
    assert found.borrows.loss_s == pytest.approx(loss_s) and 1.0 / found.borrows.rate == pytest.approx(HOT_S, rel=0.1)


def seen(one: Elastic, guests: Any, *, hot: bool = True, partition: Any = None, **changes: Any) -> JobView:
    """The job as its policy sees it, where guests live for `HOT_S`."""
    round_ = round_of([one], {"n1": 4 - one.holdings["n1"], "n2": 4}, guests, lives=LIVES)
    known = {1: replace(round_.histories[1], spec=replace(HOT, hot=hot), **changes)}
    round_ = replace(round_, histories=known)
    if partition is not None:
        round_.seen.snapshot.partitions[partition.name] = partition  # type: ignore[index]
    rules = round_.partition("gpu")
    (found,) = job_views(round_, rules, cluster_view(round_, rules), job_models(round_, Learner(seed=0)))
    return found


def test_slurm_says_how_long_a_partition_waits_for_them() -> None:
    """Of a QOS the settings have to."""
    scavenge = Partition("scavenge", True, ("n1", "n2"), 0.0, 0, False, grace_s=60.0)
    found = seen(small(8), {"gpu": {"partition": "scavenge"}}, hot=False, partition=scavenge)
    assert found.borrows is not None and found.borrows.loss_s == 5.0


@pytest.mark.parametrize(
    ("comment", "guests"),
    [("ones: gpus=1-8 array=blocks guests=off", GUEST), ("ones: gpus=1-8 array=blocks", {})],
    ids=["guests=off", "no guests here"],
)
def test_a_job_without_guests_borrows_nothing(comment: str, guests: Any) -> None:
    assert seen(small(8, comment), guests).borrows is None


def test_base_blocks_beyond_what_was_asked_for_are_its_own() -> None:
    """They joined before the site had guests: Slurm does not take them."""
    one = job_of_blocks(task(0, Shape(1, 1), "n1"), task(1, Shape(1, 2), "n1"), *waiting(7)[1:])
    found = seen(replace(one, optin=parse_comment("ones: gpus=1-8 array=blocks")), GUEST)
    assert found.borrows is not None and found.borrows.own == 3


def test_what_is_worth_most_joins_first() -> None:
    """Slurm takes the youngest. Whoever gives up GPUs still comes before."""
    jobs = [
        replace(
            job_of_blocks(task(0, Shape(1, 1), f"n{i}", array=i), *waiting(3, array=i), array=i),
            optin=parse_comment("ones: gpus=1-8 array=blocks"),
        )
        for i in (1, 2, 3)
    ]
    rules = round_of(jobs, {"n1": 3, "n2": 3, "n3": 3}).partition("gpu")
    given = {i: Allocation(Shape(1, gpus), 32) for i, gpus in ((1, 2), (2, 3), (3, 2))}
    for gains, expected in (({}, [1, 3, 2]), ({1: 1.0, 2: 5.0, 3: 2.0}, [2, 3, 1])):
        assert [one.job_id for one in plan(Schedule(given, gains=gains), rules).begin] == expected


@pytest.mark.parametrize(
    ("shape", "waited_s", "guests", "left_alone"),
    [
        (Shape(1, 4), 5.0, GUEST, True),
        (Shape(1, 2), 5.0, GUEST, False),  # there is room
        (Shape(2, 4), 5.0, GUEST, False),  # more than guests hold
        (Shape(1, 4), LOOK_S + 1, GUEST, False),  # Slurm does not serve it
        (Shape(1, 4), 5.0, {}, False),
    ],
)
@pytest.mark.parametrize("preempted", [{}, {"state": JobState.PREEMPTED, "flags": frozenset({"COMPLETING"})}])
def test_slurm_takes_guests_for_a_base_that_waits(
    shape: Shape, waited_s: float, guests: Any, left_alone: bool, preempted: dict[str, Any]
) -> None:
    """Meanwhile it is not asked to wait for less: the guests would have left in vain, be it that they are leaving. On
    n1 one GPU is free beside the base block and two guests; on n2 two GPUs beside another guest."""
    holder = small(8, "ones: gpus=1-8 array=blocks", (1, 2, "n1"), (2, 2, "n2"))
    blocks = (replace(job, **preempted) if job.qos == "guest" else job for job in holder.job.blocks)
    holder = replace(holder, job=whole_job(1, tuple(blocks)))
    base = elastic(7, shape, submit_time=NOW - waited_s, eligible_time=0.0)
    rules = round_of([holder, base], {"n1": 1, "n2": 2}, guests).partition("gpu")
    fixed = rules.jobs[7].fixed
    assert (fixed is not None and fixed.code == "guests_leave") == left_alone


@pytest.mark.parametrize(
    ("gpus", "waits", "leave"),
    [
        (1, {}, (1, 2)),
        (1, {"state": JobState.PREEMPTED, "flags": frozenset({"COMPLETING"})}, (1, 2)),
        # No member waits: nobody else leaves, whoever holds the task.
        (1, {"held": True}, (1,)),
        (1, {"qos": ""}, (1,)),
        # All base blocks stay.
        (2, {}, None),
    ],
)
def test_no_waiting_guest_takes_the_place_of_a_base_block(
    gpus: int, waits: dict[str, Any], leave: tuple[int, ...] | None
) -> None:
    """Slurm preempted guest 2, and starts it again."""
    preempted: dict[str, Any] = {"held": False, "reason": "Resources", "restart": 1, "qos": "guest"}
    guest = task(2, Shape(1, 2), **(preempted | waits))
    blocks = task(0, Shape(1, 1), "n1"), task(1, Shape(1, 1), "n1"), guest, *waiting(5)[2:]
    one = replace(job_of_blocks(*blocks), optin=parse_comment("ones: gpus=1-8 array=blocks"))
    round_ = round_of([one], {"n1": 2}, requested=2)
    round_ = replace(round_, histories={1: told(1, 0, 1, 2, job=asked(Shape(1, 2), 1))})
    made = plan(Schedule({1: Allocation(Shape(1, gpus), 32)}), round_.partition("gpu"))
    assert next((change.moves.dropped for change in made.begin if change.moves), None) == leave


def test_nor_of_a_part_of_one() -> None:
    """A base block of two GPUs gives way to one of a single GPU, and Slurm starts guest 2 again."""
    guest = task(2, Shape(1, 2), held=False, reason="Priority", restart=1, qos="guest")
    one = replace(
        job_of_blocks(task(0, Shape(1, 2), "n1"), guest, *waiting(5)[2:]),
        optin=parse_comment("ones: gpus=1-8 array=blocks"),
    )
    round_ = replace(round_of([one], {"n1": 2}, requested=2), histories={1: told(1, 0, 2, job=asked(Shape(1, 2), 1))})
    (change,) = plan(Schedule({1: Allocation(Shape(1, 1), 32)}), round_.partition("gpu")).begin
    assert change.moves is not None
    assert (change.moves.gained, change.moves.dropped) == (1, (0, 2))


@pytest.mark.parametrize(("members", "blocks"), [((1,), (1, 2, 3)), ((1, 3), (1, 3))])
def test_a_batch_order_keeps_base_blocks_that_guests_need(members: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    """The last membership that was believed may name the guest only."""
    guest = task(1, Shape(1, 1), "n2", qos="guest")
    one = replace(job_of_blocks(guest, task(2, Shape(1, 1), "n1"), task(3, Shape(1, 1), "n1")), optin=small().optin)
    known = told(1, *members, job=asked(Shape(1, 1), 1))
    round_ = replace(round_of([one], {"n1": 2, "n2": 3}), histories={1: known})
    (change,) = plan(Schedule({1: Allocation(Shape(1, 3), 64)}), round_.partition("gpu")).begin
    assert not change.resizes and change.blocks == blocks
