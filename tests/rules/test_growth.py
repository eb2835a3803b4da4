"""What goes back to jobs that wait, by whom, and where nobody grows meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import JobRecord
from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import OptIn, parse_comment
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import Elastic, Observation, WholeJob
from slurm_ones.learn.learner import Learner
from slurm_ones.policies import make_policy
from slurm_ones.rules.blocks import Moves
from slurm_ones.rules.gate import LOOK_S, Growth, Round, UnderWay
from slurm_ones.rules.growth import MOST, with_growth
from slurm_ones.rules.plan import PartitionSchedule, plans
from slurm_ones.rules.views import bounds_of, cluster_view, decide_within, job_models, job_views
from slurm_ones.slurm.model import JobState, Node, Partition, Quota, Quotas, Reservation, SlurmJob, Snapshot
from slurm_ones.testing.policies import seeded
from tests.act.make import NOW, changed, elastic, history, with_guests
from tests.rules.test_blocks import job_of_blocks, task, told

NAMES = ("n1", "n2", "n3", "n4")
OVER: dict[str, dict[str, Any]] = {"gpu": {}, "other": {}, "whole": {"whole_nodes": True}, "limited": {"qos": "part"}}
OVER |= {"short": {"max_time_s": 60.0}, "down": {"up": False}}
"""Partitions over the same nodes."""


def block(number: int, gpus: int, node: str, **changes: Any) -> SlurmJob:
    """A block with a CPU for each GPU, or as many as `changes` say."""
    known = {"cpus": gpus, "start_time": NOW - 500 + number, "account": "a", "qos": "normal"}
    return task(number, Shape(1, gpus), node, **(known | changes))


def guests(**changes: Any) -> Elastic:
    """A job that asked for 1 GPU and has grown to all 16: a block of 1 and one of 3 on n1, one of 4 on each other."""
    cpus = {"cpus": 4} | changes
    return job_of_blocks(
        block(0, 1, "n1", **changes),
        block(1, 3, "n1", **(changes | {"cpus": changes.get("cpus", 3)})),
        *(block(number, 4, f"n{number}", **cpus) for number in (2, 3, 4)),
    )


def waits(job_id: int = 50, shape: Shape = Shape(1, 1), **changes: Any) -> SlurmJob:
    """A job that knows nothing of us."""
    known = {"reason": "Resources", "comment": "", "submit_time": 1.0, "time_limit_s": 600.0, "partitions": ("gpu",)}
    return replace(elastic(job_id, shape).job.first, **(known | changes))


def asked(shape: Shape = Shape(1, 1), job_id: int = 1) -> JobRecord:
    return JobRecord(job_id, "job", "alice", 1.0, shape)


def round_with(
    jobs: Sequence[Elastic],
    *waiting: SlurmJob,
    cpus: int = 4,
    memory_mb: int = 0,
    reservations: Sequence[Reservation] = (),
    licenses: Mapping[str, int] | None = None,
    unusable: Sequence[str] = (),
    under_way: Mapping[int, UnderWay] | None = None,
    shapes: Mapping[int, Shape] | None = None,
    settings: Mapping[str, Any] | None = None,
    idle: Mapping[int, float] | None = None,
    quotas: Quotas = Quotas(),
) -> Round:
    """Four nodes of 4 GPUs, the jobs that run on them, and those that wait."""
    parts = [part for one in jobs for part in one.job.blocks if part.running or part.completing]
    parts += [job for job in waiting if job.running]
    nodes = {}
    for name in NAMES:
        here = [part for part in parts if name in part.node_list]
        gpus, used = (sum(getattr(part, field) for part in here) for field in ("gpus_per_node", "memory_mb"))
        busy = sum(part.cpus // len(part.node_list) for part in here)
        state = Node(name, "", name not in unusable, 4, gpus, tuple(OVER), not here, cpus=cpus, cpus_used=busy)
        kind = "slow" if name in ("n1", "n2") else "fast"
        more = {"kind": kind, "features": frozenset({kind, "ib"})}
        nodes[name] = replace(state, memory_mb=memory_mb, memory_used_mb=used, **more)
    partitions = {
        name: Partition(
            name,
            **({"up": True, "node_names": NAMES, "max_time_s": 0.0, "max_nodes": 0, "whole_nodes": False} | changes),
        )
        for name, changes in OVER.items()
    }  # type: ignore[arg-type]
    by_id = {one.job.job_id: one for one in jobs}
    queue = {block.job_id: block for one in jobs for block in one.job.blocks} | {job.job_id: job for job in waiting}
    snapshot = Snapshot(NOW, queue, nodes, partitions, tuple(reservations), licenses or {})
    known = {id_: told(id_, job=asked((shapes or {}).get(id_, Shape(1, 1)), id_)) for id_ in by_id}
    held = {id_: frozenset(range(1, 8)) for id_ in by_id}
    checked = Settings.model_validate(settings or {})
    observation = Observation(snapshot, with_guests(by_id, checked), idle=idle or {})
    return with_growth(Round(observation, known, checked, under_way or {}, NOW, held=held, quotas=quotas))


def left(found: Round, job_id: int = 1) -> set[int]:
    one = found.seen.elastic[job_id]
    back = found.growth.back.get(job_id)
    return {job.array_tasks[0] for job in one.job.running_blocks} - {*back.tasks} if back is not None else set()


FOUR = Shape(1, 4)
LICENSED = {"licenses": (("matlab", 1),)}
ABOVE = Quotas((Quota("gres/gpu", 16, 16, account="lab"),), {"a": "lab", "b": "lab"})
BELOW = Quotas(
    (Quota("gres/gpu", 90, 16, account="lab"), Quota("gres/gpu", 0, 0, account="b")), {"a": "lab", "b": "lab"}
)
PART = {"quotas": Quotas((Quota("gres/gpu", 16, 16, qos="part"),)), "own": {"partitions": ("limited",)}}
ROWS: dict[str, tuple[SlurmJob, dict[str, Any], set[int]]] = {
    "a1, another partition": (waits(partitions=("other",)), {}, {4}),
    "a2, several partitions": (waits(partitions=("down", "other")), {}, {4}),
    "b, the same partition": (waits(), {}, {4}),
    "b2, three nodes": (waits(shape=Shape(3, 4)), {}, {2, 3, 4}),
    "b4, GPUs of a type": (waits(kind="slow"), {}, {2}),
    "b5, of one that no node has": (waits(kind="h100"), {}, set()),
    "b6, of several": (waits(kind="h100,slow"), {}, {4}),
    "b3, GPUs in all": (waits(shape=Shape(2, 0), gpus_total=6), {}, {3, 4}),
    "b8, nodes with features": (waits(features="ib&(slow|none)"), {}, {2}),
    "b9, none has both": (waits(features="slow&fast"), {}, set()),
    "b10, some of each": (waits(features="[slow*1&fast*1]"), {}, {4}),
    "b7, GPUs in all, more than a node's": (waits(shape=Shape(1, 0), gpus_total=8), {}, {3, 4}),
    "c1, CPUs of a node": (waits(shape=Shape(1, 0), cpus=4), {}, {4}),
    "c2, CPUs alone": (waits(shape=Shape(1, 0), cpus=2), {}, {4}),
    "d, a node by name": (waits(requested_nodes=("n3",)), {}, {3}),
    "d2, next to the first block": (waits(shape=Shape(1, 3), requested_nodes=("n1",)), {}, {1}),
    "d3, not on the others": (waits(excluded_nodes=("n3", "n4")), {}, {2}),
    "e, memory": (waits(shape=Shape(1, 0), memory_mb=3000), {"memory_mb": 4000}, {4}),
    "f, licences": (waits(reason="Licenses", **LICENSED), {}, {4}),
    "f2, one of them is free": (
        waits(reason="Licenses", licenses=(("matlab", 3),)),
        {"licenses": {"matlab": 1}},
        {3, 4},
    ),
    "f3, more than there are": (
        waits(reason="Licenses", licenses=(("matlab", 6),)),
        {"licenses": {"matlab": 1}},
        set(),
    ),
    "g0, the limit of its account": (waits(shape=Shape(1, 3), reason="AssocGrpGRES", account="a"), {}, {4}),
    "g1, more of it": (waits(shape=Shape(1, 5), reason="AssocGrpGRES", account="a"), {}, {3, 4}),
    "g2, CPUs of it": (waits(shape=Shape(1, 0), cpus=5, reason="AssocGrpCpuLimit", account="a"), {}, {3, 4}),
    "g3, another account": (waits(reason="AssocGrpGRES", account="b"), {}, set()),
    "g6, the number of its jobs": (waits(shape=FOUR, reason="AssocGrpJobsLimit", account="a"), {}, {4}),
    "h7, of its account's in its QOS": (waits(reason="MaxJobsPerAccount", account="a", qos="normal"), {}, {4}),
    "h, the limit of its QOS": (waits(reason="QOSGrpGRES", qos="normal"), {}, {4}),
    "h2, of another QOS": (waits(reason="QOSGrpGRES", qos="high"), {}, set()),
    "g4, of an account above": (waits(reason="AssocGrpGRES", account="b"), {"quotas": ABOVE}, {4}),
    "g5, of one of its own": (waits(reason="AssocGrpGRES", account="b"), {"quotas": BELOW}, set()),
    "h3, of the QOS of its partition": (waits(reason="QOSGrpGRES", qos="high", partitions=("limited",)), PART, {4}),
    "h4, of its account in its QOS": (waits(reason="MaxGRESPerAccount", account="a", qos="normal"), {}, {4}),
    "h5, of another account there": (waits(reason="MaxGRESPerAccount", account="b", qos="normal"), {}, set()),
    "h6, of its account in another": (waits(reason="MaxGRESPerAccount", account="a", qos="high"), {}, set()),
    "i2, a reservation": (
        waits(reason="Reservation", reservation="r"),
        {"reservations": [Reservation("r", ("n2",), 0.0, NOW + 99)], "unusable": ("n2",)},
        {2},
    ),
    "i3, one of several": (
        waits(reason="Reservation", reservation="q,r"),
        {"reservations": [Reservation("r", ("n2",), 0.0, NOW + 99)], "unusable": ("n2",)},
        {2},
    ),
    "j1, whole nodes": (waits(partitions=("whole",)), {}, {4}),
    "j2, three whole nodes": (waits(shape=Shape(3, 0), partitions=("whole",)), {}, {2, 3, 4}),
    "k, --exclusive": (waits(shape=Shape(1, 0), exclusive=True), {}, {4}),
    "l, the same user": (waits(user="alice"), {}, {4}),
    "n, more than all growth": (waits(shape=Shape(4, 4)), {}, set()),
    "one that does not wait for long": (waits(reason="None"), {}, {4}),
    "nodes that were down a moment ago": (waits(reason="Nodes required for job are DOWN, DRAINED or"), {}, {4}),
    "a node that may not be had": (waits(reason="ReqNodeNotAvail, May be reserved for other job"), {}, {4}),
}


@pytest.mark.parametrize("row", ROWS)
def test_who_is_served_by_what(row: str) -> None:
    """All GPUs are held, 1 of them asked for: the youngest blocks that help leave, and no others."""
    job, site, expected = ROWS[row]
    site = {**site}
    held = {"memory_mb": 3500, "cpus": 0} if "memory_mb" in site else LICENSED if job.licenses else {}
    found = round_with([guests(**held, **site.pop("own", {}))], job, **site)
    assert left(found) == expected
    for id_, back in found.growth.back.items():
        assert (id_, back.reason.code, dict(back.reason.arguments)["job"]) == (1, "growth_returns", 50)
        assert back.shape.gpus == 16 - sum((1, 3, 4, 4, 4)[number] for number in expected)


@pytest.mark.parametrize(
    "harmless",
    [
        {"held": True},
        {"reason": "Dependency"},
        {"reason": "BeginTime"},
        {"eligible_time": NOW + 60},
        {"reason": "JobHeldUser"},
        {"reason": "BadConstraints"},
        {"reason": "PartitionConfig"},
        {"reason": "PartitionTimeLimit"},
        {"reason": "QOSMaxGRESPerUser"},
        {"reason": "AssocMaxJobsLimit"},
        {"reason": "MaxGRESPerAccount"},
        {"reason": "JobArrayTaskLimit"},
        {"reason": "ReqNodeNotAvail, Reserved for maintenance"},
        {"requested_nodes": ("n9",)},
        {"partitions": ("gone",)},
        {"partitions": ("down",)},
        {"partitions": ("short",)},
        {"reservation": "none"},
        {"nodes": 5},
        {"gpus_per_node": 5},
        {"cpus": 5},
        {"comment": "ones: gpus=1-4"},
    ],
    ids=str,
)
def test_a_job_that_could_not_start_counts_for_nothing(harmless: dict[str, Any]) -> None:
    """Held, waiting for something else or for what nobody has, elastic itself: growth stays, and goes on."""
    job = waits(**harmless)
    others = [replace(elastic(50, Shape(1, 1)), job=WholeJob.of(job))] if job.comment else []
    found = round_with([guests(), *others], job)
    assert found.growth == Growth()


def test_an_elastic_job_that_is_refused_counts() -> None:
    """It waits for room like any other; one that is trained within another does not."""
    job = waits(comment="ones: gpus=1-4")
    refused = replace(elastic(50, Shape(1, 1)), job=WholeJob.of(job), refusal=reason("interactive"))
    assert left(round_with([guests(), refused], job)) == {4}
    fused = replace(refused, refusal=reason("fused", carrier=1, name="a"))
    assert round_with([guests(), fused], job).growth == Growth()


def test_a_block_that_waits_is_part_of_its_job() -> None:
    one = job_of_blocks(*guests().job.blocks, waiting := task(5, FOUR, held=False, reason="Resources"))
    assert round_with([one], waiting).growth == Growth()


def test_blocks_that_wait_count_if_their_job_is_refused() -> None:
    """Each like any other job, but for a guest: that was lent what it had."""
    base, guest = (task(n, Shape(1, 1), held=False, reason="Resources") for n in (5, 6))
    guest = replace(guest, qos="guest")
    lent = {"guests": {"gpu": {"qos": "guest"}}}
    for waiting, counts in (((guest,), False), ((guest, base), True)):
        one = replace(job_of_blocks(*guests().job.blocks, *waiting), refusal=reason("interactive"))
        assert bool(round_with([one], *waiting, settings=lent).growth.contested) == counts


PLAIN = [
    ("one GPU", waits(), Shape(1, 1)),
    ("two nodes", waits(shape=Shape(2, 4)), Shape(1, 1)),
    ("a node by name", waits(shape=Shape(1, 4), requested_nodes=("n1",)), Shape(1, 1)),
    ("more", waits(shape=Shape(4, 4)), None),
    ("CPUs", waits(shape=Shape(1, 0), cpus=3), Shape(1, 1)),
]


@pytest.mark.parametrize(("job", "shape"), [row[1:] for row in PLAIN], ids=[row[0] for row in PLAIN])
def test_a_plain_job_goes_back_to_what_was_asked_at_once(job: SlurmJob, shape: Shape | None) -> None:
    """One requeue; out of the way of a node that is asked for by name."""
    plain = replace(elastic(1, Shape(4, 4), *NAMES), gpus_per_node=4)
    plain = changed(plain, cpus=16)
    found = round_with([plain], job)
    back = found.growth.back.get(1)
    assert (back.shape if back is not None else None) == shape
    if back is not None and job.requested_nodes:
        assert "n1" not in back.nodes


@pytest.mark.parametrize(("cause", "goes"), [("AssocGrpJobsLimit", False), ("AssocGrpGRES", True)])
def test_a_plain_job_holds_no_more_jobs_for_its_growth(cause: str, goes: bool) -> None:
    """Whatever its size it is one job: it keeps its growth, and may go on growing."""
    plain = changed(replace(elastic(1, Shape(4, 4), *NAMES), gpus_per_node=4), cpus=16, account="a")
    found = round_with([plain], waits(reason=cause, account="a")).growth
    assert (1 in found.back, 1 in found.limited) == (goes, goes)


@pytest.mark.parametrize(
    ("front", "back"),
    [
        (waits(49, Shape(4, 4)), None),
        (waits(49, Shape(4, 4), priority=-1), Shape(1, 1)),
        (waits(49, Shape(1, 4), requested_nodes=("n1", "n2", "n3", "n4")), None),
        (waits(49, Shape(4, 4), requested_nodes=("n5",)), Shape(1, 1)),
        (waits(49, Shape(5, 4)), Shape(1, 1)),
        (waits(49, Shape(4, 4), partitions=("down",)), Shape(1, 1)),
    ],
)
def test_a_plain_job_keeps_its_growth_if_its_requeue_would_cost_its_base(front: SlurmJob, back: Shape | None) -> None:
    """All its GPUs are free for a moment, and Slurm would start a job that waits for the base."""
    plain = changed(replace(elastic(1, Shape(4, 4), *NAMES), gpus_per_node=4), cpus=16)
    found = round_with([plain], front, waits(50)).growth.back.get(1)
    assert (found.shape if found is not None else None) == back


@pytest.mark.parametrize(
    ("comment", "sizes"), [("gpus=1-16", (1, 2)), ("gpus=4-16", (2,)), ("gpus=1-16 size=8", (1, 2, 4, 8))]
)
def test_a_job_of_blocks_starts_at_no_more_than_was_asked_for(comment: str, sizes: tuple[int, ...]) -> None:
    """What it starts with is one block, which could never go back; but for what its owner asks for by hand."""
    first = task(0, Shape(1, 2), held=False, reason="Resources")
    one = replace(job_of_blocks(first, task(1, Shape(1, 2))), optin=parse_comment(f"ones: array=blocks {comment}"))
    found = round_with([one], shapes={1: Shape(1, 2)})
    rules = found.partition("gpu")
    (view,) = job_views(found, rules, cluster_view(found, rules), job_models(found, Learner(seed=0)))
    assert view.shape is None and view.limits.gpus == sizes


def test_what_was_asked_for_stays() -> None:
    """Of blocks the one that leads and the oldest, until they make up for what was asked."""
    for shape, expected in (
        (Shape(1, 1), {2, 3, 4}),
        (Shape(1, 4), {2, 3, 4}),
        (Shape(2, 4), {3, 4}),
        (Shape(4, 4), set()),
    ):
        found = round_with([guests()], waits(shape=Shape(2, 4)), waits(51), shapes={1: shape})
        assert left(found) == (expected if len(expected) != 2 else {3, 4}), shape


def test_those_in_front_are_served_first_and_share_nothing() -> None:
    """In Slurm's order: by priority, then by number; what one takes is not there for the next."""
    first, second = waits(51, FOUR, priority=9), waits(50, FOUR)
    found = round_with([guests()], second, first)
    assert left(found) == {3, 4} and "job 51" in str(found.growth.back[1].reason)
    assert left(round_with([guests()], waits(49, Shape(4, 4)), second)) == {4}, "one that fits behind one that does not"
    tasks = replace(waits(50, FOUR), array=True, array_id=50, array_tasks=tuple(range(9)))
    assert left(round_with([guests()], tasks)) == {2, 3, 4}, "each task counts"
    assert left(round_with([guests()], replace(tasks, throttle=1))) == {4}
    assert left(round_with([guests()], *(waits(50 + n, requested_nodes=("n4",)) for n in range(MOST)), second)) == {4}


