"""Limits that protect people, on a real Slurm: reserved and drained nodes are nobody's, and limits of Slurm's own are
known before a job is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ones_wrapper.launch.batch_shell import DIES
from ones_wrapper.protocol import Hello
from slurm_ones.slurm.model import SlurmJob
from tests.cluster.errors import ClusterError
from tests.cluster.sites import GRES_GUESTS
from tests.conftest import start
from tests.endtoend.harness import TEMPLATE, Harness

pytestmark = pytest.mark.cluster


def root(harness: Harness, *command: str) -> None:
    harness.cluster.run(list(command), user="root")


def gpus(job: SlurmJob) -> int:
    return job.nodes * job.gpus_per_node


def said(harness: Harness, settings: str, job_id: int) -> str:
    """What `slurm-ones why` says of a job's decisions."""
    return "; ".join(f"{d['reason']} ({d['outcome']})" for d in harness.why(settings, job_id)["decisions"])


@pytest.mark.nightly
def test_an_hour_is_not_lost_to_a_reservation(harness: Harness) -> None:
    """A job that would begin its limit again before a maintenance keeps what it has, and grows once that is called
    off."""
    elastic = harness.light("--nodes=1", "--gres=gpu:1", "--time=60", "--comment=ones: gpus=1-4 batch=16-64")
    harness.trains(elastic)
    names = ",".join(_nodes(harness))
    create = ("scontrol", "create", "reservation", "ReservationName=window", "StartTime=now+30minutes", "Duration=180")
    root(harness, *create, "Users=root", "Flags=maint,ignore_jobs", f"Nodes={names}")
    settings = harness.settings()
    try:
        with harness.running(settings, "--act", "--own"):
            harness.ticks(settings, 6)
            job = harness.job(elastic)
            assert (job.restart, gpus(job), job.running) == (0, 1, True)
            words = said(harness, settings, elastic)
            assert "could not start again within its time limit: reservation window begins at" in words
            root(harness, "scontrol", "delete", "ReservationName=window")
            harness.wait(elastic, lambda job: job.running and gpus(job) == 4, "grown once there is no reservation")
    finally:
        with suppress(ClusterError):
            root(harness, "scontrol", "delete", "ReservationName=window")


@pytest.fixture
def enforcing(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A site that enforces limits."""
    cluster = start(request, GRES_GUESTS)
    yield Harness(cluster)
    cluster.stop()


@pytest.mark.nightly
def test_growth_stays_within_a_limit_of_the_account(enforcing: Harness) -> None:
    """GrpTRES, of which another user's job holds a part: the job grows into the rest, once, and waits for nothing."""
    harness = enforcing
    if not harness.cluster.accounting:
        pytest.skip("there is no accounting")
    rigid = harness.rigid("--nodes=1", "--gres=gpu:2")
    harness.wait(rigid, lambda job: job.running, "running")
    root(harness, "sacctmgr", "-i", "modify", "account", "lab", "set", "grptres=gres/gpu=5")
    try:
        elastic = harness.light("--nodes=1", "--gres=gpu:1", "--comment=ones: gpus=1-4 batch=16-64")
        harness.trains(elastic)
        settings = harness.settings()
        with harness.running(settings, "--act", "--own"):
            grown = harness.wait(elastic, lambda job: job.running and gpus(job) > 1, "grown")
            harness.trains(elastic, restart=grown.restart)
            harness.ticks(settings, 6)
            job = harness.job(elastic)
            assert (job.restart, job.running) == (1, True) and 1 < gpus(job) <= 3
            assert "Slurm lets account lab hold 5 GPUs at once" in said(harness, settings, elastic)
        resizes = harness.why(settings, elastic)["resizes"]
        assert [one["state"] for one in resizes] == ["done"], resizes
    finally:
        root(harness, "sacctmgr", "-i", "modify", "account", "lab", "set", "grptres=gres/gpu=-1")


def _nodes(harness: Harness) -> list[str]:
    return harness.cluster.run(["sinfo", "-h", "-N", "-p", "gpu", "-o", "%N"], user="root").stdout.split()


@pytest.mark.nightly
@pytest.mark.parametrize("by_slurm", [True, False], ids=["the warning", "scancel"])
def test_a_batch_script_without_exec(harness: Harness, by_slurm: bool) -> None:
    """Protects whoever forgets `exec`: ones-run says so at its start, and once USR2 has killed its shell it requeues
    the job, which goes on from its last checkpoint."""
    folder = harness.folder("no-exec")
    (folder / "job.sbatch").write_text(TEMPLATE.read_text().replace("exec ones-run", "ones-run"))
    warning = f"--signal=B:USR2@{200 if by_slurm else 60}"
    options = ("--comment=ones: gpus=1 batch=16", "--cpus-per-gpu=1", "--time=5", warning)
    job_id = harness.submit(template=Path(f"/scratch/{folder.name}/job.sbatch"), options=options)
    harness.trains(job_id)
    assert DIES in harness.log(job_id)
    if not by_slurm:
        harness.cluster.run(["scancel", "--batch", "--signal=USR2", str(job_id)])
    harness.wait(job_id, lambda job: job.restart == 1 and job.running, "requeued")  # failed, for a moment
    harness.trains(job_id, restart=1)
    (again,) = [report for report in harness.reports(job_id, 1) if isinstance(report, Hello)]
    assert again.step > 0 and again.checkpoint, again
    assert "the job's time is over: requeue 1 of 20" in harness.log(job_id)
