"""What jobs teach about another one: by its own kin first, and never more than a user's share."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_ones.learn.hierarchy import GroupPath, JobEvidence, Tree, found_widths
from slurm_ones.learn.step_time import CAUTIOUS, PARAMETERS, SPEED, Fit, fit_all
from slurm_ones.learn.throughput import MeasuredThroughput, points_of
from slurm_ones.policy.contract import Floats
from tests.learn.test_throughput import measured


def heard(speed: float, precision: float = 400.0) -> JobEvidence:
    """Of a job that knows its speed, and of its other parameters little."""
    sure = np.full(PARAMETERS, 1e-6)
    sure[SPEED] = precision
    value = CAUTIOUS.mean.copy()
    value[SPEED] = speed
    return JobEvidence(sure * value, np.diag(sure))


def jobs(rng: np.random.Generator, families: int, each: int) -> list[tuple[GroupPath, JobEvidence, Floats]]:
    """Families 1.0 apart, specs in them 0.3, and jobs of a spec 0.05; every job another user's."""
    found = []
    for family in range(families):
        of_family = 5.0 + rng.normal(0.0, 1.0)
        for spec in range(each):
            of_spec = of_family + rng.normal(0.0, 0.3)
            for job in range(each):
                speed = of_spec + rng.normal(0.0, 0.05)
                kin = GroupPath(family, (family, spec), f"user{family}-{spec}-{job}")
                found.append((kin, heard(speed), np.array([of_family, of_spec])))
    return found


def test_the_nearer_the_kin_the_surer() -> None:
    """A job of a known spec is expected as that spec, one of a known family as the family, with the doubt of each."""
    known = jobs(np.random.default_rng(3), 8, 4)
    tree = Tree([(kin, told) for kin, told, _ in known], CAUTIOUS)
    kin, _, (of_family, of_spec) = known[0]
    spec, family = tree.expect(GroupPath(kin.family, kin.spec, "new")), tree.expect(GroupPath(kin.family, "new", "new"))
    stranger = tree.expect(GroupPath("new", "new", "new"))
    assert spec.mean[SPEED] == pytest.approx(of_spec, abs=0.15)
    assert family.mean[SPEED] == pytest.approx(of_family, abs=0.5)
    doubts = [prior.deviation[SPEED] for prior in (spec, family, stranger)]
    assert doubts == sorted(doubts) and doubts[0] < 0.3 and 0.2 < doubts[1] < 0.8 and doubts[2] > 0.8


def test_the_promised_doubt_is_kept() -> None:
    """Over jobs of specs that were not heard, the expectation is off by about as much as it says."""
    off = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        known = jobs(rng, 8, 3)
        tree = Tree([(kin, told) for kin, told, _ in known], CAUTIOUS)
        for kin, _, (of_family, _) in known[::9]:
            prior = tree.expect(GroupPath(kin.family, "new", "new"))
            true = of_family + rng.normal(0.0, 0.3) + rng.normal(0.0, 0.05)
            off.append((true - prior.mean[SPEED]) / prior.deviation[SPEED])
    assert 0.65 < float(np.mean(np.abs(off) <= 1.2816)) < 0.95


def test_a_greater_lie_moves_nobody_further() -> None:
    """One user's jobs in another's family and spec move that one's expectation by a bounded amount, its own most."""
    honest = [(GroupPath("f", "s", f"user{i}"), heard(5.0 + 0.02 * i)) for i in range(4)]

    def expected(lie: float, mine: str) -> float:
        lies = [(GroupPath("f", "s" if i % 2 else f"s{i}", "liar"), heard(lie)) for i in range(40)]
        return float(Tree([*honest, *lies], CAUTIOUS).expect(GroupPath("f", "s", mine)).mean[SPEED])

    assert abs(expected(20.0, "new") - 5.0) < 1.0
    assert abs(expected(50.0, "new") - expected(20.0, "new")) < 0.3
    assert expected(20.0, "liar") > 10.0
    assert abs(expected(20.0, "user1") - 5.0) < 0.5


def test_who_has_measured_nothing_changes_nothing() -> None:
    """No jobs: what was believed. Jobs without measurements: no surer than that."""
    assert Tree([], CAUTIOUS).expect(GroupPath(None, None, "")) is CAUTIOUS
    empty = fit_all([(points_of([], 32.0), 32.0, CAUTIOUS)])[0]
    prior = Tree([(GroupPath(1, 2, "a"), JobEvidence.of(empty))] * 3, CAUTIOUS).expect(GroupPath(1, 2, "a"))
    assert np.isfinite(prior.mean).all() and (prior.deviation > 0.2).all()


def _measured(rng: np.random.Generator, noise: float) -> Fit:
    lines = [measured(n, 50.0 * n**0.8 * rng.lognormal(0, noise), time=float(n)) for n in (1, 2, 4, 8)]
    return fit_all([(points_of(lines, 64.0), 64.0, CAUTIOUS)])[0]


def test_widths_follow_what_came() -> None:
    """Jobs that do as expected make intervals narrower, those that do not wider; a few jobs hardly either."""
    rng = np.random.default_rng(0)
    kin = [GroupPath("f", "s", f"user{i}") for i in range(40)]
    sure, unsure = (found_widths([(one, _measured(rng, noise)) for one in kin], CAUTIOUS)[0] for noise in (0.01, 0.4))
    assert sure < 0.7 and unsure > 1.3
    few = found_widths([(one, _measured(rng, 0.01)) for one in kin[:2]], CAUTIOUS)
    assert sure < few[0] <= 1.0
    assert found_widths([], CAUTIOUS) == (1.0, 1.0)


def test_a_factor_of_width_is_one_of_doubt() -> None:
    """Half the width is half the deviation, inside a node alone where that alone is half."""
    fit = _measured(np.random.default_rng(1), 0.05)
    at = np.array([1, 2]), np.array([16, 16]), np.array([1024, 1024])
    wide, narrow = MeasuredThroughput(fit), MeasuredThroughput(fit, widths=(0.5, 1.0))
    deviations = [np.sqrt(np.log1p(model.uncertainty(*at) ** 2)) for model in (wide, narrow)]
    assert deviations[1] / deviations[0] == pytest.approx([0.5, 1.0])