def test_what_a_limit_has_left_over_is_for_the_next() -> None:
    """Two jobs of an account fit into what one block gives back; one of another account has nothing of it."""
    first, second = (waits(n, Shape(1, 2), reason="AssocGrpGRES", account="a") for n in (50, 51))
    other = waits(52, Shape(1, 1), reason="QOSGrpGRES", qos="normal")
    assert left(round_with([guests()], first, second)) == {4}
    assert left(round_with([guests()], first, other)) == {3, 4}


def test_the_youngest_goes() -> None:
    """Of several jobs too; of the blocks that help no more than are needed."""
    old = job_of_blocks(block(0, 1, "n1"), block(1, 3, "n1"), block(2, 4, "n2"))
    young = job_of_blocks(block(0, 1, "n3", array=2), block(1, 3, "n3", array=2, start_time=NOW - 9), array=2)
    found = round_with([old, young], waits(), unusable=("n4",))
    assert (left(found), left(found, 2)) == (set(), {1})
    assert left(round_with([old, young], waits(shape=FOUR), unusable=("n4",))) == {2}


def test_sizes_that_the_owner_allows() -> None:
    """More goes back if what remains is no size of the job's; nothing if no size is."""
    one = replace(guests(), optin=OptIn((1, 16), None, None, step=15, blocks=True))
    assert left(round_with([one], waits())) == {1, 2, 3, 4}
    none = replace(guests(), optin=OptIn((16, 16), None, None, blocks=True))
    assert round_with([none], waits()).growth.back == {}


