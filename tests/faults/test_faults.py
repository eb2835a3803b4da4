"""Seeded faults against the unchanged companion: kept seeds, a fresh range, and mutants that must be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ones_db.engine import OF_JOBS, transaction
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.reports import JobFiles
from slurm_ones.simulate.world import World
from tests.faults.faulty_world import FaultyWorld
from tests.faults.files import FaultyFiles
from tests.faults.kinds import BY_OTHERS, BY_PREEMPTION, FaultKind
from tests.faults.mutants import MUTANTS
from tests.faults.plan import INTERVAL_S, FaultPlan
from tests.faults.run import run
from tests.faults.store import FaultyStore
from tests.marks import NIGHTLY, nightly

pytestmark = pytest.mark.slow

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

KEPT_WITH_BLOCKS = {
    20260063: "a job that an operator held was cancelled: by a change taken back, who trained last was held by us",
    20270204: "a job's only block was requeued while it was to leave, and was held as if it had left",
    20280347: "a task that its owner held just before we held all that waited passed for ours, and was released later",
    20280299: "the same",
}
"""The same with jobs of blocks; `tests.faults.test_replay` has another."""
BY_NIGHT = frozenset({1277, 3563, 20260063, 20270204, 20280299})
"""Of all these the longest, and those that repeat another."""

FRESH = 5 if NIGHTLY else 1
"""Seeds of each kind; by night, nobody has tried them."""
KINDS = {
    "--plain": FaultPlan.of,
    "--blocks": FaultPlan.with_blocks,
    "--strategies": FaultPlan.with_strategies,
    "--guests": FaultPlan.with_guests,
}
"""Plans by the option of `benchmarks/faults.py`: most jobs are of blocks; or have a training strategy, outside of whose
limits none ever runs; or blocks are preempted, and others' jobs want the same nodes, CPUs and licences."""


@pytest.mark.parametrize(("faulty", "base"), [(FaultyWorld, World), (FaultyFiles, JobFiles)])
def test_faults_hook_into_the_simulation(faulty: type, base: type) -> None:
    """Protects fault runs from losing a hook unseen: each of these methods takes the place of one that is called."""
    hooks = {"_request", "_of_blocks", "_files", "_submit", "report", "flush", "open", "checkpoint", "newer_order"}
    overridden = hooks & vars(faulty).keys()
    assert overridden and overridden <= vars(base).keys()


@pytest.mark.parametrize("seed", [nightly(one) if one in BY_NIGHT else one for one in KEPT], ids=str)
def test_what_was_mended_stays_mended(seed: int) -> None:
    assert run(FaultPlan.of(seed)).violations == ()


@pytest.mark.parametrize("seed", [nightly(one) if one in BY_NIGHT else one for one in KEPT_WITH_BLOCKS], ids=str)
def test_what_was_mended_of_blocks_stays_mended(seed: int) -> None:
    assert run(FaultPlan.with_blocks(seed)).violations == ()


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_seeds(kind: str, seed: int) -> None:
    """The run's seed and those after it."""
    for one in range(seed, seed + FRESH):
        found = run(KINDS[kind](one)).violations
        assert not found, f"replay with: python benchmarks/faults.py {kind} --verbose --seed {one}"


def test_what_a_store_remembers_is_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    recall, compared = FaultyStore._recall, Counter[str]()

    def compare(store: FaultyStore, question: str, about: Collection[Any], ask: Callable[..., Any]) -> dict[Any, Any]:
        remembered = store._remembered(question).keys() & {*about}
        found = recall(store, question, about, ask)
        with transaction(store._engine) as connection:
            assert found == {one: answer for one, answer in ask(connection, [*about]).items() if one in found}, question
        compared[question] += len(remembered)
        return found

    monkeypatch.setattr(FaultyStore, "_recall", compare)
    by_night = (("--blocks", 1000024), ("--plain", 1000024)) if NIGHTLY else ()
    for kind, seed in (("--guests", 1000019), *by_night):
        assert run(KINDS[kind](seed)).violations == ()
    assert min(compared[question] for question in (*OF_JOBS, "open resizes", "live", "deferrals", "finished")) > 2


