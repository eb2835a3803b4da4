"""Which jobs may be resized: each refusal says what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from ones_db.shape import Shape
from slurm_ones.jobs.elastic import Elastic, elastic_job
from slurm_ones.slurm.model import Job, Node, Partition, Snapshot
from tests.slurm.make import job_of

NODES = {
    **{f"n{i}": Node(f"n{i}", "IDLE", True, 4, 0, ("gpu",), True) for i in (1, 2)},
    **{f"w{i}": Node(f"w{i}", "IDLE", True, 0, 0, ("whole",), True) for i in (1, 2)},
}
PARTITIONS = {
    "gpu": Partition("gpu", True, ("n1", "n2"), 0.0, 0, False),
    "whole": Partition("whole", True, ("w1", "w2"), 0.0, 0, True),
}


def elastic(job: Job, *, whole_node_gpus: dict[str, int] | None = None, own_uid: int | None = None) -> Elastic | None:
    return elastic_job(job, Snapshot(0.0, {job.job_id: job}, NODES, PARTITIONS), whole_node_gpus or {}, own_uid)


def test_a_job_that_did_not_opt_in_is_not_seen() -> None:
    """It is never touched, so it is nothing at all."""
    assert elastic(job_of(Shape(1, 1), comment="mine")) is None


def test_a_job_that_may_be_resized() -> None:
    """What its owner allows, in GPUs."""
    found = elastic(job_of(Shape(2, 4)))
    assert found is not None
    assert (found.refusal, found.shape, found.gpu_range, found.whole_nodes) == (None, Shape(2, 4), (1, 16), False)


def test_nodes_are_counted_in_gpus() -> None:
    """`nodes=` counts full nodes of the partition."""
    found = elastic(job_of(Shape(1, 4), comment="ones: nodes=1-2"))
    assert found is not None
    assert found.gpu_range == (4, 8)


def test_whole_nodes_take_their_gpus_from_the_settings() -> None:
    """Slurm knows of none there."""
    job = job_of(Shape(2, 0), partitions=("whole",), comment="ones: nodes=1-2")
    found = elastic(job, whole_node_gpus={"whole": 4})
    assert found is not None
    assert (found.refusal, found.shape, found.gpu_range, found.whole_nodes) == (None, Shape(2, 4), (4, 8), True)


def test_a_waiting_job_of_several_partitions_is_judged_by_the_first() -> None:
    """Until Slurm has chosen one."""
    found = elastic(job_of(Shape(1, 1), partitions=("gpu", "whole")))
    assert found is not None
    assert found.refusal is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"comment": "ones: gpus=many"}, ("its comment is not understood", "'gpus=many'", "such as 1-16")),
        ({"array": True}, ("heterogeneous jobs", "submit it as a job of its own")),
        ({"batch": False}, ("interactive", "submit it with sbatch")),
        ({"requeue": False}, ("--requeue", "scontrol update JobId=… Requeue=1")),
        ({"task_counts": True}, ("task counts", "leave out --ntasks")),
        ({"gpus_per_node": 0, "gpus_total": 2}, ("per job, not per node", "--nodes and --gres=gpu:N")),
        ({"kind": "a100,v100"}, ("GPUs of several types", "--gres=gpu:TYPE:N")),
        ({"partitions": ("whole",), "gpus_per_node": 0}, ("no GPUs in partition whole", "whole_node_gpus.whole")),
        ({"comment": "ones: gpus=1-4 resize=off"}, ("resize=off", "measured")),
        ({"partitions": ("gone",)}, ("no GPUs in partition gone", "whole_node_gpus.gone")),
    ],
)
def test_a_refusal_says_why_and_what_to_do(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """Its owner reads it in `slurm-ones why`."""
    found = elastic(job_of(Shape(1, 1), **changes) if "gpus_per_node" not in changes else _without_gpus(changes))
    assert found is not None
    for word in words:
        assert word in str(found.refusal)


def _without_gpus(changes: dict[str, Any]) -> Job:
    return job_of(Shape(1, 0), **{key: value for key, value in changes.items() if key != "gpus_per_node"})


def test_another_users_job_is_left_alone_in_user_mode() -> None:
    """And resized in operator mode."""
    refused = elastic(job_of(Shape(1, 1)), own_uid=2002)
    assert refused is not None
    assert "belongs to alice" in str(refused.refusal)
    for uid in (2001, None):
        allowed = elastic(job_of(Shape(1, 1)), own_uid=uid)
        assert allowed is not None
        assert allowed.refusal is None