def test_who_may_not_change_keeps_what_it_has() -> None:
    """A resize under way, a hold, too many resizes; a dwell time and near ends do not protect growth."""
    busy = {1: UnderWay(Shape(4, 4))}
    assert round_with([guests()], waits(), under_way=busy).growth.back == {}
    assert round_with([guests()], waits(), settings={"resize": {"shrink": False}}).growth.back == {}
    plain = elastic(1, Shape(1, 4), "n1", start_time=NOW - 1)
    others = [elastic(n, Shape(1, 4), f"n{n}", start_time=NOW - 1) for n in (2, 3, 4)]
    shapes = dict.fromkeys((2, 3, 4), FOUR)
    found = round_with([plain, *others], waits(), cpus=0, shapes=shapes, settings={"resize": {"dwell_s": 600}})
    assert found.growth.back.keys() == {1} and found.partition("gpu").jobs[1].fixed is None
    assert found.partition("gpu").jobs[2].fixed is not None
    often = {"limits": {"resizes_per_job": 0}}
    assert round_with([plain, *others], waits(), cpus=0, shapes=shapes, settings=often).growth.back == {}


def test_what_is_being_given_back_is_not_asked_for_twice() -> None:
    """A job under way counts as having given back already."""
    young = job_of_blocks(block(0, 1, "n3", array=2), block(1, 3, "n3", array=2), array=2)
    old = job_of_blocks(block(0, 1, "n1"), block(1, 3, "n1"), block(2, 4, "n2"))
    for leaves, expected in ((2, set()), (1, {1})):
        moves = {1: UnderWay(Shape(1, 4), moves=Moves((), (leaves,)))}
        found = round_with([old, young], waits(excluded_nodes=("n1", "n4")), under_way=moves)
        assert (left(found), left(found, 2)) == (set(), expected)
    plain = elastic(1, Shape(2, 4), "n1", "n2")
    for target, expected in ((Shape(1, 4), set()), (Shape(3, 4), {1})):
        found = round_with([plain, young], waits(excluded_nodes=("n4",)), under_way={1: UnderWay(target)})
        assert left(found, 2) == expected


