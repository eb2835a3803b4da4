"""Tests that every policy must pass, and the rules that a schedule must keep.

from slurm_ones.testing import policy_contract

TestMine = policy_contract(MyPolicy)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ones_db.reasons import Reason
from ones_db.shape import Shape
from slurm_ones.policy.contract import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    Policy,
    Schedule,
)
from slurm_ones.policy.shapes import least_and_most
from slurm_ones.testing.rounds import Power, Round, cluster, job, rounds


def check(view: ClusterView, jobs: Sequence[JobView], schedule: Schedule) -> None:
    """Raise AssertionError if the schedule breaks a rule of `Policy` (`slurm_ones.policy.contract`)."""
    by_id = {j.job_id: j for j in jobs}
    assert schedule.allocations.keys() <= by_id.keys(), "a schedule names a job that does not exist"
    assert schedule.parked <= by_id.keys(), "a schedule parks a job that does not exist"
    assert not schedule.parked & schedule.allocations.keys(), "a job is both allocated and parked"
    assert schedule.reasons.keys() == by_id.keys(), "the reasons are not those of all jobs"
    for job_id, promise in schedule.promises.items():
        assert job_id in by_id and by_id[job_id].deadline is not None, "a promise needs a deadline"
        assert not by_id[job_id].promised, f"job {job_id}: a promise is given once, and not taken back"
        assert str(promise.reason), f"job {job_id}: a promise says why"
    for job_id, why in schedule.reasons.items():
        assert isinstance(why, Reason) and str(why), f"job {job_id} has the reason {why!r}"
    for j in jobs:
        got = schedule.allocations.get(j.job_id)
        if j.shape is not None:
            assert got is not None or j.job_id in schedule.parked, (
                f"running job {j.job_id} is neither allocated nor parked"
            )
        if j.fixed:
            assert schedule.reasons[j.job_id] == j.fixed, "the reason of a fixed job must be `JobView.fixed`"
            assert (got.shape, got.batch) == (j.shape, j.batch) if got and j.shape else got is None
            assert j.shape is None or j.job_id not in schedule.parked, f"fixed job {j.job_id} was parked"
        if got is None:
            continue
        if not unchanged(view, j, got) or got.batch != j.batch:
            least, most = least_and_most(j.limits, got.shape.gpus)
            assert least <= got.batch <= most, f"job {j.job_id} cannot take batch {got.batch}"
            assert got.batch % j.limits.quantum == 0 or j.limits.batch_fixed
            rule = j.limits.at(got.shape.gpus)
            assert rule.replicas <= got.batch <= rule.most, f"job {j.job_id}'s strategy cannot take batch {got.batch}"
            assert got.batch % rule.quantum == 0, f"job {j.job_id}: batch {got.batch} is no multiple of its quantum"
        if unchanged(view, j, got):
            continue
        assert not got.kind or j.accepts(got.kind), f"job {j.job_id} cannot use GPUs of kind {got.kind}"
        gpus, per_node = got.shape.gpus, (view.of_kind(got.kind) if got.kind else view).gpus_per_node
        assert gpus in j.limits.gpus, f"job {j.job_id} cannot take {gpus} GPUs"
        if j.limits.rules:
            assert gpus in {rule.gpus for rule in j.limits.rules}, f"job {j.job_id}'s strategy cannot take {gpus} GPUs"
            together = j.limits.at(gpus).together
            assert got.shape.nodes == 1 or got.shape.gpus_per_node % together == 0, "a group of ranks is split"
        assert got.shape.nodes == 1 or got.shape.gpus_per_node == per_node, "several nodes must be whole nodes"
        assert got.shape.gpus_per_node <= per_node or not view.uniform, "no node has that many GPUs"
        assert got.shape.gpus_per_node == per_node or not view.whole_nodes, "this cluster allocates whole nodes only"
    assert placeable(view, jobs, schedule), f"not placeable: {schedule.allocations}"


def unchanged(view: ClusterView, j: JobView, got: Allocation) -> bool:
    """Return True if the job keeps its shape, or its number of GPUs on a cluster that allows uneven shapes."""
    if got.kind and j.shape is not None and view.kinds_held(j) != (got.kind,):
        return False
    if view.uniform or j.shape is None:
        return got.shape == j.shape
    return got.shape.gpus == j.shape.gpus


def placeable(view: ClusterView, jobs: Sequence[JobView], schedule: Schedule) -> bool:
    """Return True if the schedule fits on the nodes: jobs of unchanged shape stay in place, and some placement of all
    other jobs works."""
    free = {node.name: node.gpus for node in view.nodes}
    moving: list[Shape] = []
    of_kind: dict[str, list[Shape]] = {}
    for j in jobs:
        got = schedule.allocations.get(j.job_id)
        if got is not None and unchanged(view, j, got):
            for name, gpus in j.nodes.items():
                free[name] = free.get(name, gpus) - gpus
        elif got is not None and got.kind:
            of_kind.setdefault(got.kind, []).append(got.shape)
        elif got is not None:
            moving.append(got.shape)
    assert min(free.values(), default=0) >= 0
    assert not (moving and of_kind), "either all changed allocations name a kind of GPU, or none"
    if not of_kind:
        return _have_room(view, free, moving)
    each = {kind: {node.name: free[node.name] for node in view.of_kind(kind).nodes} for kind in of_kind}
    return all(_have_room(view, each[kind], shapes) for kind, shapes in of_kind.items())


def _have_room(view: ClusterView, free: Mapping[str, int], moving: Sequence[Shape]) -> bool:
    if not view.uniform:
        return sum(shape.gpus for shape in moving) <= sum(free.values())
    parts = sorted((s.gpus_per_node for s in moving if s.nodes == 1), reverse=True)
    whole = [s for s in moving if s.nodes > 1]
    room = sorted(free.values())
    for shape in whole:  # whole nodes are all alike
        for _ in range(shape.nodes):
            if shape.gpus_per_node not in room:
                return False
            room.remove(shape.gpus_per_node)
    return _fits(tuple(sorted(room)), tuple(parts))


def _fits(room: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    if not parts:
        return True
    if sum(parts) > sum(room):
        return False
    for gpus in sorted({g for g in room if g >= parts[0]}):
        left = list(room)
        left.remove(gpus)
        if _fits(tuple(sorted([*left, gpus - parts[0]])), parts[1:]):
            return True
    return False


def seeded(seed: int = 0) -> np.random.Generator:
    """Return a random generator from a seed."""
    return np.random.default_rng(seed)


ABSURD = (0.0, -1.0, math.nan, math.inf, 1e300, 1e-300)
"""Absurd numbers that a job may report."""


def policy_contract(make: Callable[[], Policy], *, starts_what_fits: bool = True) -> type:
    """Return a pytest class with the tests of every policy. `make` returns a new policy.

    The profile of hypothesis sets the number of random examples. Set `starts_what_fits=False` for a policy that may let
    jobs wait although GPUs are free.
    """
    unhurried = [HealthCheck.too_slow]

    class PolicyContract:
        @settings(deadline=None, suppress_health_check=unhurried)
        @given(
            st.lists(rounds(), min_size=1, max_size=2), st.integers(0, 3), st.sampled_from([0.0, 60.0, 3600.0, -60.0])
        )
        def test_schedules_can_be_had(self, history: list[Round], seed: int, later: float) -> None:
            """No schedule breaks a limit or changes a fixed job, and each fits on the nodes. This also holds for a
            policy that has decided before."""
            policy, rng = make(), seeded(seed)
            for number, (view, jobs) in enumerate(history):
                check(view, jobs, policy.decide(view, jobs, number * later, rng))

        @settings(deadline=None, suppress_health_check=unhurried)
        @given(rounds(), st.integers(0, 9))
        def test_equal_seeds_give_equal_schedules(self, drawn: Round, seed: int) -> None:
            """Equal inputs and seeds give equal schedules, reasons included, so decisions can be replayed."""
            view, jobs = drawn
            found = []
            for _ in range(2):
                policy, rng = make(), seeded(seed)
                found.append([repr(policy.decide(view, jobs, 0.0, rng)) for _ in range(2)])
            assert found[0] == found[1]

        def test_nothing_to_decide(self) -> None:
            """A policy can decide if there are no jobs, no nodes, or neither."""
            policy = make()
            assert not policy.decide(cluster(), [], 0.0, seeded()).allocations
            assert not policy.decide(cluster(0), [], 0.0, seeded()).allocations
            waiting = policy.decide(cluster(0), [job(1)], 0.0, seeded())
            assert not waiting.allocations
            assert str(waiting.reasons[1])

        @pytest.mark.parametrize("figure", ABSURD)
        def test_absurd_figures_never_crash(self, figure: float) -> None:
            """Absurd numbers reported by one job cause no error. A waiting job still starts if the policy starts what
            fits."""
            view = cluster(2)
            absurd = job(
                1,
                {"n1": 2},
                epochs=3,
                model=Power(table=dict.fromkeys((1, 2, 4, 8, 16), figure)),
                samples=figure,
                running_s=figure,
            )
            jobs = [absurd, job(2, {"n2": 1}, epochs=3), job(3, requested=1)]
            policy = make()
            for _ in range(2):
                schedule = policy.decide(view, jobs, 0.0, seeded())
                check(view, jobs, schedule)
                assert 3 in schedule.allocations or not starts_what_fits

        def test_jobs_on_nodes_that_are_gone_stay_as_they_are(self) -> None:
            """A job on a node that is missing from the view keeps its shape. So does a job whose nodes, GPUs and shape
            contradict each other. A waiting job can still start."""
            view = replace(cluster(2), nodes=(NodeView("n1", 4), NodeView("n2", 1)))
            elsewhere, oversized = job(1, {"n9": 4}, epochs=5), job(2, {"n2": 4}, epochs=5)
            unsaid = replace(job(3, {"n1": 1}, epochs=5), nodes={})
            jobs = [elsewhere, oversized, unsaid, job(4)]
            schedule = make().decide(view, jobs, 0.0, seeded())
            for kept in jobs[:3]:
                assert schedule.allocations[kept.job_id].shape == kept.shape
            assert 4 in schedule.allocations or not starts_what_fits

        def test_inputs_are_left_as_they_are(self) -> None:
            """A policy does not change its inputs, since the caller may pass them to another policy."""
            view, jobs = cluster(2), [job(1, {"n1": 4}, epochs=4), job(2), job(3)]
            before = repr((view, jobs))
            make().decide(view, jobs, 0.0, seeded())
            assert repr((view, jobs)) == before

    return PolicyContract