@pytest.mark.nightly
def test_a_companion_that_knows_no_strategies_is_found() -> None:
    """The invariant sees a job that runs at a size outside its limits, which its owner's range does not exclude."""
    with (
        mock.patch("slurm_ones.simulate.world.least_gpus", lambda app: 1),
        mock.patch("slurm_ones.rules.views.size_rules", lambda *known: ()),
        mock.patch("slurm_ones.rules.plan.breaks", lambda *given: None),
        mock.patch("slurm_ones.act.machine.breaks", lambda *given: None),
    ):
        found = (what for seed in range(1, 9) for what in run(FaultPlan.with_strategies(seed)).violations)
        assert any("its strategy cannot use" in what for what in found)


def test_a_seed_gives_the_same_run_again() -> None:
    def trace(seed: int) -> list[str]:
        lines: list[str] = []
        run(FaultPlan.of(seed), lines.append)
        return lines

    first = trace(7)
    assert len(first) > 20
    assert trace(7) == first


OF_BLOCKS = frozenset({"blocks released before the order", "a throttle lifted before the tasks are held"})
"""Mutants that only jobs of blocks find."""
OF_GUESTS = frozenset({"a base block in the queue of guests", "a guest that stays in place of base"})
"""Mutants that only jobs that grow by guests find."""


def _hard(seed: int, kind: FaultKind, companions: int, *, blocks: bool) -> FaultPlan:
    """A seed's plan in which that kind of fault is injected often, and nothing else but deaths."""
    plan = FaultPlan.with_blocks(seed) if blocks else FaultPlan.of(seed)
    plan = replace(plan, policy="random", companions=companions, ticks=16, events=(), interference=0.0)
    plan = replace(plan, interval_s=INTERVAL_S)
    if blocks:  # which need room beside them, and to have trained before they change
        return replace(plan, spec=ClusterSpec(4, 4), ticks=60, interval_s=10.0, rates={FaultKind.CRASH: 0.02})
    if kind in BY_OTHERS:
        return replace(plan, others=(kind,), interference=0.05, rates={})
    return replace(plan, rates={FaultKind.CRASH: 0.02, kind: 0.2})


def _with_guests(seed: int) -> FaultPlan:
    """A seed's plan in which jobs of others come and guests are preempted, and nothing else happens."""
    plan = FaultPlan.with_guests(seed)
    events = tuple(one for one in plan.events if one[1] in (FaultKind.OTHER_JOB, *BY_PREEMPTION))
    return replace(plan, policy="modest", companions=1, rates={}, interference=0.0, events=events)


CAUGHT = {
    "no reading back of a reshape": (FaultKind.UPDATE_IN_PART, 1, 2),
    "no release after a refused update": (FaultKind.UPDATE_REFUSED, 1, 3),
    "a requeue without a checkpoint": (FaultKind.STORE_BUSY, 1, 3),
    "an owner who is not heard": (FaultKind.RESIZE_OFF, 1, 2),
    "a leader that does not ask whether it leads": (FaultKind.PAUSED, 2, 1),
    "a resize that a new companion does not take up": (FaultKind.CRASH, 1, 5),
    "blocks released before the order": (FaultKind.CRASH, 1, 2),
    "a throttle lifted before the tasks are held": (FaultKind.CRASH, 1, 2),
    "a base block in the queue of guests": (FaultKind.OTHER_JOB, 1, 3),
    "a guest that stays in place of base": (FaultKind.OTHER_JOB, 1, 40),
}
"""The kind of fault that finds each mutant, the companions, and the first seed to try, as runs take seconds."""
MUTANTS_BY_DAY = frozenset(
    {
        "no reading back of a reshape",
        "an owner who is not heard",
        "a throttle lifted before the tasks are held",
        "a leader that does not ask whether it leads",
        "a base block in the queue of guests",
    }
)
"""One of each kind of plan: they show that a run sees what must not be."""
WITHIN = 12
"""Seeds from the first within which each mutant is found."""


@pytest.mark.parametrize("mutant", [one if one in MUTANTS_BY_DAY else nightly(one) for one in MUTANTS])
def test_a_companion_with_a_safeguard_left_out_is_found(mutant: str) -> None:
    kind, companions, first = CAUGHT[mutant]
    for seed in range(first, first + WITHIN):
        plan = _with_guests(seed) if mutant in OF_GUESTS else _hard(seed, kind, companions, blocks=mutant in OF_BLOCKS)
        with MUTANTS[mutant]():
            found = run(plan, to_the_first=True).violations
        if found:
            assert not run(plan).violations, "the companion as it is does not keep this seed either"
            return
    pytest.fail(f"not found within {WITHIN} seeds")