@pytest.mark.parametrize(
    ("queue", "guest"), [({"qos": "guest"}, {"qos": "guest"}), ({"partition": "other"}, {"partitions": ("other",)})]
)
def test_guests_are_slurms_to_take(queue: dict[str, str], guest: dict[str, Any]) -> None:
    """They count as free and grow, but for a limit that they share and for one that Slurm does not serve."""
    blocks = guests().job.blocks
    one = job_of_blocks(*blocks[:3], *(replace(block, **guest) for block in blocks[3:]))
    site = {"settings": {"guests": {"gpu": queue}}}
    new = {"submit_time": NOW - 5}
    found = round_with([one], waits(shape=Shape(2, 4), **new), **site)
    assert (
        found.growth.back == {} and found.growth.contested.keys() == {*NAMES} and not found.partition("gpu").contested
    )
    assert found.partition("gpu").caps == ()
    assert left(round_with([one], waits(shape=Shape(3, 4), **new), **site)) == {2}, "the others are Slurm's"
    late = round_with([one], waits(shape=Shape(2, 4), submit_time=NOW - 90), **site)
    assert left(late) == {3, 4} and late.partition("gpu").contested == {*NAMES}
    # All that guests hold is not enough for these: on n1 is a base block.
    for hopeless in ({"shape": Shape(4, 4)}, {"shape": FOUR, "requested_nodes": ("n1",)}):
        vain = round_with([one], waits(submit_time=NOW - 90, **hopeless), **site)
        assert vain.growth.back == {} and vain.growth.contested.keys() == {*NAMES}
        assert vain.partition("gpu").contested == frozenset() and vain.partition("gpu").caps == ()
    assert left(round_with([one], waits(reason="AssocGrpGRES", account="a", **new), **site)) == {4}


