"""What must never happen is noticed when it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_db import Store
from ones_wrapper.protocol import reports_name
from slurm_ones.simulate.invariants import violations
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World

WORK = Workload("one", (Submission("job", 0.0, "nlp", 1, 16, elastic=True),), {"nlp": build(KINDS["bert-glue"])})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(WORK, ClusterSpec(1, 4), tmp_path, ClusterSettings())


def test_a_job_that_has_not_ended_or_is_held(world: World, store: Store) -> None:
    world.pass_time(60)
    assert any("job 1 is RUNNING at the end" in fault for fault in violations(world, store))
    world.cluster.requeue(1, hold=True)
    world.pass_time(60)
    assert any("job 1 is PENDING at the end, held by user" in fault for fault in violations(world, store))


def test_a_job_that_somebody_cancelled(world: World, store: Store) -> None:
    world.pass_time(60)
    world.cluster.cancel(1)
    assert any("job 1 ended CANCELLED" in fault for fault in violations(world, store))


def test_a_database_that_knows_nothing_of_a_job(world: World, store: Store) -> None:
    world.pass_time(20_000)
    assert world.done
    assert violations(world, store) == ["job 1 is not in the database"]


@pytest.mark.parametrize(("kind", "words"), [("epoch", "samples from"), ("throughput", "samples from")])
def test_samples_that_were_skipped(world: World, store: Store, kind: str, words: str) -> None:
    world.pass_time(20_000)
    path = world.directory / "ones-1" / reports_name(0)
    lines = path.read_bytes().splitlines(keepends=True)
    left_out = next(i for i, line in enumerate(lines) if f'"kind":"{kind}"'.encode() in line)
    path.write_bytes(b"".join(lines[:left_out] + lines[left_out + 1 :]))
    assert any(words in fault for fault in violations(world, store))


def test_a_run_that_goes_on_elsewhere_than_at_its_checkpoint(world: World, store: Store) -> None:
    world.pass_time(700)
    world.cluster.requeue(1, hold=False)
    world.pass_time(20_000)
    assert world.done
    path = world.directory / "ones-1" / reports_name(0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"kind":"checkpoint"' not in line))
    assert any("run 1 goes on at" in fault for fault in violations(world, store))
