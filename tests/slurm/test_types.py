"""Types of GPUs on real Slurms: what clients read of jobs, and that a resized job keeps the type that it asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import GIVES_TYPES, NotResizable, Refused
from slurm_ones.slurm.model import SlurmJob
from tests.cluster.sites import GRES_TYPED, OLD_TYPED
from tests.conftest import start
from tests.slurm.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


@pytest.fixture(scope="module", params=[GRES_TYPED, OLD_TYPED], ids=lambda site: site.name)
def slurm_typed(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Node t1 with GPUs of type 2080ti, t2 and t3 of type a100."""
    cluster = start(request, request.param)
    site = Site(cluster, "pyslurm" if cluster.pyslurm else "command")
    yield site
    site.close()
    cluster.stop()


@pytest.fixture
def typed(slurm_typed: Site) -> Iterator[Site]:
    """Its jobs end with the test."""
    yield slurm_typed
    slurm_typed.clear()


def asked(job: SlurmJob) -> tuple[int, int, str]:
    return job.nodes, job.gpus_per_node, job.kind


@pytest.mark.parametrize("form", ["--gres=gpu:a100:1", "--gpus-per-node=a100:1"])
def test_a_waiting_job_keeps_its_type(typed: Site, form: str) -> None:
    """By every way of reading it; and it waits where too few nodes have that type."""
    job_id = typed.held("--nodes=1", form)
    for wanted in (Shape(2, 2), Shape(1, 4), Shape(3, 1)):
        typed.owner.reshape(job_id, wanted)
        shown = (wanted.nodes, wanted.gpus_per_node, "a100")
        assert asked(typed.owner.job(job_id)) == asked(typed.owner.snapshot().jobs[job_id]) == shown
    typed.owner.release(job_id)
    typed.wait(job_id, lambda job: job.reason == "BadConstraints", "refused three nodes of that type")


def test_a_requeued_job_runs_on_its_type(typed: Site) -> None:
    """It runs on both nodes that have it, and never on the third."""
    job_id = typed.requeued("--nodes=1", "--gres=gpu:a100:4")
    typed.owner.reshape(job_id, Shape(2, 3))
    assert asked(typed.owner.job(job_id)) == (2, 3, "a100")
    typed.owner.release(job_id)
    job = typed.wait(job_id, lambda job: job.running, "RUNNING")
    assert job.node_list == ("t2", "t3")
    assert asked(job) == (2, 3, "a100")


def test_a_type_that_begins_with_a_digit(typed: Site) -> None:
    job_id = typed.held("--nodes=1", "--gres=gpu:2080ti:1")
    typed.owner.reshape(job_id, Shape(1, 3))
    assert asked(typed.owner.job(job_id)) == (1, 3, "2080ti")
    typed.owner.release(job_id)
    assert typed.wait(job_id, lambda job: job.running, "RUNNING").node_list == ("t1",)


@pytest.mark.parametrize("form", ["--gres=gpu:a100:1", "--gpus-per-node=a100:1"])
def test_another_type(typed: Site, form: str) -> None:
    """A requeued job runs on GPUs of another type; 22.05 takes that, and never starts it. Of a type that there is not
    Slurm says so once it looks."""
    job_id = typed.requeued("--nodes=1", form)
    typed.owner.reshape(job_id, Shape(1, 2), kind="2080ti")
    assert asked(typed.owner.job(job_id)) == asked(typed.owner.snapshot().jobs[job_id]) == (1, 2, "2080ti")
    typed.owner.release(job_id)
    if typed.is_old:
        typed.wait(job_id, lambda job: job.never_starts, "refused to start it")
        return
    assert typed.wait(job_id, lambda job: job.running, "RUNNING").node_list == ("t1",)
    job_id = typed.held("--nodes=1", form)
    typed.owner.reshape(job_id, Shape(1, 1), kind="h100")
    typed.owner.release(job_id)
    typed.wait(job_id, lambda job: job.never_starts, "refused a type that no node has")


def test_the_types_of_nodes(typed: Site) -> None:
    """As Slurm has them."""
    nodes = {node.name: node.kind for node in typed.owner.snapshot().nodes.values()}
    assert nodes == {"t1": "2080ti", "t2": "a100", "t3": "a100"}


def test_a_type_for_a_job_that_asked_for_none(typed: Site) -> None:
    """26.05 gives it one, and takes it back; 22.05 refuses, and the job asks for what it did."""
    job_id = typed.held("--nodes=1", "--gres=gpu:1")
    if typed.is_old:
        with pytest.raises(Refused, match="with and without type identification"):
            typed.owner.reshape(job_id, Shape(1, 2), kind="a100")
        assert asked(typed.owner.job(job_id)) == (1, 1, "")
        assert typed.owner.version() < GIVES_TYPES
        return
    assert typed.owner.version() >= GIVES_TYPES
    for kind, gpus in (("a100", 2), ("", 1), ("2080ti", 1)):
        typed.owner.reshape(job_id, Shape(1, gpus), kind=kind)
        assert asked(typed.owner.job(job_id)) == (1, gpus, kind)
    typed.owner.release(job_id)
    assert typed.wait(job_id, lambda job: job.running, "RUNNING").node_list == ("t1",)


def test_several_types_are_left_alone(typed: Site) -> None:
    """The job asks for what it did."""
    job_id = typed.held("--nodes=1", "--gres=gpu:a100:1,gpu:2080ti:1")
    with pytest.raises(NotResizable, match="several types"):
        typed.owner.reshape(job_id, Shape(2, 2))
    assert asked(typed.owner.job(job_id)) == (1, 2, "2080ti,a100")


def test_an_update_without_the_type(typed: Site) -> None:
    """22.05 refuses it, and 26.05 forgets the type: the job then runs wherever there is room first."""
    job_id = typed.held("--nodes=1", "--gres=gpu:a100:1")
    said = typed.tell("scontrol", "update", f"JobId={job_id}", "Gres=gpu:2")
    if typed.is_old:
        assert "with and without type identification" in said
    else:
        assert said == ""
    assert asked(typed.owner.job(job_id)) == ((1, 1, "a100") if typed.is_old else (1, 2, ""))
