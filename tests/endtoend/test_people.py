"""Who may have what done to whose jobs, on a real Slurm."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ones_wrapper.protocol import ORDERS, Checkpoint, Hello
from slurm_ones.act.transitions import State
from slurm_ones.slurm.model import SlurmJob
from tests.endtoend.harness import WAIT_S, Harness
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def resized(shape: tuple[int, int] | None = None) -> Callable[[SlurmJob], bool]:
    """Whether a job runs at another shape than 1x1, or at this one."""
    return lambda job: (
        job.running and ((job.nodes, job.gpus_per_node) == shape if shape else job.nodes * job.gpus_per_node > 1)
    )


def untouched(harness: Harness, *job_ids: int) -> None:
    """These jobs run as they were submitted, and nothing was ordered."""
    for job_id in job_ids:
        job = harness.job(job_id)
        assert job.running and not job.held and job.restart == 0 and (job.nodes, job.gpus_per_node) == (1, 1)
        assert not (harness.directory(job_id) / ORDERS).exists()


def outcomes(harness: Harness, settings: str, job_id: int, user: str = "alice") -> str:
    """What `slurm-ones why` says became of decisions and resizes."""
    told = harness.why(settings, job_id, user=user)
    return "; ".join([d["outcome"] for d in told["decisions"]] + [r["outcome"] for r in told["resizes"]])


@pytest.mark.nightly
def test_bobs_companion_cannot_touch_alices_job(harness: Harness) -> None:
    """Neither in user mode nor when bob tells his companion that everybody's jobs are his to look after."""
    job_id = harness.light()
    harness.trains(job_id)
    own = harness.settings("bob")
    with harness.running(own, "--act", "--own", user="bob"):
        harness.ticks(own)
    refusal = "it belongs to alice, and this companion looks after only its own user's jobs"
    assert harness.why(own, job_id, user="bob")["job"]["refusal"] == refusal
    untouched(harness, job_id)

    everybody = harness.settings("bob", scope='"all"')
    process = harness.scripted(everybody, {job_id: [[1, 2, 32]]}, user="bob")
    harness.resize_ended(everybody, job_id)
    process.terminate()
    assert "not writable by this companion" in outcomes(harness, everybody, job_id, user="bob")
    untouched(harness, job_id)

    # With a spool the order is written, but the job listens to its own site's alone.
    spool = harness.spool("bob")
    listening = harness.settings("bob", scope='"all"', spool=f'"/scratch/{spool.name}"', resize="drain_timeout_s = 2")
    process = harness.scripted(listening, {job_id: [[1, 2, 32]]}, user="bob")
    harness.resize_ended(listening, job_id)
    process.terminate()
    assert list(spool.iterdir()), "no order was written"
    assert "no checkpoint in time" in outcomes(harness, listening, job_id, user="bob")
    untouched(harness, job_id)


def test_an_operator_resizes_those_who_opted_in(harness: Harness) -> None:
    """One companion for all: opted-in jobs by orders in the spool; others are measured, or not even looked at."""
    operator = harness.operator
    spool = harness.spool(operator)
    env = {"ONES_SPOOL": f"/scratch/{spool.name}"}
    elastic = harness.light(**env)
    off = harness.light("--comment=ones: gpus=1-16 resize=off", **env)
    stranger = harness.light("--comment=gpus=1-16, but not for ones", **env)
    harness.trains(elastic, off, stranger)
    stop = harness.folder("stop") / "stop"
    stop.touch()
    inside = f"/scratch/{stop.parent.name}/stop"
    settings = harness.settings(operator, spool=f'"{env["ONES_SPOOL"]}"', stop_file=f'"{inside}"')
    with harness.running(settings, "--act", user=operator):
        harness.ticks(settings, 5)
        assert f"{inside} exists: no resize begins" in outcomes(harness, settings, elastic, user=operator)
        untouched(harness, elastic, off, stranger)
        assert [path.name for path in spool.iterdir()] == ["views"]
        stop.unlink()
        job = harness.wait(elastic, resized(), "resized")
        harness.trains(elastic, restart=job.restart)
        harness.ticks(settings)
    assert not (harness.directory(elastic) / ORDERS).exists()
    untouched(harness, off, stranger)
    with harness.store(settings) as store:
        summaries = {summary.job_id: summary for summary in store.job_summaries()}
        assert stranger not in summaries
        assert "resize=off" in summaries[off].refusal
        assert summaries[off].samples_per_s and summaries[off].epoch
        assert not store.resizes(off)
        done = [resize for resize in store.resizes(elastic) if resize.ended is not None]
    assert done and all(resize.state == State.DONE for resize in done)


@pytest.mark.nightly
def test_advice_changes_nothing_and_works_by_hand(harness: Harness) -> None:
    """Advise mode prints the commands of a resize; the job's owner can carry them out one by one."""
    job_id = harness.light()
    harness.trains(job_id)
    settings = harness.settings()
    with harness.running(settings, "--own"):
        until(lambda: "scontrol release" in harness.companion_log(settings), "advice", WAIT_S)
        harness.ticks(settings)
    untouched(harness, job_id)
    with harness.store(settings) as store:
        assert not store.resizes(job_id)
    words = harness.companion_log(settings)
    begin = words.rindex(f"# job {job_id} (alice): 1x1 → ")
    shape = re.match(r".*→ (\d+)x(\d+)", words[begin:])
    assert shape is not None
    lines = [x for x in words[begin:].splitlines()[1:] if x.startswith(("#", "printf", "scontrol"))]

    def by_hand(line: str) -> None:
        harness.cluster.run(["sh", "-ec", line])

    for line in lines:
        if line.startswith("# wait until job"):
            harness.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        elif line.startswith("# wait until"):
            harness.report(job_id, 0, lambda report: isinstance(report, Checkpoint), "checkpoint")
        else:
            by_hand(line)
    job = harness.wait(job_id, lambda job: job.running, "running")
    assert (job.nodes, job.gpus_per_node) == (int(shape[1]), int(shape[2])) and job.restart == 1
    hello = harness.report(job_id, 1, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello) and hello.checkpoint and hello.batch > 16
