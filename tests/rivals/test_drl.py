"""The policy-gradient rival: its weights, its figures, its gradients, and that training works."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.train_drl import (
    Adam,
    Draw,
    EqualShare,
    Round,
    Sampling,
    draw_steps,
    gradient,
    kept_task,
    mean_jct,
    network_gradient,
    random_network,
    training_task,
)
from slurm_ones.policy.contract import JobView
from slurm_ones.rivals.drl import (
    CONTEXT,
    FEATURES,
    SIZE,
    Drl,
    Game,
    Perceptron,
    best_steps,
    build_steps,
    gpus_after,
    load,
)
from slurm_ones.testing.policies import check, seeded
from slurm_ones.testing.rounds import Power, cluster, job, rounds
from slurm_ones.testing.rounds import Round as Situation


def queue() -> list[JobView]:
    """Eight jobs, some of which run, of different lengths."""
    running = [job(i, {f"n{i}": 2}, epochs=3, to_come=10.0 * i, requested=2 * i) for i in (1, 2, 3)]
    return [*running, *(job(i, to_come=3.0 * i, requested=i) for i in range(4, 9))]


@cache
def trained_jct(number: int) -> float:
    """Mean JCT of a kept workload under the weights that come with the package."""
    return mean_jct(Drl(), kept_task("test", number))


@pytest.mark.slow
class TestWeights:
    """What comes with the package."""

    def test_they_load_and_say_where_they_come_from(self) -> None:
        """The command and the curve are in the file, and the training got better."""
        trained = load()
        assert trained.network.flat.shape == (SIZE,)
        assert np.isfinite(trained.network.flat).all()
        assert "train_drl --seed" in trained.command
        assert f"--seed {trained.seed}" in trained.command
        assert trained.curve.shape[1] == 3
        assert trained.curve[:, 2].min() < 0.95 < trained.curve[0, 2]

    @pytest.mark.nightly
    @pytest.mark.parametrize("number", [100, 101])
    def test_they_beat_equal_shares(self, number: int) -> None:
        """On a workload of each mix that neither the training nor the choice among networks has met."""
        assert trained_jct(number) < mean_jct(EqualShare(), kept_task("test", number))

    @pytest.mark.nightly
    def test_they_beat_no_training(self) -> None:
        untrained = Drl(network=random_network(seeded()))
        assert trained_jct(100) < 0.8 * mean_jct(untrained, kept_task("test", 100))


class TestSteps:
    """What the network is told."""

    @given(rounds(), st.sampled_from([0.0, -1e9, 1e300, math.inf, math.nan]))
    def test_figures_are_finite_whatever_the_jobs_say(self, drawn: Situation, now: float) -> None:
        """And about within -1 and 1, so that no job can shout down the others."""
        view, jobs = drawn
        absurd = [replace(j, running_s=now, submitted=-now, samples=now) for j in jobs]
        steps = build_steps(view, absurd, view.gpus, now)
        assert np.isfinite(steps.features).all()
        assert (np.abs(steps.features) <= 2.0).all()
        assert steps.features.shape == (*steps.sizes.shape, FEATURES)

    def test_steps_double_or_go_to_what_was_asked_for(self) -> None:
        """1, 2, 4, … of what the job can take, the size asked for between them, and the one it has."""
        view = cluster(4)
        jobs = [job(1, requested=12, gpus=(1, 2, 4, 8, 12, 16)), job(2, {"n1": 4}, gpus=(2, 4))]
        steps = build_steps(view, jobs, 16, 0.0)
        assert steps.sizes.tolist() == [[1, 2, 4, 8, 12, 16], [2, 4, 0, 0, 0, 0]]
        assert steps.extra.tolist() == [[1, 1, 2, 4, 4, 4], [2, 2, 0, 0, 0, 0]]

    def test_the_order_of_jobs_does_not_matter(self) -> None:
        jobs = queue()
        there = build_steps(cluster(), jobs, 16, 100.0).features
        back = build_steps(cluster(), jobs[::-1], 16, 100.0).features
        assert np.allclose(there, back[::-1])


class TestChoosing:
    """One step after another."""

    @given(rounds(), st.integers(0, 9))
    def test_never_more_than_there_is(self, drawn: Situation, seed: int) -> None:
        """Whatever the scores, by chance or not, the steps fit the GPUs, and nobody has nothing beside room for a first
        step."""
        view, jobs = drawn
        game = Game(view, jobs, 0.0)
        network = Perceptron(3.0 * random_network(seeded(seed)).flat)
        best = best_steps(network, game.steps, game.gpus, game.total)
        drawn_steps = draw_steps(network, game.steps, game.gpus, game.total, seeded(seed)).taken
        for taken in (best, drawn_steps):
            left = game.gpus - gpus_after(game.steps, taken).sum()
            assert left >= 0
            waiting = (taken == 0) & (game.steps.sizes[:, :1] > 0).any(axis=1)
            assert not (game.steps.sizes[waiting, :1] <= left).any()
            check(view, jobs, game.schedule(taken))

    def test_the_best_are_the_likeliest(self) -> None:
        game = Game(cluster(), queue(), 50.0)
        sharp = random_network(seeded(4))
        sharp = Perceptron(np.concatenate([sharp.flat[:-CONTEXT], np.full(CONTEXT, -1.0)]))
        sharp.parameters()[4][:] *= 1e4
        greedy = best_steps(sharp, game.steps, game.gpus, game.total)
        assert (draw_steps(sharp, game.steps, game.gpus, game.total, seeded()).taken == greedy).all()

    def test_the_void_ends_growing_alone(self) -> None:
        """With nothing but the void to like, everybody gets a first step and nobody a second."""
        game = Game(cluster(), [job(i) for i in range(3)], 0.0)
        shy = Perceptron(np.concatenate([np.zeros(SIZE - CONTEXT), [1e3, 0.0, 0.0, 0.0]]))
        assert best_steps(shy, game.steps, game.gpus, game.total).tolist() == [1, 1, 1]


class TestGradients:
    """By hand, held against differences."""

    def test_of_the_network(self) -> None:
        rng = seeded(1)
        network, features, weights = random_network(rng), rng.normal(size=(7, FEATURES)), rng.normal(size=7)
        void, context = rng.normal(), rng.normal(size=CONTEXT)
        found = network_gradient(network, features, weights, void * context)
        for at in rng.choice(SIZE, 60, replace=False):
            value = []
            for step in (1e-5, -1e-5):
                flat = network.flat.copy()
                flat[at] += step
                moved = Perceptron(flat)
                value.append(float(weights @ moved.scores(features)) + void * moved.void(context))
            assert found[at] == pytest.approx((value[0] - value[1]) / 2e-5, abs=1e-6)

    @pytest.mark.slow
    def test_of_the_actions(self) -> None:
        """Summed over many draws, the derivatives of the log probability vanish, as those of any distribution do, and
        those of one draw do not."""
        game = Game(cluster(), queue(), 50.0)
        network, rng = random_network(seeded(2)), seeded(3)
        draws = [draw_steps(network, game.steps, game.gpus, game.total, rng) for _ in range(2000)]
        mean = np.mean([draw.choice for draw in draws], axis=0)
        spread = np.std([draw.choice for draw in draws], axis=0) / math.sqrt(len(draws))
        assert (np.abs(mean) <= 5.0 * spread + 1e-12).all()
        assert np.abs(draws[0].choice).max() > 0.1


class TestTraining:
    """REINFORCE, where the right answer is known."""

    def test_it_learns_what_pays(self) -> None:
        """Two jobs and a GPU for one of them: the one of the smaller figure is the right one, and after some updates it
        is the one that gets it."""
        network, adam, rng = Perceptron(0.5 * random_network(seeded(5)).flat), Adam(), seeded(6)
        losses = []
        for _ in range(60):
            rollouts, wrong = [], 0
            for _ in range(8):
                figures = rng.normal(size=2)
                features = np.zeros((2, FEATURES))
                features[:, 3] = figures
                scores = network.scores(features)
                chance = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                action = int(rng.random() > chance[0])
                choice = -chance
                choice[action] += 1.0
                bad = int(action != figures.argmin())
                wrong += bad
                nothing = np.zeros(CONTEXT)
                first = Round(0, features, choice, np.zeros(2), nothing, nothing, 2, (0.0, 0.0))
                rollouts.append([first, replace(first, at=1, choice=np.zeros(2), jobs=1 + 5 * bad)])
            network = Perceptron(adam.step(network.flat, gradient(network, rollouts, 0.0), 0.02))
            losses.append(wrong / 8)
        assert np.mean(losses[-15:]) < 0.15 < 0.35 < np.mean(losses[:5])

    def test_a_rollout_is_remembered(self) -> None:
        """Each decision once, with as many figures as there were steps; equal seeds draw alike."""
        task = training_task(0, 7)
        view, jobs = task.cluster, queue()
        found = []
        for _ in range(2):
            policy = Sampling(random_network(seeded(8)), 60.0)
            schedule = policy.decide(cluster(), jobs, 120.0, seeded(9))
            check(cluster(), jobs, schedule)
            found.append((repr(schedule), policy.rounds[0].choice.tobytes()))
            assert policy.rounds[0].at == 2
            assert policy.rounds[0].jobs == len(jobs)
            assert len(policy.rounds[0].features) == len(policy.rounds[0].choice)
        assert found[0] == found[1]
        assert view.gpus in (16, 32, 64)


def test_equal_shares_are_equal() -> None:
    schedule = EqualShare().decide(cluster(), [job(i) for i in range(4)], 0.0, seeded())
    assert {a.shape.gpus for a in schedule.allocations.values()} == {4}


def test_requested_batches_are_kept() -> None:
    """It does not tune batches: a job trains at its user's, whatever its size."""
    jobs = [job(i, requested_batch=512, model=Power(per_gpu=10.0 * i)) for i in range(1, 6)]
    schedule = Drl(network=random_network(seeded())).decide(cluster(), jobs, 0.0, seeded())
    assert {a.batch for a in schedule.allocations.values()} <= {256, 512}, "256 is the most that one GPU takes"
    assert isinstance(draw_steps(random_network(seeded()), Game(cluster(), jobs, 0.0).steps, 4, 4, seeded()), Draw)
