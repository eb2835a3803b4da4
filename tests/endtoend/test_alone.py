"""Elastic without a companion, on a real Slurm: 1 → 4 → 2 → 4 GPUs as a preemptible partition fills and empties."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import start
from tests.endtoend.block_site import Site
from tests.endtoend.harness import BLOCKS, LOOK_S, TRAIN, WAIT_S, Harness
from tests.waiting import until
from tests.wrapper.runs import samples_wrong, steps_undone

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
COMMENT = "ones: gpus=1-4 batch=16-64 array=blocks guests=partition:scavenge"
WORDS = ("--array=0-4%1", "--partition=gpu", f"--comment={COMMENT}")
SAMPLES = 640


@pytest.fixture(scope="module")
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    cluster = start(request, "gres-scavenge")
    yield Harness(cluster)
    cluster.stop()


@pytest.fixture(params=["CANCEL", "REQUEUE"])
def full(request: pytest.FixtureRequest, harness: Harness) -> Iterator[Harness]:
    """All nodes but the first are taken, and what is preempted ends so."""
    harness.cluster.run(["scontrol", "update", "PartitionName=scavenge", f"PreemptMode={request.param}"], user="root")
    for node in ("n2", "n3", "n4"):
        job_id = harness.rigid("--partition=gpu", f"--nodelist={node}", "--gres=gpu:4")
        harness.wait(job_id, lambda job: job.running, "running")
    yield harness
    harness.clear()


def test_one_command_on_a_login_node(full: Harness) -> None:
    """Where compute nodes have no commands of Slurm's; of its owner's alone, and of a comment that names a queue."""
    job_id = full.blocks(*WORDS, LIGHT_PATIENCE_S="0.5")
    full.membership(job_id, lambda m: m.why == "first", "the first membership")
    command = ["slurm-ones", "guests", str(job_id)]
    assert full.cluster.run(command, user="bob", check=False).returncode == 2
    assert "up to 3 blocks" in " ".join(full.cluster.run(command).stdout.split())
    full.membership(job_id, lambda m: m.world == 4, "4 GPUs")


def test_a_companion_takes_over(full: Harness) -> None:
    """It orders blocks of those that are there to leave, and others to join by its own settings: without guests."""
    job_id = full.blocks(*WORDS, LIGHT_GUESTS="1", LIGHT_PATIENCE_S="0.5")
    full.membership(job_id, lambda m: m.world == 4, "4 GPUs")
    site = Site(full, owner=True)
    site.resize(site.settings(), {job_id: [[0, 2, 32], [0, 4, 32]]})
    members = full.memberships(job_id)
    assert [m.world for m in members[-2:]] == [2, 4], members
    command = ["squeue", "-h", "--array", f"--jobs={job_id}", "--states=RUNNING", "-o", "%P"]
    # The base, a guest that stayed, and a block of two GPUs in the job's own queue.
    assert sorted(full.cluster.run(command).stdout.split()) == ["gpu", "gpu", "scavenge"]


def test_training_without_a_companion(full: Harness) -> None:
    """1 → 4 → 2 → 4: Slurm takes what it lent and gives it back, the base stays, and nothing is in a hold. Each sample
    of each epoch is used once, no step is taken again, and training hardly stands still."""
    folder = full.folder("alone")
    length = ("--epochs", "100000", "--samples", str(SAMPLES), "--batch", "32", "--step-ms", "50")
    env = {"ONES_TRACE": f"/scratch/{folder.name}/trace-{{restart}}-{{rank}}.jsonl"}
    job_id = full.submit(str(TRAIN), *length, options=WORDS, template=BLOCKS, **env)

    def has(gpus: int) -> None:
        full.membership(job_id, lambda m: m.world == gpus, f"{gpus} GPUs")
        assert not any(task.held for task in full.tasks(job_id).values())

    full.membership(job_id, lambda m: m.why == "first" or m.world > 1, "the first membership")
    has(4)
    spare = full.tasks(job_id)[4]
    assert (spare.state, spare.reason) == ("PENDING", "BeginTime")
    rigid = full.rigid("--partition=other", "--nodelist=n1", "--gres=gpu:2")
    full.wait(rigid, lambda job: job.running, "running")
    has(2)
    full.cluster.run(["scancel", str(rigid)], user="root")
    has(4)
    members = full.memberships(job_id)
    assert all(0 in m.blocks and 4 not in m.blocks for m in members), members
    pauses = [m.pause_s for m in members[1:]]
    print(f"pauses: {pauses}")
    epochs = len({m.step for m in full.memberships(job_id)})
    full.cluster.run(["scancel", "--full", "--signal=KILL", str(job_id)], user="alice", check=False)
    full.cluster.run(["scancel", str(job_id)], user="alice", check=False)
    until(lambda: not any(t.state == "RUNNING" for t in full.tasks(job_id).values()), "its end", WAIT_S, LOOK_S)
    whole, lost, repeated = samples_wrong(folder, SAMPLES)
    assert epochs and whole > 1
    assert (lost, repeated, steps_undone(folder)) == (0, 0, 0)
    assert max(pauses) < 1.0, pauses
