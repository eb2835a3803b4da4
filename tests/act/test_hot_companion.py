"""The whole companion over simulated jobs of blocks: what the engine's invariants say of it."""

from __future__ import annotations

from collections import Counter

import pytest

import slurm_ones.simulate.run as engine
from ones_db import ResizeRecord, Store
from slurm_ones.rules.blocks import BLOCKS
from slurm_ones.simulate.training.application import Hot
from slurm_ones.simulate.world import World as Simulated
from tests.marks import nightly
from tests.simulate.harness import RandomFaults
from tests.simulate.test_engine import with_changing_policy, workload


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        nightly(RandomFaults()),
        RandomFaults(unreachable=0.1, refused=0.05, partial=0.05),
        nightly(RandomFaults(node_mtbf_s=2000.0)),
    ],
    ids=["quiet", "odd Slurm", "failing nodes"],
)
def test_jobs_of_blocks_change_at_every_tick(monkeypatch: pytest.MonkeyPatch, faults: RandomFaults) -> None:
    """None is lost, left held or at odds with the database, and none that runs is ever requeued for it; beside a job
    that cannot be resized."""
    found: list[ResizeRecord] = []
    before = engine.violations

    def violations(world: Simulated, store: Store) -> list[str]:
        found.extend(store.resizes())
        return before(world, store)

    monkeypatch.setattr(engine, "violations", violations)
    with_changing_policy(workload(4, rigid=(2,)), faults, mechanism=Hot(launch_s=30.0), interval_s=15.0)
    states = Counter(resize.state for resize in found if resize.mechanism == BLOCKS)
    assert states["done"] >= 5 and states["done"] > states["rolled_back"]
    assert all(resize.restart == -1 for resize in found if resize.mechanism != BLOCKS)