LIMITED = {"reason": "AssocGrpGRES", "account": "a"}


@pytest.mark.parametrize("limit", [{}, LIMITED], ids=["room", "limit"])
@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.PREEMPTED])
@pytest.mark.parametrize(("ended_s", "also"), [(5.0, set()), (LOOK_S + 1, {3})])
def test_a_block_that_ends_is_enough(limit: dict[str, Any], state: JobState, ended_s: float, also: set[int]) -> None:
    """It left, or Slurm preempted it, and what it holds is free soon: no other one goes, unless it hangs."""
    *rest, last = guests().job.blocks
    ending = replace(last, state=state, flags=frozenset({"COMPLETING"}), end_time=NOW - ended_s)
    assert left(round_with([job_of_blocks(*rest, ending)], waits(shape=FOUR, **limit))) == also


@pytest.mark.parametrize("limit", [{}, LIMITED], ids=["room", "limit"])
def test_blocks_that_are_leaving_are_enough(limit: dict[str, Any]) -> None:
    """Of another job, by a resize under way."""
    other = job_of_blocks(*(replace(block(n, 2, "n4"), array_id=2, job_id=200 + n) for n in (0, 1)), array=2)
    jobs, one = [job_of_blocks(*guests().job.blocks[:4]), other], waits(shape=Shape(1, 2), **limit)
    assert left(round_with(jobs, one)) == {3} and left(round_with(jobs, one), 2) == set()
    leaving = {2: UnderWay(Shape(1, 2), moves=Moves((), (1,)))}
    assert round_with(jobs, one, under_way=leaving).growth.back == {}


