"""A long training in blocks on a real Slurm, disturbed in every way that is foreseen, ends where one ends that is not.

No run is requeued, each sample is used once, and the parameters are those of plain PyTorch in one process.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ones_wrapper.files.node_memory import COPY_STEPS
from ones_wrapper.protocol import Bye, Checkpoint, Hello, Membership, Note, Report
from slurm_ones.act.transitions import State
from tests.cluster import Cluster
from tests.endtoend.block_site import SITES, Site, sites
from tests.endtoend.harness import BLOCKS, TRAIN, WHOLE_NODE_BLOCKS, Harness, processes
from tests.endtoend.test_blocks_light import nobody_left_held_or_running
from tests.waiting import until
from tests.wrapper.reference import batches_by_step, train
from tests.wrapper.runs import assert_exactly_once

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SAMPLES, GAMMA = 203, 0.99
OPTIONS = ("--comment=ones: gpus=1-8 batch=16-64 array=blocks", "--time=30")


@pytest.fixture(params=sites())
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site.of(request, request.param, gpus=1)
    yield site
    site.harness.clear()


class Training:
    """One job of blocks that trains with PyTorch, and what it left."""

    def __init__(
        self, site: Site, epochs: int, *more: str, step_ms: int = 200, apart: bool = False, **env: str
    ) -> None:
        """With `apart`, nodes have memory of their own: a folder for each emulates it, since all are one machine."""
        self.site, self.epochs = site, epochs
        self.harness = harness = site.harness
        self.folder = harness.folder("traces")
        inside = f"/scratch/{self.folder.name}"
        arguments = ["--epochs", epochs, "--samples", SAMPLES, "--batch", 16, "--step-ms", step_ms, "--gamma", GAMMA]
        arguments += [*more, "--hurry", f"{inside}/hurry", "--out", f"{inside}/out.json"]
        env |= {"ONES_TRACE": f"{inside}/trace-{{restart}}-{{rank}}.jsonl"}
        options, env = site.asked((*OPTIONS, *(() if site.whole else ("--cpus-per-gpu=1",))), env)
        template = WHOLE_NODE_BLOCKS if site.whole else BLOCKS
        if apart:
            memory = f'export ONES_MEMORY="{inside}/memory-$SLURMD_NODENAME"; mkdir -p "$ONES_MEMORY"'
            (self.folder / "apart.sbatch").write_text(template.read_text().replace("exec ones", f"{memory}\nexec ones"))
            template = Path(inside) / "apart.sbatch"
        self.job_id = harness.submit(str(TRAIN), *map(str, arguments), options=options, template=template, **env)
        self.settings = site.settings("max_wait_s = 60\ndwell_s = 0")
        harness.membership(self.job_id, lambda m: m.why == "first", "first membership")

    def sizes(self, *gpus: int, batch: int = 32, timeout_s: float = 240.0) -> Membership:
        """Have a companion bring the job to these sizes."""
        self.site.resize(self.settings, {self.job_id: [[0, size, batch] for size in gpus]}, timeout_s)
        return self.member(lambda m: m.world == gpus[-1], f"membership of {gpus[-1]} GPUs")

    def member(self, holds: object, what: str, timeout_s: float = 60.0) -> Membership:
        return self.harness.membership(self.job_id, holds, what, timeout_s)  # type: ignore[arg-type]

    def after(self, before: Membership, what: str, timeout_s: float = 90.0) -> Membership:
        """The first membership after that one in which the job has trained on."""
        return self.member(lambda m: m.generation > before.generation, what, timeout_s)

    def block_of(self, task: int) -> list[int]:
        """Process ids of the ranks of a running block, the ranks last."""
        named = [f"SLURM_ARRAY_JOB_ID={self.job_id}", f"SLURM_ARRAY_TASK_ID={task}"]
        return processes(self.harness.cluster, named)

    def kill_rank(self, task: int) -> None:
        """SIGKILL to a rank of the block."""
        os.kill(self.block_of(task)[-1], signal.SIGKILL)

    def end(self) -> Sequence[Sequence[Report]]:
        """Let it hurry to its end, and judge it; the reports of all its terms."""
        harness, job_id = self.harness, self.job_id
        (self.folder / "hurry").touch()
        harness.ended(job_id, within_s=300.0)
        states = {t.state for t in harness.tasks(job_id).values()}
        assert states <= {"COMPLETED", "CANCELLED"}, f"{harness.tasks(job_id)}\n{harness.log(job_id)[-6000:]}"
        count = len(list(harness.directory(job_id).glob("reports-*.jsonl")))
        runs = [harness.reports(job_id, term) for term in range(count)]
        byes = [report.reason for reports in runs for report in reports if isinstance(report, Bye)]
        assert byes[-1] == "finished", byes
        begun = [report.step for reports in runs[1:] for report in reports if isinstance(report, Hello)]
        assert all(step > 0 for step in begun), f"trained again from the beginning: {begun}"
        generations = [m.generation for m in harness.memberships(job_id)]
        assert generations == sorted({*generations}), "two memberships of one generation"
        assert_exactly_once(self.folder, self.epochs, SAMPLES)
        out = json.loads((self.folder / "out.json").read_text())["parameters"]
        found = torch.tensor(out, dtype=torch.float64)
        expected = train(self.epochs, SAMPLES, GAMMA, batches_by_step(runs))
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
        return runs


def test_blocks_join_and_leave_while_it_trains(site: Site) -> None:
    """1 → 2 → 4 → 1 GPUs, and a batch that changes with them."""
    training = Training(site, 80, step_ms=400)
    training.sizes(2, 4, batch=32)
    training.sizes(1, batch=16)
    nobody_left_held_or_running(site, training.job_id)
    training.end()
    told = site.harness.memberships(training.job_id)
    assert [m.world for m in told] == [1, 2, 4, 1], told
    # The machine may stop one of them for a while; a fault makes all of a kind long.
    assert sorted(m.pause_s for m in told[1:])[1] < 5 and all(m.pause_s < 20 for m in told)
    assert [m.why for m in told] == ["first", "order", "order", "order"]
    command = ["squeue", "-h", "--states=all", f"--jobs={training.job_id}", "-o", "%A"]
    records = {*map(int, site.harness.cluster.run(command, user="root").stdout.split())}
    with site.harness.store(training.settings) as store:
        assert [r.state for r in store.resizes(training.job_id)] == [State.DONE] * 3
        # None of its tasks is a job of its own.
        assert len(records) > 1 and {*store.jobs()} & records <= {training.job_id} <= {*store.jobs()}


@pytest.mark.nightly
@pytest.mark.parametrize("where", sites(whole=True))
def test_a_sharded_model_over_a_block_of_two_nodes(request: pytest.FixtureRequest, where: str) -> None:
    """Protects terms whose ranks several launchers start, each on a node of its own: a model sharded by FSDP2 on one
    node is joined by a block of two, goes on with those alone, and is replaced by one node again."""
    site = Site.of(request, where, gpus=1)
    try:
        training = Training(site, 100, "--sharded")
        training.sizes(3, 2, batch=32)
        nodes = {task: one.nodes for task, one in site.harness.tasks(training.job_id).items() if one.state == "RUNNING"}
        training.sizes(1, batch=16)
        training.end()
        told = site.harness.memberships(training.job_id)
        assert [(m.nodes, m.world) for m in told] == [(1, 1), (3, 3), (2, 2), (1, 1)], told
        assert nodes == {told[2].blocks[0]: 2} and len(told[1].blocks) == 2
        assert all(m.pause_s < 20 and not m.bytes for m in told)
    finally:
        site.harness.clear()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("where", "apart"), [*((one, False) for one in SITES), *((one, True) for one in SITES if one.endswith("whole"))]
)
def test_a_sharded_model_starts_from_the_memory_of_its_nodes(
    request: pytest.FixtureRequest, where: str, apart: bool
) -> None:
    """Protects terms of blocks that share a node's memory, as the tests' nodes of one block do, and of blocks on nodes
    with memory of their own, which fetch: no term waits for a checkpoint on the disk, nor gives up a step."""
    site = Site.of(request, where, gpus=1)
    try:
        training = Training(site, 100, "--sharded", apart=apart)
        training.sizes(2, batch=32)
        training.sizes(3, batch=32)
        training.sizes(1, batch=16)
        runs = training.end()
        hellos = [report for reports in runs for report in reports if isinstance(report, Hello)]
        assert [bool(one.step) for one in hellos] == [False, True, True, True]
        assert [one.checkpoint for one in hellos] == ["", "", "", ""], hellos
        nodes = list(training.folder.glob("memory-*"))
        assert len(nodes) == (3 if apart else 0) and not any(list(node.iterdir()) for node in nodes)
    finally:
        site.harness.clear()


@pytest.mark.nightly
@pytest.mark.parametrize("where", [one for one in SITES if one.endswith("whole")])
def test_a_sharded_model_goes_on_from_a_copy(request: pytest.FixtureRequest, where: str) -> None:
    """Protects the steps since the disk's last checkpoint from the loss of a node's launcher and rank."""
    site = Site.of(request, where, gpus=1)
    try:
        training = Training(site, 100, "--sharded", apart=True, **{COPY_STEPS: "3"})
        harness, job_id = site.harness, training.job_id
        at = training.sizes(2, batch=32)

        def copied() -> Note | None:
            count = len(list(harness.directory(job_id).glob("reports-*.jsonl")))
            reports = [report for term in range(count) for report in harness.reports(job_id, term)]
            return next((one for one in reports if isinstance(one, Note) and "second copy" in one.note), None)

        until(copied, lambda: harness.log(job_id)[-3000:])
        rank = training.block_of(at.blocks[1])[-1]
        for pid in (int(Path(f"/proc/{rank}/stat").read_text().rsplit(")", 1)[1].split()[1]), rank):
            os.kill(pid, signal.SIGKILL)
        training.after(at, "membership after a lost node")
        runs = training.end()
        hellos = [report for reports in runs for report in reports if isinstance(report, Hello)]
        saved = [report.step for report in runs[1] if isinstance(report, Checkpoint)]
        assert hellos[2].step > max(saved) and hellos[2].checkpoint == "", hellos
    finally:
        site.harness.clear()


@pytest.mark.nightly
def test_a_training_that_loses_blocks_ends_where_one_that_does_not(site: Site) -> None:
    """Protects what blocks may break: grown, its leader cancelled by the owner, a member's rank killed, the leader's
    rank killed, a member cancelled, shrunk to one."""
    training = Training(site, 400)
    harness, job_id = site.harness, training.job_id
    at = training.sizes(2, 4, batch=32)

    # The owner cancels the leader: it hands over, and the others train on.
    harness.cluster.run(["scancel", f"{job_id}_{at.blocks[0]}"])
    at = training.after(at, "membership without its first leader")
    # Once its GPUs are free, one block more is best. Before, a node with four free GPUs would take over from all.
    until(lambda: harness.tasks(job_id)[0].state == "CANCELLED", lambda: f"end of {harness.tasks(job_id)[0]}")

    at = training.sizes(4, batch=48)
    training.kill_rank(at.blocks[-1])
    at = training.after(at, "membership after a killed rank")
    at = training.member(lambda m: len(m.blocks) >= 3, "membership of those that are left")

    training.kill_rank(at.blocks[0])
    at = training.after(at, "membership after a killed leader")

    at = training.sizes(2, 4, batch=48)
    harness.cluster.run(["scancel", f"{job_id}_{at.blocks[-1]}"])
    at = training.after(at, "membership without the cancelled block")

    training.sizes(2, 1, batch=16)
    training.end()


@pytest.mark.nightly
@pytest.mark.parametrize("site", ["gres owner", "old owner whole"], indirect=True)
def test_a_job_outlives_the_drain_of_its_node(site: Site) -> None:
    """A block elsewhere takes over, and the drained node is free."""
    training = Training(site, 200)
    harness = site.harness
    node = harness.tasks(training.job_id)[0].node_list
    try:
        harness.cluster.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test"], user="root")
        training.sizes(2, batch=32)
        training.sizes(1, batch=16)
        training.end()
    finally:
        harness.cluster.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], user="root")


@pytest.mark.nightly
def test_without_a_companion_it_is_a_plain_job(old: Cluster) -> None:
    """Task 0 trains; the others wait behind it, and are cancelled at its end. On 22.05."""
    harness = Harness(old)
    try:
        training = Training(Site(harness, owner=True), 6, step_ms=1000)
        assert {task: t.state for task, t in harness.tasks(training.job_id).items() if t.state == "RUNNING"} == {
            0: "RUNNING"
        }
        (runs,) = training.end()
        assert [r.blocks for r in runs if isinstance(r, Membership)] == [(0,)]
    finally:
        harness.clear()
