"""Room for rigid jobs: who gives up what, and that every policy decides within what is left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.policies import POLICIES, make_policy
from slurm_ones.policy.build import fixed_jobs
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Limits, NodeView, Schedule
from slurm_ones.policy.shapes import shape_of
from slurm_ones.policy.tables import build_tables
from slurm_ones.rules.reclaim import Reclaimed, annotate, make_room
from slurm_ones.rules.rigid import PendingJob, Release, RigidDemand
from slurm_ones.rules.views import Bounds, decide_within
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import cluster, job, rounds

Free = Mapping[str, int]


def fit(free: Free, claims: Sequence[PendingJob]) -> bool:
    """Whether the claims find room side by side; an exhaustive search."""
    if not claims:
        return True
    first, rest = claims[0], claims[1:]
    roomy = [name for name, gpus in free.items() if gpus >= first.gpus_per_node]
    for names in combinations(roomy, first.nodes):
        left = {name: gpus - first.gpus_per_node * (name in names) for name, gpus in free.items()}
        if fit(left, rest):
            return True
    return False


def smaller(view: ClusterView, one: JobView, least: int) -> Iterator[tuple[int, dict[str, int]]]:
    """What a job could hold of its nodes with what it gives up, nothing at first."""
    now = sum(one.nodes.values())
    yield 0, dict(one.nodes)
    tables = build_tables(view, [one])
    for gpus, batch in zip(tables.sizes.tolist(), tables.batch[0].tolist(), strict=True):
        shape = shape_of(view, gpus)
        if batch > 0 and least <= gpus < now and gpus in one.limits.gpus and shape is not None:
            for names in combinations(one.nodes, shape.nodes):
                if all(one.nodes[name] >= shape.gpus_per_node for name in names):
                    yield now - gpus, dict.fromkeys(names, shape.gpus_per_node)


def cheapest(view: ClusterView, jobs: Sequence[JobView], demand: RigidDemand, claim: PendingJob) -> float:
    """Fewest GPUs that must be given up for the claim, in any way; infinite where none suffices."""
    stays = fixed_jobs(view, jobs)
    movable = [one for one in jobs if one.shape is not None and one.job_id not in stays]
    options = [list(smaller(view, one, floor_of(demand, one, claim))) for one in movable]
    best = math.inf
    for chosen in product(*options):
        free = dict(demand.free)
        for one, (_, kept) in zip(movable, chosen, strict=True):
            for name, gpus in one.nodes.items():
                if name in free:
                    free[name] += gpus - kept.get(name, 0)
        cost = sum(given for given, _ in chosen)
        if cost < best and fit(free, [claim]):
            best = cost
    return best


def floor_of(demand: RigidDemand, one: JobView, claim: PendingJob) -> int:
    return 1 if claim.rank < demand.ranks[one.job_id] else max(one.requested, 1)


@st.composite
def queues(draw: st.DrawFn, claims: int = 3) -> tuple[ClusterView, list[JobView], RigidDemand]:
    """A round in which rigid jobs wait: nothing is offered but what elastic jobs hold."""
    view, jobs = draw(rounds(max_jobs=5, uniform=True))
    held = {node.name: 0 for node in view.nodes}
    for one in jobs:
        for name, gpus in one.nodes.items():
            held[name] += gpus
    usable = [node.name for node in view.nodes if draw(st.integers(0, 9))]
    free = {node.name: node.gpus - held[node.name] for node in view.nodes if node.name in usable}
    shown = replace(view, nodes=tuple(NodeView(name, gpus) for name, gpus in held.items()))
    priorities = st.sampled_from([1, 1, 5, 9])
    found = []
    for number in range(draw(st.integers(1, claims))):
        gpus = view.gpus_per_node if view.whole_nodes else draw(st.integers(1, view.gpus_per_node))
        limit = draw(st.sampled_from([math.inf, 60.0, 3600.0]))
        rank = (-draw(priorities), 100 + number)
        found.append(PendingJob(100 + number, draw(st.integers(1, len(view.nodes))), gpus, rank, limit))
    ranks = {one.job_id: (-draw(priorities), one.job_id) for one in jobs}
    some = st.dictionaries(st.sampled_from([node.name for node in view.nodes]), st.just(1), max_size=2)
    releases = tuple(Release(draw(st.sampled_from([30.0, 600.0])), draw(some)) for _ in range(draw(st.integers(0, 2))))
    return shown, jobs, RigidDemand(sorted(found, key=lambda claim: claim.rank), free, ranks, releases)


@given(queues(claims=1))
def test_a_job_that_could_have_room_gets_it(drawn: tuple[ClusterView, list[JobView], RigidDemand]) -> None:
    """Whatever an exhaustive search finds is found, and otherwise nobody gives anything up."""
    view, jobs, demand = drawn
    (claim,) = demand.pending
    least = cheapest(view, jobs, demand, claim)
    made = make_room(view, jobs, demand)
    assert made.served == (claim.job_id,) or not math.isfinite(least)
    given_up = sum(a.shape.gpus - b.shape.gpus for a, b in zip(jobs, made.jobs, strict=True) if a.shape and b.shape)
    if not made.served:
        assert made.cluster is view and made.jobs is jobs
    elif not math.isfinite(least):
        # In place it could not be: somebody moves to where it was not.
        assert any(b.nodes.keys() - a.nodes.keys() for a, b in zip(jobs, made.jobs, strict=True))
    elif all(one.shape is None or one.shape.nodes == 1 for one in jobs):
        assert given_up == least
    else:
        # A job of several nodes may be cut node by node.
        assert least <= given_up


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(queues(), st.integers(0, 3))
def test_every_policy_decides_within_what_is_left(
    name: str, drawn: tuple[ClusterView, list[JobView], RigidDemand], seed: int
) -> None:
    """The rigid jobs that were promised room have it side by side once the schedule is carried out, whatever the policy
    does with the rest; nobody is below their minimum, nor below what they asked for but for one that comes first."""
    view, jobs, demand = drawn
    made = make_room(view, jobs, demand)
    assume(made.served)
    policy = make_policy(name)
    schedule = decide_within(policy, view, jobs, Bounds(demand), 0.0, seeded(seed))
    check(made.cluster, made.jobs, schedule)
    free = dict(demand.free)
    for node, left in zip(view.nodes, made.cluster.nodes, strict=True):
        if node.name in free:
            free[node.name] += node.gpus - left.gpus
    assert fit(free, [claim for claim in demand.pending if claim.job_id in made.served])
    first = demand.pending[0]
    for before, after in zip(jobs, made.jobs, strict=True):
        if after is before:
            continue
        got = schedule.allocations[before.job_id]
        assert got == Allocation(after.shape or Shape(0, 0), after.batch) and before.job_id not in schedule.parked
        assert before.shape and got.shape.gpus in before.limits.gpus and got.shape.gpus < before.shape.gpus
        assert got.shape.gpus >= floor_of(demand, before, first)
        assert schedule.reasons[before.job_id].code in ("makes_room", "makes_room_for_priority")
        assert not before.fixed


def waits(nodes: int, gpus: int, rank: tuple[int, int] = (-9, 50), limit_s: float = math.inf) -> PendingJob:
    return PendingJob(rank[1], nodes, gpus, rank, limit_s)


def sizes(jobs: Sequence[JobView], *claims: PendingJob, free: Free, **other: object) -> list[int]:
    """GPUs of each job once there is room; all of them have priority 1."""
    nodes = tuple(NodeView(name, sum(one.nodes.get(name, 0) for one in jobs)) for name in free)
    ranks = {one.job_id: (-1, one.job_id) for one in jobs}
    made = make_room(ClusterView(nodes, node_gpus=4), jobs, RigidDemand(claims, free, ranks, **other))  # type: ignore[arg-type]
    return [one.shape.gpus for one in made.jobs if one.shape]


def test_those_who_lose_least_make_room() -> None:
    """Two nodes, a job of 4 GPUs on each, of which one can only go down to one: 2 GPUs come from the other."""
    jobs = [job(1, {"n1": 4}, gpus=(1, 4)), job(2, {"n2": 4}, gpus=(1, 2, 4))]
    assert sizes(jobs, waits(1, 2), free={"n1": 0, "n2": 0}) == [4, 2]
    assert sizes(jobs, waits(1, 3), free={"n1": 0, "n2": 0}) == [1, 4]
    assert sizes(jobs, waits(2, 1), free={"n1": 0, "n2": 0}) == [1, 2]


def test_what_is_free_is_taken_first() -> None:
    """A job that has room already costs nobody anything, and the next one no more than it must."""
    jobs = [job(1, {"n1": 4})]
    assert sizes(jobs, waits(1, 4), free={"n1": 0, "n2": 4}) == [4]
    assert sizes(jobs, waits(1, 4), waits(1, 2, (-8, 51)), free={"n1": 0, "n2": 4}) == [2]


def test_several_nodes_are_given_up_whole() -> None:
    """A job of three nodes goes down to one, and to part of it where that is not enough."""
    jobs = [job(1, {"n1": 4, "n2": 4, "n3": 4}, gpus=(1, 2, 4, 8, 12))]
    none = {"n1": 0, "n2": 0, "n3": 0}
    assert sizes(jobs, waits(1, 4), free=none) == [8]
    assert sizes(jobs, waits(2, 4), free=none) == [4]
    assert sizes(jobs, waits(3, 2), free=none) == [2]
    assert sizes(jobs, waits(3, 4), free=none) == [12]


def test_jobs_move_together_for_one_that_needs_a_whole_node() -> None:
    """Neither of two jobs can leave its node to it in place; both on one of them can."""
    jobs = [job(1, {"n1": 4}), job(2, {"n2": 4})]
    none = {"n1": 0, "n2": 0}
    assert sizes(jobs, waits(1, 4), free=none) == [2, 2]
    assert sizes(jobs, waits(1, 4, (-1, 50)), free=none) == [4, 4]
    assert sizes(jobs, waits(2, 4), free=none) == [4, 4]
    assert sizes(jobs, waits(1, 4), free={**none, "n3": 2}) == [2, 4]


def test_a_job_of_lower_priority_gets_back_what_was_grown_into() -> None:
    """What the elastic job asked for is its own, unless the rigid one comes first in Slurm's order."""
    jobs = [job(1, {"n1": 4}, requested=2)]
    later = (-1, 50)
    assert sizes(jobs, waits(1, 2, later), free={"n1": 0}) == [2]
    assert sizes(jobs, waits(1, 3, later), free={"n1": 0}) == [4]
    assert sizes(jobs, waits(1, 3), free={"n1": 0}) == [1]
    # Of equal priority comes first who was submitted first.
    assert sizes(jobs, waits(1, 3, (-1, 0)), free={"n1": 0}) == [1]


