"""Seeded faults against the unchanged companion: kept seeds, a fresh range, and mutants that must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.kinds import PEOPLE, Kind
from tests.faults.plan import Plan
from tests.faults.run import run
from tests.simulate.mutants import MUTANTS

KEPT = {
    12: "a drain called off, whose end was not stored, was ordered again under its old number",
    64: "a waiting job was left at a shape that Slurm takes and never starts",
    70: "an order got a lower number than the one before, the clock having been set back",
    91: "a drain was waited for until a clock that was set back came round again",
    59: "a drained job trained on when a new companion repeated its order",
    2120: "a drained job trained on, and its reports were from the future, the companion's clock being behind",
    1177: "a job was requeued that had been told to train on, the end of its resize not being stored",
    1277: "the same after a full disk of the database",
    3563: "the same, the companion's clock being behind the job's",
    1027: "a job that no longer opts in kept its old count of restarts in the database",
    1282: "a job that waits for its owner's --begin was left at a shape that Slurm takes and never starts",
    3206: "an old shape was not believed, Slurm's word about the new one being still there",
    4101: "Slurm took a shape that it never starts, and refused the old one: it was asked for that once only",
    4563: "an operator's hold between ours and the update left a job at a shape that Slurm takes and never starts",
}
"""Seeds that once broke an invariant, and how."""

FRESH = 5
"""Seeds that nobody has tried."""


@pytest.mark.parametrize("seed", KEPT, ids=str)
def test_what_was_mended_stays_mended(seed: int) -> None:
    assert run(Plan.of(seed)).broken == ()


def test_fresh_seeds(seed: int) -> None:
    """The run's seed and those after it."""
    found = {result.seed: result.broken for result in (run(Plan.of(seed + i)) for i in range(FRESH)) if result.broken}
    assert not found, f"replay with: python benchmarks/faults.py --verbose --seed {min(found)}"


def test_a_seed_gives_the_same_run_again() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        run(Plan.of(seed), lines.append)
        return lines

    first = told(7)
    assert len(first) > 20
    assert told(7) == first


def _hard(seed: int, kind: Kind, companions: int) -> Plan:
    """A seed's plan in which that kind of fault strikes often, and nothing else but deaths."""
    plan = replace(Plan.of(seed), policy="restless", companions=companions, ticks=16, happenings=(), meddling=0.0)
    if kind in PEOPLE:
        return replace(plan, people=(kind,), meddling=0.05, rates={})
    return replace(plan, rates={Kind.CRASH: 0.02, kind: 0.2})


CAUGHT = {
    "no reading back of a reshape": (Kind.UPDATE_IN_PART, 1),
    "no release after a refused update": (Kind.UPDATE_REFUSED, 1),
    "a requeue without a checkpoint": (Kind.STORE_BUSY, 1),
    "an owner who is not heard": (Kind.RESIZE_OFF, 1),
    "a leader that does not ask whether it leads": (Kind.PAUSED, 2),
    "a resize that a new companion does not take up": (Kind.CRASH, 1),
}
WITHIN = 12
"""Seeds within which each mutant is found."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_companion_with_a_safeguard_left_out_is_found(mutant: str) -> None:
    kind, companions = CAUGHT[mutant]
    for seed in range(1, WITHIN + 1):
        plan = _hard(seed, kind, companions)
        with MUTANTS[mutant]():
            found = run(plan).broken
        if found:
            assert not run(plan).broken, "the companion as it is does not keep this seed either"
            return
    pytest.fail(f"not found within {WITHIN} seeds")
