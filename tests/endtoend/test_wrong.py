"""What is wrong is said, on a real Slurm: GPUs that no rank uses, a second training, comments, a second companion."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ones_wrapper.protocol import ORDERS, SPOOL_MARK, Bye, Hello, Order, encode
from tests.cluster import ClusterError
from tests.endtoend.harness import FOR_EVER, LOOK_S, TRAIN, Harness
from tests.endtoend.test_people import outcomes, resized
from tests.waiting import until

pytestmark = pytest.mark.cluster

SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --gres=gpu:{gpus} --requeue --open-mode=append --output=%x-%j.out --job-name=wrong
#SBATCH --comment="{comment}"
{body}
"""


def submit(harness: Harness, body: str, gpus: int = 4, comment: str = "ones: gpus=1-8 batch=16-64") -> int:
    """A batch script of alice's own."""
    folder = harness.folder("wrong")
    (folder / "job.sh").write_text(SCRIPT.format(gpus=gpus, comment=comment, body=body))
    command = ["sbatch", "--parsable", f"/scratch/{folder.name}/job.sh"]
    return int(harness.cluster.run(command, env={"ONES_REPORT_EVERY_S": "0.3"}).stdout)


@pytest.mark.nightly
def test_what_is_wrong_is_a_reason(harness: Harness) -> None:
    """Two ranks of torchrun on four GPUs, one on two, a batch range that misses the script's, and a comment that nearly
    opts in: each is told in `why` and `jobs`, the first two in the job's log as well, and none of them is changed. Of a
    job that trains twice in one directory the second one ends, and the first does not notice."""
    train = f"{TRAIN} {' '.join(FOR_EVER)}"
    python = harness.cluster.python
    torchrun = submit(harness, f"exec {python} -m torch.distributed.run --standalone --nproc_per_node=2 {train}")
    plain = submit(harness, f"exec {python} {train}", gpus=2)
    misses = submit(harness, f"exec ones-run {train}", gpus=1, comment="ones: gpus=1-4 batch=512-1024")
    near = submit(harness, "exec sleep 600", gpus=1, comment="my run; ones: gpus=1-4")
    begun = "until grep -q throughput ones-$SLURM_JOB_ID/reports-0.jsonl; do sleep 0.2; done 2>/dev/null"
    # Slow ticks are time enough to resize one that may be.
    own = f"ones-run {train} &\n{begun}\nones-run {train}\necho second=$?\nwait"
    twice = submit(harness, own, gpus=1, comment="ones: gpus=1-8 batch=16-64 resize=off")
    harness.trains(torchrun, plain, misses, twice)
    until(lambda: "second=" in harness.log(twice), lambda: harness.log(twice), look_s=0.2)
    settings = harness.settings()
    with harness.running(settings, "--act", "--own"):
        harness.ticks(settings, 5)
    words = {
        torchrun: "this run uses 2 of its 4 GPUs: start it with ones-run",
        plain: "this run uses 1 of its 2 GPUs",
        misses: "allows batches of 512 to 1024, and its script takes at most 64 (ones.init): write batch=16-64",
        near: 'if it should, write --comment="ones: gpus=1-4"',
    }
    for job_id, text in words.items():
        assert text in json.dumps(harness.why(settings, job_id), ensure_ascii=False).replace('\\"', '"'), job_id
        job = harness.job(job_id)
        assert job.running and job.restart == 0 and not (harness.directory(job_id) / ORDERS).exists()
    assert "uses 2 of its job's 4 GPUs, and is not resized" in harness.log(torchrun)
    assert harness.log(plain).count("uses 1 of its job's 2 GPUs") == 1
    listed = harness.cluster.run(["slurm-ones", "jobs", "--config", settings]).stdout
    assert words[near] in " ".join(listed.split()) and "with GPUs that no rank uses" in listed
    log = harness.log(twice)
    assert f"job {twice} trains in" in log and "second=2" in log and "Traceback" not in log
    reports = harness.reports(twice, harness.job(twice).restart)
    assert sum(isinstance(report, Hello) for report in reports) == 1
    assert not any(isinstance(report, Bye) for report in reports)


@pytest.mark.nightly
def test_of_two_companions_one_yields(harness: Harness) -> None:
    """The owner's yields for a job that reads the site's spool while the site's acts, and acts once that is gone; the
    site's yields for a job that the owner's gave an order. Both in the same second: the job is resized once, by the one
    whose order it follows, and is neither held nor lost."""
    operator = harness.operator
    spool = harness.spool(operator)
    inside = f"/scratch/{spool.name}"
    job_id = harness.light(ONES_SPOOL=inside)
    harness.trains(job_id)
    own = harness.settings(scope='"own"')
    site = harness.settings(operator, spool=f'"{inside}"')

    # In the same second: neither has seen the other. Neither ends before the other has seen that it is there.
    for settings in (own, site):
        harness.stay(settings).touch()
    both = [
        harness.scripted(own, {job_id: [[1, 2, 32]]}),
        harness.scripted(site, {job_id: [[1, 4, 64]]}, user=operator),
    ]
    job = harness.wait(job_id, resized(), "resized")
    harness.trains(job_id, restart=job.restart)

    def words() -> str:
        told = ""
        for settings, user in ((own, "alice"), (site, operator)):
            with suppress(ClusterError):  # nothing is stored yet
                told += outcomes(harness, settings, job_id, user)
            told += _refusal(harness, settings, job_id, user)
        return told

    until(lambda: any(word in words() for word in ("this companion does not", "newer order")), words, look_s=LOOK_S)
    for settings in (own, site):
        harness.stay(settings).unlink()
    for process in both:
        process.terminate()
        process.wait(60)
    job = harness.wait(job_id, lambda job: job.running, "running")
    assert not job.held and (job.nodes, job.gpus_per_node) in {(1, 2), (1, 4)} and job.restart <= 2

    # The site's acts, and the owner's last order was long ago: the owner's yields, and says so.
    (harness.directory(job_id) / ORDERS).unlink(missing_ok=True)
    (spool / SPOOL_MARK).unlink(missing_ok=True)
    with harness.running(site, "--act", user=operator):
        harness.ticks(site, 2)
        assert (spool / SPOOL_MARK).exists()
        again = harness.scripted(own, {job_id: [[1, 1, 16]]})
        until(
            lambda: f"(of {operator}) acts on it" in _refusal(harness, own, job_id),
            lambda: harness.companion_log(own),
            look_s=LOOK_S,
        )
        again.terminate()
        again.wait(60)
    assert not (spool / SPOOL_MARK).exists()
    assert harness.job(job_id).running

    # The owner's gave an order a moment ago: the site's yields, and says so.
    number = round(time.time() * 1000)
    path = harness.directory(job_id) / ORDERS
    path.write_bytes(encode(Order(number, harness.job(job_id).restart)))
    harness.cluster.run(["chown", "alice", f"{Path('/home/alice') / path.parent.name / ORDERS}"], user="root")
    harness.cluster.run(["slurm-ones", "run", "--config", site, "--act", "--ticks", "2"], user=operator)
    assert "a companion of its owner alice ordered something" in _refusal(harness, site, job_id, operator)


def _refusal(harness: Harness, settings: str, job_id: int, user: str = "alice") -> str:
    try:
        return str(harness.why(settings, job_id, user=user)["job"]["refusal"])
    except Exception:  # nothing is stored yet
        return ""