def test_who_may_not_change_gives_nothing_up() -> None:
    """In its dwell time a job stays as it is; another one that may changes in its place."""
    jobs = [job(1, {"n1": 4}, fixed="its dwell time is not over"), job(2, {"n2": 4})]
    assert sizes(jobs, waits(1, 3), free={"n1": 0, "n2": 0}) == [4, 1]
    assert sizes(jobs[:1], waits(1, 3), free={"n1": 0}) == [4]


def test_nobody_shrinks_for_one_that_would_wait_all_the_same() -> None:
    """Too large with all that could be given up; those behind it get room only where they end before it can start."""
    jobs = [job(1, {"n1": 4})]
    free = {"n1": 0, "n2": 0}
    large, small = waits(2, 2), waits(1, 1, (-8, 51))
    ends = (Release(600.0, {"n2": 4}),)
    assert sizes(jobs, large, free=free) == [4]
    assert sizes(jobs, large, small, free=free, releases=ends) == [4]
    assert sizes(jobs, large, replace(small, limit_s=300.0), free=free, releases=ends) == [2]
    # Where nobody can say when it will start, nobody is held up by it.
    assert sizes(jobs, large, small, free=free) == [2]


def test_a_batch_that_fits_no_smaller_size_keeps_its_gpus() -> None:
    """Limits of a job's batch count as much as those of its GPUs."""
    large = job(1, {"n1": 4}, limits=Limits((1, 2, 4), 1024, 1024, 256))
    assert sizes([large], waits(1, 2), free={"n1": 0}) == [4]


