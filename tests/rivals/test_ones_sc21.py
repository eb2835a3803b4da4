"""ONES as published, as a whole: what it does in situations that people will ask about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.policy.build import fixed_jobs
from slurm_ones.policy.contract import ClusterView, Floats, Ints, JobView, Limits, Schedule
from slurm_ones.rivals.ones_sc21 import OnesSc21, OnesSc21Options, SizeBounds, build
from slurm_ones.testing.rounds import HELD, cluster, job
from tests.decided import decide, gpus


def quick(**options: object) -> OnesSc21:
    """ONES with few generations."""
    return OnesSc21(OnesSc21Options(**{"generations": 4, "population": 6, **options}))  # type: ignore[arg-type]


def trained(j: JobView, schedule: Schedule, epochs: int) -> JobView:
    """The job after its schedule was carried out and it did some epochs, resting on the first nodes."""
    got = schedule.allocations[j.job_id]
    changed = got.shape != j.shape
    return replace(
        j,
        shape=got.shape,
        nodes={f"n{i + 1}": got.shape.gpus_per_node for i in range(got.shape.nodes)},
        batch=got.batch,
        epochs=j.epochs + epochs,
        samples=j.samples + 1000.0 * epochs,
        epochs_since_change=epochs if changed else j.epochs_since_change + epochs,
        running_s=j.running_s + 10.0 * epochs,
    )


def test_a_lone_job_grows_with_its_epochs() -> None:
    """1 → 2 → 4 → 8 → 16, each after two epochs, the batch with it up to its limit, and never beyond its
    limits.
    """
    policy, view, alone = quick(), cluster(4), job(1, to_come=500.0)
    seen, batches = [], []
    for _ in range(12):
        schedule = decide(policy, view, [alone])
        alone = trained(alone, schedule, 1)
        seen.append(schedule.allocations[1].shape.gpus)
        batches.append(schedule.allocations[1].batch)
    assert seen == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 16, 16]
    assert batches[::2] == [64, 128, 256, 512, 1024, 1024]


def test_the_request_caps_the_size() -> None:
    """A job that asked for one GPU never gets more than four times that."""
    policy, alone = quick(), job(1, {"n1": 4}, epochs=9, to_come=500.0, requested=1)
    assert gpus(decide(policy, cluster(4), [alone])) == {1: 4}


def test_growth_skips_sizes_that_do_not_exist() -> None:
    """Doubling 1 gives 2, which a job of sizes 1 and 4 cannot take: it goes to 4."""
    alone = job(1, {"n1": 1}, epochs=2, to_come=500.0, gpus=(1, 4))
    assert gpus(decide(quick(), cluster(2), [alone])) == {1: 4}


def test_running_jobs_may_be_taken_to_zero() -> None:
    """The score prefers schedules without those who have much to do: one is stopped for newcomers, and parked."""
    view = cluster(1, 2)
    long = job(1, {"n1": 2}, epochs=3, to_come=1000.0, running_s=0.0)
    schedule = decide(OnesSc21(), view, [long, job(2), job(3)])
    assert gpus(schedule) == {2: 1, 3: 1}
    assert schedule.parked == {1}
    assert schedule.reasons[1].code == "stopped"


def test_newcomers_start_first_come_first_served() -> None:
    """Idle GPUs go to waiting jobs in the order of submission, each at its smallest size."""
    jobs = [job(7, submitted=1.0), job(3, submitted=2.0), job(5, submitted=0.0)]
    schedule = decide(quick(), cluster(1, 2), jobs)
    assert gpus(schedule) == {5: 1, 7: 1}
    assert schedule.reasons[3] == reason("in_queue", gpus=1, place=1, waiting=1)


def test_running_jobs_do_not_grow_past_waiting_ones() -> None:
    """A GPU that a newcomer could start on is not used to grow a running job."""
    jobs = [job(1, {"n1": 1}, epochs=5, to_come=900.0), job(2)]
    assert gpus(decide(quick(), cluster(1, 2), jobs)) == {1: 1, 2: 1}


def test_a_resize_costs_nothing_in_its_eyes() -> None:
    """As published, a job grows seconds before its end, whatever a resize costs here."""
    ending = job(1, {"n1": 1}, epochs=9, to_come=2.0, resize_s=250.0)  # 20 s left on one GPU
    assert gpus(decide(quick(), cluster(1), [ending])) == {1: 2}


def test_samples_count_whatever_they_are_worth() -> None:
    """Efficiency is not in the score: a batch at which samples are worth nothing is as good."""
    poor = replace(job(1, {"n1": 1}, epochs=9, to_come=500.0), efficiency=Worthless())
    assert gpus(decide(quick(), cluster(1), [poor])) == {1: 2}


class Worthless:
    """Samples bring progress at the base batch alone."""

    def efficiency(self, batches: Ints) -> Floats:
        return np.where(batches > 64, 1e-6, 1.0)


def test_deployed_when_every_changing_job_is_settled() -> None:
    """A job in its first epoch since a change holds back the best candidate for everybody who runs; a newcomer starts
    on what is idle."""
    fresh = job(1, {"n1": 4}, epochs=10, to_come=200.0, epochs_since_change=0)
    settled = job(2, {"n2": 1}, epochs=4, to_come=5.0)
    jobs = [fresh, settled, job(3)]
    schedule = decide(quick(mutation=0.0), cluster(2), jobs)
    assert gpus(schedule) == {1: 4, 2: 1, 3: 1}
    assert schedule.reasons[1].code == "changed_lately"
    deployed = decide(quick(mutation=0.0), cluster(2), [replace(fresh, epochs_since_change=1), settled, job(3)])
    assert gpus(deployed)[1] < 4
    assert gpus(deployed)[2] > 1


def test_fixed_jobs_are_left_alone() -> None:
    """A fixed running job keeps shape and batch, a fixed waiting one takes nothing, and both are told why."""
    jobs = [job(1, {"n1": 2}, epochs=9, batch=77, fixed=HELD), job(2, fixed=HELD), job(3)]
    schedule = decide(quick(), cluster(1), jobs)
    assert (schedule.allocations[1].shape, schedule.allocations[1].batch) == (Shape(1, 2), 77)
    assert 2 not in schedule.allocations
    assert schedule.reasons[1] == schedule.reasons[2] == HELD


def test_a_job_keeps_an_odd_shape_it_runs_in() -> None:
    """2 nodes × 2 GPUs, as its owner asked for, is no shape we would give, and none we take away for
    nothing.
    """
    odd = job(1, {"n1": 2, "n2": 2}, epochs=1, epochs_since_change=1)
    assert decide(quick(), cluster(2), [odd]).allocations[1].shape == Shape(2, 2)


def test_whole_nodes() -> None:
    """Where Slurm hands out nodes, a job starts on one and grows by nodes."""
    view, alone = cluster(4, whole=True), job(1, to_come=900.0, gpus=(4, 8, 16))
    first = decide(quick(), view, [alone])
    assert first.allocations[1].shape == Shape(1, 4)
    assert first.allocations[1].batch == 64, "the base batch belongs to the smallest size"
    grown = decide(quick(), view, [trained(alone, first, 2)])
    assert grown.allocations[1].shape == Shape(2, 4)


def test_impossible_jobs_wait_and_are_told() -> None:
    """A job whose sizes or batch do not exist here waits without holding anybody up."""
    too_large = job(1, gpus=(32,))
    no_batch = job(2, limits=Limits((1, 2), 4096, 4096, 16))
    schedule = decide(quick(), cluster(1), [too_large, no_batch, job(3)])
    assert gpus(schedule) == {3: 1}
    assert schedule.reasons[1] == reason("fits_nowhere", counts="32")
    assert schedule.reasons[2] == reason("fits_nowhere", counts="1, 2")


class TestSizeLimits:
    """R of ONES §3.3."""

    def update(self, limits: SizeBounds, jobs: list[JobView], view: ClusterView | None = None) -> dict[int, int]:
        space = build(view or cluster(4), jobs, {})
        found = limits.update(space, jobs)
        return {j.job_id: int(n) for j, n in zip(space.jobs, found, strict=True)}

    def test_doubles_at_the_limit_after_two_epochs(self) -> None:
        """One epoch is not enough, and a job below its limit has nothing doubled."""
        limits = SizeBounds(2, 4)
        assert self.update(limits, [job(1, {"n1": 2}, epochs=1)]) == {1: 2}
        assert self.update(limits, [job(1, {"n1": 2}, epochs=2)]) == {1: 4}
        assert self.update(limits, [job(1, {"n1": 2}, epochs=9)]) == {1: 4}
        assert self.update(limits, [job(1, {"n1": 1}, epochs=9)]) == {1: 4}

    def test_stopped_jobs_halve_when_passed_over(self) -> None:
        """A job that ran on 8 and waits again comes down to what it can get."""
        limits = SizeBounds(2, 4)
        self.update(limits, [job(1, {"n1": 4, "n2": 4}, epochs=1)])
        stopped = job(1, epochs=1)
        found = []
        for _ in range(5):
            found.append(self.update(limits, [stopped])[1])
            limits.passed_over(build(cluster(4), [stopped], {}), {1})
        assert found == [8, 4, 2, 1, 1]

    def test_scale_down_of_the_largest(self) -> None:
        """int(2n/(T/median + 1)): 16 GPUs, running thrice the median, whether or not anybody waits."""
        whole = {f"n{i}": 4 for i in (1, 2, 3, 4)}
        large = job(1, whole, epochs=9, running_s=300.0, requested=16)
        assert self.update(SizeBounds(2, 4), [large]) == {1: 16}, "it is the median itself"
        peers = [job(i, {"x": 1}, running_s=100.0) for i in (2, 3)]  # on nodes of their own
        jobs = [large, *peers]
        space = build(cluster(4), jobs, fixed_jobs(cluster(4), jobs))
        found = SizeBounds(2, 4).update(space, jobs)
        assert dict(zip([j.job_id for j in space.jobs], found.tolist(), strict=True)) == {1: 8}

    def test_forgets_jobs_that_are_gone(self) -> None:
        """A job id that comes back, after Slurm's ids wrapped round, starts anew."""
        limits = SizeBounds(2, 4)
        self.update(limits, [job(1, {"n1": 4}, epochs=9)])
        self.update(limits, [])
        assert self.update(limits, [job(1), job(2, gpus=(4, 8))]) == {1: 1, 2: 4}, "each starts on its smallest size"


def test_any_count_where_shapes_need_not_be_uniform() -> None:
    """On the assumptions of the published studies a job may have three GPUs, or six on two nodes."""
    view = cluster(2, uniform=False)
    jobs = [job(1, {"n1": 3}, epochs=9, to_come=500.0, gpus=tuple(range(1, 9)))]
    assert gpus(decide(quick(), view, jobs)) == {1: 6}
