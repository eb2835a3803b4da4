"""What elasticity would bring, asked of a real accounting: `sacct` itself, and a file that it wrote."""

from __future__ import annotations

import json
import shlex
import time

import pytest

from slurm_ones.simulate.traces.accounting import COMMAND
from slurm_ones.simulate.traces.read import read_trace
from tests.endtoend.harness import LOOK_S, WAIT_S, Harness
from tests.endtoend.test_accounting import recorded

pytestmark = pytest.mark.cluster

UNENDED = ["sacct", "-a", "-n", "-X", "--starttime=now-2hours", "--state=R,PD,S", "-o", "jobid,state"]
"""What the accounting takes for jobs that have not ended."""
NAME = "a|b\n99|1|2|3|COMPLETED|<b>"


def test_a_site_asks_what_elasticity_would_bring(harness: Harness) -> None:
    """A job on two nodes, one that was requeued, one that never ran, one whose name looks like a row: from `sacct` and
    from a file by the command that the documentation names, as any user may."""
    if not harness.cluster.accounting:
        pytest.skip("this cluster keeps no accounting")
    scratch = harness.folder("study")
    inside = f"/scratch/{scratch.name}"

    def batch(script: str, *options: str) -> int:
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script]
        return int(harness.cluster.run(command, user="bob").stdout)

    wide = batch("sleep 1", "--nodes=2", "--gres=gpu:2", f"--job-name={NAME}", "--time=10")
    never = batch("sleep 600", "--hold", "--gres=gpu:1")
    again = batch('test "$SLURM_RESTART_COUNT" && sleep 2; test "$SLURM_RESTART_COUNT" || sleep 600', "--gres=gpu:1")
    harness.cluster.run(["scancel", str(never)], user="bob")
    harness.wait(again, lambda job: job.running, "running")
    harness.cluster.run(["scontrol", "requeue", str(again)], user="root")
    for job_id in (wide, never, again):
        harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    recorded(harness, wide, again)

    # Of other tests: what ended between the two would be in one of them alone.
    deadline = time.monotonic() + WAIT_S
    while left := harness.cluster.run(UNENDED, user="root").stdout:
        assert time.monotonic() < deadline, left
        time.sleep(LOOK_S)
    words = [word for word in shlex.split(COMMAND) if not word.startswith("--starttime")]
    zone, *sacct = words
    key, _, value = zone.partition("=")
    done = harness.cluster.run([*sacct, "--starttime=now-1hours"], user="bob", env={key: value})
    (scratch / "sacct.txt").write_text(done.stdout)
    jobs = {job.name: job for job in read_trace(scratch / "sacct.txt").jobs}
    assert (jobs[str(wide)].gpus, jobs[str(wide)].nodes, jobs[str(wide)].limit_s) == (4, 2, 600.0)
    assert jobs[str(again)].run_s >= 2 and jobs[str(again)].gpus == 1 and str(never) not in jobs
    assert all(job.started is not None and job.run_s > 0 for job in jobs.values())

    found = {}
    for source in (["--since", "1h"], [f"{inside}/sacct.txt"]):
        command = ["slurm-ones", "study", *source, "--jobs", "5", "--seeds", "1", "--processes", "1"]
        outputs = ["--html", f"{inside}/page.html", "--json", f"{inside}/figures.json"]
        done = harness.cluster.run([*command, *outputs], user="bob")
        assert "mean JCT" in done.stdout and "runs done" in done.stderr
        found[len(source) == 1] = json.loads((scratch / "figures.json").read_text())
    live, file = found[False], found[True]
    assert live["trace"]["format"] == file["trace"]["format"] == "sacct"
    assert live["trace"]["jobs"] == file["trace"]["jobs"] == len(jobs)
    assert live["curves"] == file["curves"] and live["recorded"] == file["recorded"]
    assert "What would elasticity bring?" in (scratch / "page.html").read_text()