def test_nobody_waits_nothing_changes() -> None:
    """Without rigid jobs a policy sees what it always saw."""
    view, jobs = cluster(2), [job(1, {"n1": 4})]
    made = make_room(view, jobs, RigidDemand(free={"n1": 0, "n2": 4}))
    assert made.cluster is view and made.jobs is jobs


def test_nobody_overtakes_one_that_waits_for_a_dwell_time() -> None:
    """Job 1 will make room for it as soon as it may; until then a smaller one gets none of job 2's GPUs for longer."""
    jobs = [job(1, {"n1": 4}, fixed="its dwell time is not over"), job(2, {"n2": 4})]
    large, small = waits(2, 3), waits(1, 1, (-8, 51))
    assert sizes(jobs, large, small, free={"n1": 0, "n2": 0}) == [4, 4]
    assert sizes(jobs, small, free={"n1": 0, "n2": 0}) == [4, 2]


@pytest.mark.parametrize(
    ("nodes", "kind"), [({"n1": 1}, "a100"), ({"n2": 2}, "v100"), ({"n1": 1, "n2": 1}, ""), ({"n3": 1}, "")]
)
def test_who_makes_room_stays_on_its_kind_of_gpu(nodes: dict[str, int], kind: str) -> None:
    """Protects an owner who takes one kind alone: the smaller shape does not start on another."""
    two = ClusterView((NodeView("n1", 4, kind="a100"), NodeView("n2", 4, kind="v100")), False, 4)
    held = sum(nodes.values())
    reclaimed = Reclaimed(
        two,
        [job(1, nodes, gpus=(1, 2, 4))],
        {1: reason("makes_room_for_priority", before=4, gpus=held, job=9, shape="1x2")},
    )
    schedule = annotate(Schedule({1: Allocation(Shape(1, 4), 32, kind="v100")}), reclaimed)
    assert (schedule.allocations[1].shape.gpus, schedule.allocations[1].kind) == (held, kind)