def test_where_nobody_grows_and_who() -> None:
    """On nodes on which one that waits could start; those of an account whose limit is used up, wherever they are."""
    found = round_with([guests()], waits(requested_nodes=("n3",), shape=FOUR), waits(51, requested_nodes=("n2",)))
    assert found.growth.contested == dict.fromkeys(NAMES, 50)
    pinned = waits(requested_nodes=("n3",))
    quiet = job_of_blocks(block(0, 1, "n1"), block(1, 1, "n1"), array=1)
    found = round_with([quiet], replace(pinned, excluded_nodes=("n1",)))
    rules = found.partition("gpu")
    assert rules.contested == {"n2", "n3", "n4"} and rules.caps == ()
    assert {node.name: node.gpus for node in cluster_view(found, rules).nodes} == {"n1": 4, "n2": 0, "n3": 0, "n4": 0}
    (cap,) = round_with([quiet], waits()).partition("gpu").caps
    assert (cap.gpus, cap.jobs, cap.reason.code) == (0, {1}, "growth_stops")
    limited = round_with([quiet], waits(reason="AssocGrpGRES", account="a", shape=FOUR))
    rules = limited.partition("gpu")
    assert (
        limited.growth.limited == {1: 50}
        and rules.contested == frozenset()
        and [cap.jobs for cap in rules.caps] == [{1}]
    )
    assert cluster_view(limited, rules).gpus == 15


