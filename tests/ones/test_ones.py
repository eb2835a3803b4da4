"""Our policy as a whole: what it does with a queue, beyond the contract of all policies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.learn.histories import NoiseEfficiency
from slurm_ones.ones import Ones, OnesOptions
from slurm_ones.ones.search import WEIGHED
from slurm_ones.policy.contract import Allocation, ClusterView, JobView, Progress, Schedule
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import HELD, Power, Round, cluster, job, rounds
from tests import decided
from tests.decided import gpus

SWITCHES = [field.name for field in fields(OnesOptions) if isinstance(field.default, bool)]
NUMBERS = ["generations", "mutation", "caution", "tenure", "fair_bound"]
decide = partial(decided.decide, now=100.0)


def ones(**options: object) -> Ones:
    return Ones(OnesOptions(**options))  # type: ignore[arg-type]


def carried_out(view: ClusterView, jobs: Sequence[JobView], schedule: Schedule) -> list[JobView]:
    """The jobs once the schedule is in force: where they were, or on the nodes with the least room for them."""
    given_now = schedule.allocations
    stays = {j.job_id for j in jobs if j.job_id in given_now and given_now[j.job_id].shape == j.shape}
    left = {node.name: node.gpus for node in view.nodes}
    for j in jobs:
        for name, held in j.nodes.items():
            left[name] -= held * (j.job_id in stays)
    made = []
    for j in sorted(jobs, key=lambda j: -given_now[j.job_id].shape.gpus if j.job_id in given_now else 0):
        got, nodes = given_now.get(j.job_id), dict(j.nodes)
        if got is not None and j.job_id not in stays:
            each = got.shape.gpus_per_node
            roomy = sorted((name for name in left if left[name] >= each), key=lambda name: left[name])
            nodes = dict.fromkeys(roomy[: got.shape.nodes], each)
            for name in nodes:
                left[name] -= each
        made.append(replace(j, shape=got.shape, nodes=nodes, batch=got.batch) if got else j)
    return made


@given(rounds(), st.randoms())
def test_the_order_in_which_jobs_are_named_does_not_matter(drawn: Round, dice: random.Random) -> None:
    """Equal jobs and seeds give equal schedules, as a decision that is replayed lists its jobs anew."""
    view, jobs = drawn
    shuffled = list(jobs)
    dice.shuffle(shuffled)
    first, second = (Ones().decide(view, listed, 100.0, seeded()) for listed in (jobs, shuffled))
    assert (first.allocations, first.parked) == (second.allocations, second.parked)


@pytest.mark.slow
@given(rounds())
def test_running_jobs_go_on(drawn: Round) -> None:
    """Nobody who trains is sent back to the queue, unless preemption is asked for."""
    view, jobs = drawn
    assert not decide(ones(), view, jobs).parked


def test_preemption_is_there_for_those_who_ask() -> None:
    """A long job gives its node to four that are done in a moment, and only then."""
    long = job(1, {"n1": 4}, epochs=1, to_come=1e6, gpus=(4,), limits=job(0, gpus=(4,)).limits, running_s=1e6)
    queue = [long, *(job(i, to_come=0.01, gpus=(1,), requested=1) for i in (2, 3, 4, 5))]
    assert decide(ones(preempt=True), cluster(1), queue).parked == {1}
    assert gpus(decide(ones(), cluster(1), queue)) == {1: 4}


@given(rounds(uniform=True), st.sampled_from([30.0, 120.0]))
def test_two_identical_ticks_change_nothing(drawn: Round, resize_s: float) -> None:
    """What was just decided is still right: no job is interrupted again before anything is new."""
    view, jobs = drawn
    assume(all(node.gpus == view.gpus_per_node for node in view.nodes))
    known = {"model": Power(), "running_s": 600.0, "requested": 64}
    jobs = [replace(j, resize_s=resize_s, **known) for j in jobs]  # type: ignore[arg-type]
    policy = ones()
    before = carried_out(view, jobs, decide(policy, view, jobs))
    running = [j for j in before if j.shape is not None]
    after = decide(policy, view, before).allocations
    assert [after[j.job_id].shape for j in running] == [j.shape for j in running]


def test_a_job_that_finds_no_room_to_grow_keeps_what_it_has() -> None:
    """Three GPUs are free or its own, but no node has them all: wanting them must not cost it the two it has."""
    alone = job(1, {"n2": 2}, epochs=1, to_come=1e5, running_s=1e4, gpus=(1, 2, 3))
    assert gpus(decide(ones(), cluster(2, 3, free=[1, 2]), [alone])) == {1: 2}


def of_blocks(job_id: int, nodes: dict[str, int], **values: object) -> JobView:
    """A job of blocks, one on each node, of which all but the first can leave."""
    kept, smaller = {}, {}
    for name, held in list(nodes.items())[:-1]:
        kept[name] = held
        smaller[sum(kept.values())] = dict(kept)
    shape = Shape(1, sum(nodes.values()))
    known = {"resize_s": 0.05, "shrink_s": 0.01, "prepare_s": 5.0, "running_s": 60.0, "shape": shape, "joins": True}
    return job(job_id, nodes, epochs=1, smaller=smaller, **{**known, **values})  # type: ignore[arg-type]


def test_a_waiting_job_starts_smaller_where_no_node_has_all_that_it_asked_for() -> None:
    """Seven GPUs are free, and no node has four: the job that waits for four starts on some of them, and the others
    are for jobs whose blocks join on any nodes."""
    grown = of_blocks(1, {"n1": 2, "n3": 2})
    resting = of_blocks(2, {"n3": 2, "n2": 1, "n4": 1}, fixed=HELD)
    jobs = [grown, resting, of_blocks(3, {"n2": 1}, gpus=(1, 2)), job(4, requested=4, to_come=30.0, gpus=(1, 2, 4, 8))]
    schedule = ones().decide(cluster(), jobs, 100.0, seeded())
    found = gpus(schedule)
    assert found[4] == 2 and found[3] == 2 and sum(found.values()) <= 16


def test_blocks_join_on_any_nodes() -> None:
    """Four GPUs on four nodes are room for a job of blocks, and none for one that is placed anew."""
    fixed = [job(i, {f"n{i}": 3}, epochs=3, gpus=(3,), fixed=HELD) for i in (2, 3, 4, 5)]
    for joins, size in ((True, 8), (False, 4)):
        grows = of_blocks(1, {"n1": 4}, joins=joins)
        found = ones().decide(cluster(5), [grows, *fixed], 100.0, seeded())
        assert gpus(found)[1] == size


def test_a_change_must_repay_its_interruption() -> None:
    """A job that would train four times as fast on the idle cluster grows if it is interrupted for no longer than that
    lasts, and keeps its GPU if it is."""
    alone = job(1, {"n1": 1}, epochs=1, to_come=1e5, running_s=1e4)
    for resize_s, grows in ((1.0, True), (ones().options.horizon_s, False)):
        for policy in (ones(), ones(resize_cost=False)):
            found = gpus(decide(policy, cluster(), [replace(alone, resize_s=resize_s)]))[1]
            assert (found > 1) == (grows or not policy.options.resize_cost)


def test_a_change_counts_to_the_end_that_it_brings() -> None:
    """A job that has 40 s to go on its GPU grows on the idle cluster although its blocks take 6 s: a quarter of its
    time is left then, and not what would be left had it all GPUs already. One that has 5 s to go does not."""
    hot = job(1, {"n1": 1}, epochs=1, running_s=30.0, resize_s=0.05, shrink_s=0.01, prepare_s=6.0)
    for seconds, grows in ((40.0, True), (5.0, False)):
        left = replace(hot, progress=Progress(1.0, seconds * 100.0 / 1000.0))
        assert (gpus(decide(ones(), cluster(), [left]))[1] > 1) == grows


@given(st.sets(st.sampled_from([*SWITCHES, *NUMBERS]), min_size=1), st.lists(rounds(), min_size=1, max_size=2))
def test_all_parts_can_be_switched_off(options: set[str], history: list[Round]) -> None:
    """An ablation is a policy as well: whatever is missing, what it decides can be had."""
    defaults = {option: getattr(OnesOptions(), option) for option in options}
    policy = ones(**{name: not value if isinstance(value, bool) else 0 for name, value in defaults.items()})
    for view, jobs in history:
        decide(policy, view, jobs)


@pytest.mark.parametrize("option", [*SWITCHES, *NUMBERS])
def test_each_part_can_be_switched_off(option: str) -> None:
    """By itself, on a queue of running, waiting and fixed jobs."""
    default = getattr(OnesOptions(), option)
    policy = ones(**{option: not default if isinstance(default, bool) else 0})
    queue = [job(1, {"n1": 4, "n2": 4}, epochs=3), job(2, {"n3": 2}, epochs=1, fixed=HELD), job(3), job(4, requested=8)]
    for now in (100.0, 200.0):
        decide(policy, cluster(4), queue, now=now)


@pytest.mark.parametrize("requested", [1, 2, 3, 8, 64])
def test_an_unknown_job_starts_at_no_more_than_it_asked_for(requested: int) -> None:
    """On an idle cluster, whatever its model guesses; one that has run grows by leaps from the most it has had."""
    new = job(1, requested=requested, model=Power(exponent=1.0, doubt=1.0))
    assert gpus(decide(ones(), cluster(), [new]))[1] <= requested
    policy, ran = ones(leap=2.0, caution=0.0), job(1, {"n1": 2}, epochs=1, to_come=1e5, running_s=1e5, resize_s=1.0)
    assert gpus(decide(policy, cluster(), [ran])) == {1: 4}
    assert gpus(decide(policy, cluster(), [replace(ran, shape=None, nodes={}, requested=1)])) == {1: 4}


def test_a_job_may_start_with_more_than_it_asked_for() -> None:
    """Where its speed is known, or giving up GPUs costs next to nothing, the first size follows its worth; not where
    a doubtful size is dear to undo, nor on a guess, nor where that is switched off."""
    hot = job(1, requested=1, model=Power(exponent=1.0), resize_s=0.5, shrink_s=0.03, prepare_s=7.0)
    assert gpus(decide(ones(), cluster(), [hot]))[1] > 1
    assert gpus(decide(ones(first_size=False), cluster(), [hot])) == {1: 1}
    doubtful, dear = Power(exponent=0.5, doubt=0.9), {"shrink_s": None, "resize_s": 40.0}
    assert gpus(decide(ones(), cluster(), [replace(hot, **dear)]))[1] > 1
    assert gpus(decide(ones(), cluster(), [replace(hot, model=doubtful)]))[1] > 1
    assert gpus(decide(ones(), cluster(), [replace(hot, model=doubtful, **dear)])) == {1: 1}
    assert gpus(decide(ones(), cluster(), [replace(hot, model=Power(exponent=1.0, doubt=1.0))])) == {1: 1}


def test_a_batch_that_is_nearly_best_stays() -> None:
    """Each new figure moves the best batch a little, which a job must not follow; one that is far from it does."""
    settled = job(1, {"n1": 4}, gpus=(4,), epochs=3, efficiency=NoiseEfficiency(64, 1000.0))
    for batch, chosen in ((64, 64), (80, 80), (512, 64)):
        found = decide(ones(), cluster(1), [replace(settled, batch=batch)]).allocations[1]
        assert (found.shape, found.batch) == (settled.shape, chosen)


def test_a_quiet_cluster_lets_small_gains_repay() -> None:
    """The last long job takes what is idle, though it gains little by it, once nobody has come for a while; and not
    while jobs come and go."""
    alone = job(1, {"n1": 4}, epochs=1, model=Power(exponent=0.1), to_come=1e7, running_s=1e5)
    policy = ones(greedy=True)
    held = [gpus(policy.decide(cluster(), [alone], now, seeded()))[1] for now in (1e5, 1e5 + 60.0, 1e5 + 9000.0)]
    assert held[:2] == [4, 4]
    assert held[2] > 4


def test_the_population_survives_the_end_of_a_job() -> None:
    """Jobs come and go at every tick: what was found of the others is remembered, by job and not by place. Without
    search of its own, only the memory says that a job which scales badly should give GPUs to one that does not."""
    bad = job(2, {"n1": 4, "n2": 4}, epochs=3, model=Power(exponent=0.05), to_come=1000.0)
    good = job(3, {"n3": 4}, epochs=3, model=Power(exponent=1.0), to_come=1000.0, gpus=(4, 12))
    ending = job(1, {"n4": 4}, epochs=3, to_come=1000.0, gpus=(4,))
    policy = ones(resize_cost=False)
    assert gpus(decide(policy, cluster(5, 4), [ending, bad, good]))[3] == 12
    asleep = OnesOptions(resize_cost=False, greedy=False, local_search=False, generations=0)
    policy.options = asleep
    assert gpus(decide(Ones(asleep), cluster(4, 4), [bad, good]))[3] == 4
    assert gpus(decide(policy, cluster(4, 4), [bad, good]))[3] == 12


@given(rounds())
def test_weighed_are_sizes_that_the_job_may_have_best_first(drawn: Round) -> None:
    """Protects from alternatives that were none: each is a size of the job's own, once, with a batch within limits."""
    view, queue = drawn
    schedule = Ones().decide(view, queue, 100.0, seeded())
    jobs = {j.job_id: j for j in queue}
    for job_id, weighed in schedule.weighed.items():
        limits, shape = jobs[job_id].limits, jobs[job_id].shape
        assert 0 < len(weighed) <= WEIGHED
        assert [w for _, w in weighed] == sorted((w for _, w in weighed), reverse=True)
        sizes = [a.shape.gpus if a is not None else 0 for a, _ in weighed]
        assert len(set(sizes)) == len(sizes)
        for allocation, _ in weighed:
            if allocation is not None and (shape is None or allocation.shape.gpus != shape.gpus):
                assert allocation.shape.gpus in limits.gpus
                assert limits.min_batch <= allocation.batch <= limits.max_batch


def test_a_job_alone_gets_the_best_of_those_weighed() -> None:
    """Protects that the worth told is the worth that decided."""
    schedule = Ones().decide(cluster(2, 4), [job(1, gpus=(1, 2, 4))], 100.0, seeded())
    best, _ = schedule.weighed[1][0]
    assert isinstance(best, Allocation) and best == schedule.allocations[1]
