"""GPUs of several kinds: which kind and how many GPUs each job gets."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.ones.kinds import assign
from slurm_ones.policies import Ones, make_policy
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Progress
from slurm_ones.rivals.gavel import allocate
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, Round, cluster, job, rounds
from tests.marks import nightly


def of_kinds(view: ClusterView, *kinds: str) -> ClusterView:
    """The same nodes with GPUs of these kinds in turn."""
    nodes = tuple(replace(node, kind=kinds[i % len(kinds)]) for i, node in enumerate(view.nodes))
    return replace(view, nodes=nodes)


def fast_and_slow(factor: float) -> dict[str, Power]:
    return {"fast": Power(100.0 * factor), "slow": Power(100.0)}


@st.composite
def mixed_rounds(draw: st.DrawFn) -> Round:
    """Rounds whose nodes are of several kinds; jobs may be on several of them, or accept only some."""
    view, jobs = draw(rounds(max_jobs=6))
    view = of_kinds(view, *draw(st.sampled_from([("fast", "slow"), ("fast", "fast", "slow"), ("a", "b", "c")])))
    found = []
    for one in jobs:
        kinds = draw(st.lists(st.sampled_from(view.kinds), min_size=1, unique=True)) if view.nodes else []
        factors = {kind: draw(st.sampled_from([1.0, 2.0, 0.5])) for kind in kinds}
        on = {kind: replace(one.model, per_gpu=100.0 * factor) for kind, factor in factors.items()}
        found.append(replace(one, on=on) if draw(st.booleans()) else one)
    return view, found


class TestContract:
    @pytest.mark.slow
    @given(st.lists(mixed_rounds(), min_size=1, max_size=2), st.integers(0, 3))
    @pytest.mark.parametrize("name", ["ones", nightly("sia"), nightly("gavel")])
    def test_schedules_can_be_had(self, name: str, history: list[Round], seed: int) -> None:
        """Whatever the kinds of nodes and jobs, a schedule keeps the contract, and is equal for equal seeds."""
        found = []
        for _ in range(2):
            policy, rng = make_policy(name), seeded(seed)
            for number, (view, jobs) in enumerate(history):
                schedule = policy.decide(view, jobs, number * 60.0, rng)
                check(view, jobs, schedule)
            found.append(repr(schedule))
        assert found[0] == found[1]

    @given(rounds(), st.integers(0, 3))
    def test_with_one_kind_nothing_changes(self, drawn: Round, seed: int) -> None:
        """A cluster whose GPUs all have one name is decided about to the last bit as if they had none."""
        view, jobs = drawn
        plain = [Ones().decide(view, jobs, 60.0, seeded(seed))]
        named = [Ones().decide(of_kinds(view, "a100"), jobs, 60.0, seeded(seed))]
        assert repr(plain) == repr(named)


class TestDeadlines:
    """What is promised where GPUs are of several kinds."""

    VIEW = of_kinds(cluster(4), "slow", "fast")

    def due(self, job_id: int, seconds: float, factor: float, held: dict[str, int] | None = None) -> JobView:
        """20,000 samples to come: 57 s on four slow GPUs."""
        made = job(job_id, held, gpus=(4,), on=fast_and_slow(factor), epochs=3 if held else 0, running_s=3000.0)
        return replace(made, deadline=1000.0 + seconds, progress=Progress(2.0, 20.0, most=20.0), dataset=1000)

    @pytest.mark.parametrize(("seconds", "given"), [(190.0, True), (150.0, True), (130.0, False)])
    def test_what_one_kind_can_keep_is_promised(self, seconds: float, given: bool) -> None:
        """It needs 57 s on slow GPUs, 14 on fast ones, a pause, and a reserve of a minute, a pause and 3 %."""
        found = Ones().decide(self.VIEW, [self.due(1, seconds, 4.0)], 1000.0, seeded())
        assert found.promises[1].given is given

    def test_a_job_goes_where_it_ends_in_time(self) -> None:
        """Others gain more by the fast GPUs; one whose deadline only these can meet gets them, and keeps them."""
        view = of_kinds(cluster(2), "slow", "fast")
        long = replace(job(2, gpus=(4,), on=fast_and_slow(20.0), to_come=1.0), submitted=-9000.0)
        urgent = self.due(1, 150.0, 4.0)
        policy = Ones()
        without = Ones().decide(view, [replace(urgent, deadline=None), long], 1000.0, seeded())
        assert without.allocations[2].kind == "fast"
        found = policy.decide(view, [urgent, long], 1000.0, seeded())
        assert found.promises[1].given and found.allocations[1].kind == "fast"
        runs = replace(urgent, shape=Shape(1, 4), nodes={"n2": 4}, promised=True, running_s=5.0)
        assert policy.decide(view, [runs, long], 1005.0, seeded()).allocations[1].kind == "fast"

    def test_a_promised_job_keeps_its_kind(self) -> None:
        """Another would gain more on its GPUs, and it would still end, but not where its deadline was promised."""
        mine = replace(self.due(1, 5000.0, 1.0, {"n2": 4}), promised=True, progress=Progress(2.0, 900.0, most=900.0))
        other = replace(job(2, {"n1": 4}, epochs=30, to_come=900.0, gpus=(4,), running_s=3000.0), on=fast_and_slow(8.0))
        view = of_kinds(cluster(2), "slow", "fast")
        assert Ones().decide(view, [mine, other], 3000.0, seeded()).allocations[1].kind == "fast"
        free = replace(mine, deadline=None, promised=None)
        assert Ones().decide(view, [free, other], 3000.0, seeded()).allocations[1].kind == "slow"


class TestChoice:
    def test_a_job_moves_to_the_faster_kind(self) -> None:
        """A running job leaves slow GPUs for free ones on which it trains three times as fast, and the reason says so;
        where the gain repays no interruption it stays."""
        view = of_kinds(cluster(2), "slow", "fast")
        long = job(1, {"n1": 4}, epochs=30, to_come=200.0, gpus=(4,), on=fast_and_slow(3.0), running_s=3000.0)
        policy = Ones()
        for now in (3000.0, 9000.0):
            schedule = policy.decide(view, [long], now, seeded())
        got = schedule.allocations[1]
        assert (got.kind, got.shape) == ("fast", Shape(1, 4))
        assert schedule.reasons[1] == reason("faster_kind", kind="fast", before="slow", factor=pytest.approx(3.0))
        assert schedule.weighed[1][0].allocation == got
        for stays in (replace(long, on=fast_and_slow(1.001)), replace(long, progress=replace(long.progress, beta=0.1))):
            schedule = Ones().decide(view, [stays], 3000.0, seeded())
            assert (schedule.allocations[1].kind, schedule.allocations[1].shape) == ("slow", Shape(1, 4))

    def test_who_gains_most_gets_the_faster_kind(self) -> None:
        """Of two waiting jobs the one that is four times as fast there gets it, whichever came first."""
        view = of_kinds(cluster(2), "slow", "fast")
        for factors in ((4.0, 1.2), (1.2, 4.0)):
            jobs = [job(i, gpus=(4,), on=fast_and_slow(factor)) for i, factor in enumerate(factors)]
            schedule = Ones().decide(view, jobs, 10.0, seeded())
            kinds = [schedule.allocations[i].kind for i in range(2)]
            assert kinds == ["fast" if factor == 4.0 else "slow" for factor in factors]

    def test_two_jobs_change_places(self) -> None:
        """Each sits on what the other would use better."""
        view = of_kinds(cluster(2), "slow", "fast")
        known: dict[str, Any] = {"epochs": 30, "to_come": 200.0, "gpus": (4,), "running_s": 3000.0}
        jobs = [job(1, {"n1": 4}, on=fast_and_slow(4.0), **known), job(2, {"n2": 4}, on=fast_and_slow(1.0), **known)]
        schedule = Ones().decide(view, jobs, 9000.0, seeded())
        assert [schedule.allocations[i].kind for i in (1, 2)] == ["fast", "slow"]
        assert schedule.reasons[2].code == "leaves_kind"

    def test_only_what_a_job_accepts(self) -> None:
        """A job that asked for one kind waits rather than take another."""
        view = of_kinds(cluster(2), "slow", "fast")
        jobs = [job(i, gpus=(4,), on={"fast": Power(100.0)}) for i in range(2)]
        schedule = Ones().decide(view, jobs, 10.0, seeded())
        assert {got.kind for got in schedule.allocations.values()} == {"fast"} and len(schedule.allocations) == 1

    def test_a_job_on_several_kinds(self) -> None:
        """It keeps them until a change repays, and then has one kind."""
        view = of_kinds(cluster(3), "slow", "fast", "fast")
        spread = job(1, {"n1": 4, "n2": 4}, epochs=30, to_come=200.0, on=fast_and_slow(3.0), running_s=3000.0)
        assert view.kinds_held(spread) == ("slow", "fast")
        schedule = Ones().decide(view, [spread], 9000.0, seeded())
        assert (schedule.allocations[1].kind, schedule.allocations[1].shape) == ("fast", Shape(2, 4))
        held = replace(spread, progress=replace(spread.progress, beta=0.1))
        schedule = Ones().decide(view, [held], 9000.0, seeded())
        assert (schedule.allocations[1].kind, schedule.allocations[1].shape) == ("", Shape(2, 4))
        assert schedule.reasons[1].code == "several_kinds"

    @pytest.mark.parametrize("name", ["ones", "sia", "gavel"])
    def test_jobs_whose_nodes_are_gone_stay_as_they_are(self, name: str) -> None:
        """Nobody knows the kind of their GPUs, and nobody else gets them."""
        view = of_kinds(cluster(2), "slow", "fast")
        jobs = [job(1, {"n9": 4}, epochs=5), replace(job(2, {"n1": 1}, epochs=5), nodes={}), job(3, gpus=(4,))]
        schedule = make_policy(name).decide(view, jobs, 0.0, seeded())
        for kept in jobs[:2]:
            assert (schedule.allocations[kept.job_id].shape, schedule.allocations[kept.job_id].kind) == (kept.shape, "")
            assert schedule.reasons[kept.job_id].code == "nodes_do_not_add_up"
        assert schedule.allocations[3].kind in ("slow", "fast")

    def test_kinds_can_be_ignored(self) -> None:
        """With `kinds=False` a schedule names none."""
        view = of_kinds(cluster(2), "slow", "fast")
        schedule = make_policy("ones", kinds=False).decide(view, [job(1, on=fast_and_slow(3.0))], 10.0, seeded())
        assert {got.kind for got in schedule.allocations.values()} == {""}


@pytest.mark.parametrize("name", ["sia", "gavel"])
def test_rivals_give_the_faster_kind_to_who_gains_most(name: str) -> None:
    """Of two jobs that wait, by an integer program or by shares of time."""
    view = of_kinds(cluster(2), "slow", "fast")
    jobs = [job(i, gpus=(4,), on=fast_and_slow(factor)) for i, factor in enumerate((1.0, 4.0))]
    schedule = make_policy(name).decide(view, jobs, 10.0, seeded())
    assert [schedule.allocations[i].kind for i in range(2)] == ["slow", "fast"]


def test_gavel_shares_time() -> None:
    """Two equal jobs and one node of each kind: each job has each kind half of its time, and rounds keep to it."""
    shares = allocate(np.full((2, 2), 4), np.array([[1.0, 3.0], [1.0, 3.0]]), np.array([4, 4]), "max_min")
    assert shares.sum(axis=0) == pytest.approx([1.0, 1.0]) and (shares @ [1.0, 3.0]) == pytest.approx([2.0, 2.0])
    view, policy, had = of_kinds(cluster(2), "slow", "fast"), make_policy("gavel"), Counter[tuple[int, str]]()
    jobs = [job(i, gpus=(4,), on=fast_and_slow(3.0)) for i in range(2)]
    for number in range(8):
        schedule = policy.decide(view, jobs, 60.0 * number, seeded())
        had.update((i, got.kind) for i, got in schedule.allocations.items())
    assert 3 <= had[0, "fast"] <= 5 and had[0, "fast"] + had[1, "fast"] == 8


def best_of_all(worth: Floats, sizes: Ints, kind: Ints, gpus: Ints) -> float:
    """The highest worth of any assignment that fits."""
    best = -np.inf
    for columns in itertools.product(range(len(sizes)), repeat=len(worth)):
        used = np.bincount(kind[list(columns)] + 1, weights=sizes[list(columns)], minlength=len(gpus) + 1)[1:]
        if (used <= gpus).all():
            best = max(best, float(worth[np.arange(len(worth)), list(columns)].sum()))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_assignments_are_nearly_the_best(seed: int) -> None:
    """Over small problems: within 4 % of the best of all on average, never worth less than what there was, always
    within the GPUs."""
    rng = np.random.default_rng(seed)
    sizes, kind = np.array([0, 1, 2, 4, 1, 2, 4]), np.array([-1, 0, 0, 0, 1, 1, 1])
    ratios = []
    for _ in range(8):
        gpus = np.array([4, 4])
        speed = rng.uniform(0.5, 4.0, (4, 2))
        worth = np.zeros((4, 7))
        worth[:, 1:] = np.repeat(speed, 3, axis=1) * sizes[1:] ** rng.uniform(0.3, 1.0, (4, 1))
        worth[0, 0] = -np.inf
        current = np.array([1, 0, 0, 0])
        columns, prices = assign(worth, sizes, kind, gpus, current)
        used = np.bincount(kind[columns] + 1, weights=sizes[columns], minlength=3)[1:]
        got = float(worth[np.arange(4), columns].sum())
        assert (used <= gpus).all() and columns[0] > 0 and (prices >= 0).all()
        assert got >= float(worth[np.arange(4), current].sum())
        ratios.append(got / best_of_all(worth, sizes, kind, gpus))
    assert np.mean(ratios) >= 0.96