@pytest.mark.parametrize("policy", ["ones", "ees", "fifo"])
def test_policies_decide_without_it_and_plans_give_it_back(policy: str) -> None:
    """Whatever the policy: the blocks that were chosen leave, and nobody takes their place."""
    made = make_policy(policy)
    found = round_with([guests()], waits(requested_nodes=("n3",)))

    def decide(round_: Round, rules: Any) -> PartitionSchedule:
        cluster = cluster_view(round_, rules)
        assert cluster.gpus == 12
        jobs = job_views(round_, rules, cluster, job_models(round_, Learner(seed=0)))
        schedule = decide_within(made, cluster, jobs, *bounds_of(round_, rules, cluster, jobs), NOW, seeded())
        assert schedule.reasons[1].code == "growth_returns" and schedule.allocations[1].shape == Shape(3, 4)
        return PartitionSchedule(rules.name, schedule, 0.0)

    (one,) = plans(found, decide)
    (change,) = one.plan.begin
    assert change.moves is not None and (change.moves.added, change.moves.dropped) == ((), (3,))


SIZES = st.sampled_from([1, 2, 4])


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Elastic], list[SlurmJob], dict[int, Shape]]:
    """Jobs of blocks on the nodes, some of them grown, and jobs that wait."""
    free, jobs, shapes = dict.fromkeys(NAMES, 4), [], {}
    for number in range(1, draw(st.integers(1, 3)) + 1):
        blocks = []
        for at in range(draw(st.integers(1, 4))):
            gpus, name = draw(SIZES), draw(st.sampled_from(NAMES))
            if gpus <= free[name]:
                free[name] -= gpus
                start = NOW - draw(st.integers(1, 99))
                blocks.append(block(at, gpus, name, array=number, start_time=float(start)))
        if blocks:
            jobs.append(job_of_blocks(*blocks, array=number))
            shapes[number] = Shape(1, draw(st.integers(1, 4)))
    waiting = []
    for number in range(draw(st.integers(1, 4))):
        shape = Shape(draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 4])))
        named = draw(st.sampled_from([(), (), ("n1",), ("n3",)]))
        where = draw(st.sampled_from(["gpu", "other", "whole"]))
        more = {"requested_nodes": named, "partitions": (where,), "cpus": shape.nodes * draw(st.integers(0, 4))}
        waiting.append(waits(50 + number, shape, priority=draw(st.integers(1, 3)), **more))
    return jobs, waiting, shapes


def without(one: Elastic, gone: set[int]) -> Elastic:
    return job_of_blocks(*(b for b in one.job.blocks if b.array_tasks[0] not in gone), array=one.job.job_id)


@given(rounds())
def test_nobody_waits_for_growth_that_would_serve_it(
    drawn: tuple[list[Elastic], list[SlurmJob], dict[int, Shape]],
) -> None:
    """Growth goes back and Slurm starts whom it can, in turns: in the end nobody waits who would have room if all
    growth went, and what was asked for is still held."""
    jobs, queue, shapes = drawn
    before = {one.job.job_id: one.shape.gpus for one in jobs}
    for _ in range(20):
        found = round_with(jobs, *queue, shapes=shapes)
        jobs = [without(one, left(found, one.job.job_id)) for one in jobs]
        started = start_first(jobs, queue, shapes)
        if not found.growth.back and started == queue:
            break
        queue = started
    else:
        raise AssertionError("it goes on for ever")
    for one in jobs:
        id_ = one.job.job_id
        assert one.shape.gpus == before[id_] or one.shape.gpus >= shapes[id_].gpus
    base = [without(one, growth_of(one, shapes[one.job.job_id].gpus)) for one in jobs]
    assert start_first(base, queue, shapes) == queue


def start_first(jobs: Sequence[Elastic], queue: Sequence[SlurmJob], shapes: Mapping[int, Shape]) -> list[SlurmJob]:
    """The queue once Slurm has started the first of it that has room; the same if none has."""
    for job in sorted(queue, key=lambda job: (-job.priority, job.job_id)):
        room = fits(round_with(jobs, *queue, shapes=shapes), job) if job.pending else None
        if room:
            runs = replace(job, state=JobState.RUNNING, node_list=room, nodes=len(room))
            if job.partitions == ("whole",):
                runs = replace(runs, gpus_per_node=4, cpus=4 * len(room))
            return [runs if other is job else other for other in queue]
    return list(queue)


def growth_of(one: Elastic, asked: int) -> set[int]:
    """Its blocks beyond those that make up for what was asked, the leader and then the oldest first."""
    total, growth = 0, set()
    for part in sorted(one.job.running_blocks, key=lambda b: (b.array_tasks[0] != 0, b.start_time, b.array_tasks[0])):
        if total >= asked:
            growth.add(part.array_tasks[0])
        total += part.gpus_per_node
    return growth


def fits(found: Round, job: SlurmJob) -> tuple[str, ...]:
    """The nodes on which Slurm could start it now; none if it could not."""
    nodes = [found.seen.snapshot.nodes[name] for name in NAMES]
    room = {node.name for node in nodes if node.gpus - node.gpus_used >= job.gpus_per_node}
    room &= {node.name for node in nodes if node.idle or job.partitions != ("whole",)}
    room &= {node.name for node in nodes if node.cpus - node.cpus_used >= job.cpus // job.nodes}
    chosen = sorted(room, key=lambda name: (name not in job.requested_nodes, name))[: job.nodes]
    return tuple(chosen) if len(chosen) == job.nodes and {*chosen} >= {*job.requested_nodes} else ()


def test_a_job_that_lost_guests_keeps_what_it_has() -> None:
    """For a time it does not grow into what Slurm has just taken; another does."""
    jobs = [job_of_blocks(block(0, 1, "n1"), array=1), job_of_blocks(block(0, 1, "n2", job_id=30), array=2)]
    lost = history(1, preempted=(NOW - 10.0,))
    found = replace(round_with(jobs), histories={1: lost, 2: history(2)})
    (cap,) = found.partition("gpu").caps
    assert (cap.gpus, cap.jobs, cap.reason) == (0, {1}, reason("growth_rests", until=NOW + 50.0))
    assert not replace(found, now=NOW + 51.0).partition("gpu").caps


GUEST = {"guests": {"gpu": {"qos": "guest"}}}


@pytest.mark.parametrize(
    "settings", [{}, GUEST, {"resize": {"shrink": False}}], ids=["blocks", "guests", "no shrinking"]
)
def test_an_idle_job_gives_back_all_that_it_grew_by(settings: dict[str, Any]) -> None:
    """Nobody need wait for it, guests go as well, and it does not grow; of what was asked for nothing goes."""
    found = round_with([guests(qos="guest" if settings == GUEST else "normal")], settings=settings, idle={1: 0.04})
    (cap,) = found.partition("gpu").caps
    assert (cap.gpus, cap.jobs, cap.reason.code) == (0, {1}, "idle_stays")
    if "resize" in settings:
        assert found.growth == Growth()
        return
    assert left(found) == {1, 2, 3, 4}
    why = found.growth.back[1].reason
    assert (why.code, found.growth.back[1].shape) == ("idle_returns", Shape(1, 1))
    assert "were in use for 4 % of 30 minutes" in str(why) and "from 16 to 1 GPU" in str(why)
    assert round_with([guests()], shapes={1: Shape(4, 4)}, idle={1: 0.0}).growth.back == {}


def test_an_idle_plain_job_goes_back_by_one_requeue() -> None:
    plain = changed(replace(elastic(1, Shape(4, 4), *NAMES), gpus_per_node=4), cpus=16)
    assert round_with([plain], idle={1: 0.0}).growth.back[1].shape == Shape(1, 1)


def test_what_an_idle_job_holds_serves_first() -> None:
    """A job that waits gets it; another's growth stays, though it is younger."""
    idle = job_of_blocks(block(0, 1, "n1"), block(1, 3, "n1"), array=1)
    young = job_of_blocks(
        block(0, 4, "n2", job_id=20), block(5, 4, "n3", job_id=21), block(6, 4, "n4", job_id=22), array=2
    )
    found = round_with([idle, young], waits(shape=Shape(1, 3)), shapes={2: Shape(1, 4)}, idle={1: 0.0})
    assert (left(found, 1), left(found, 2)) == ({1}, set())
    assert left(round_with([idle, young], waits(shape=Shape(1, 3)), shapes={2: Shape(1, 4)}), 2) == {6}
