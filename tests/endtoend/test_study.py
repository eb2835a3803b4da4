"""What elasticity would bring, asked of a real accounting: `sacct` itself, and a file that it wrote."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import pytest

from slurm_ones.simulate.workloads.formats import COMMAND, read_trace
from slurm_ones.simulate.workloads.trace import TraceJob
from tests.endtoend.harness import WAIT_S, Harness
from tests.endtoend.test_accounting import recorded

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

NAME = "a|b\n99|1|2|3|COMPLETED|<b>"


def test_a_site_asks_what_elasticity_would_bring(harness: Harness) -> None:
    """A job on two nodes, one that was requeued, one that never ran, one that was held while it ran, one whose name
    looks like a row: from `sacct` and from a file by the command that the documentation names, as any user may."""
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
    held = batch("sleep 600", "--gres=gpu:1")
    harness.wait(held, lambda job: job.running, "running")
    harness.cluster.run(["scontrol", "hold", str(held)], user="root")
    time.sleep(1.1)  # a run of no whole second counts as none
    harness.cluster.run(["scancel", str(held)], user="bob")
    for job_id in (wide, never, again, held):
        harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    recorded(harness, wide, again, held)

    zone, *sacct = [word for word in shlex.split(COMMAND) if not word.startswith("--starttime")]
    key, _, value = zone.partition("=")

    def written() -> dict[str, TraceJob]:
        """The jobs of a file that `sacct` writes now."""
        done = harness.cluster.run([*sacct, "--starttime=now-1hours"], user="bob", env={key: value})
        (scratch / "sacct.txt").write_text(done.stdout)
        return {job.name: job for job in read_trace(scratch / "sacct.txt").jobs}

    def study(*source: str) -> Any:
        command = ["slurm-ones", "study", *source, "--jobs", "5", "--seeds", "1", "--processes", "1"]
        outputs = ["--html", f"{inside}/page.html", "--figures", f"{inside}/figures.json"]
        done = harness.cluster.run([*command, *outputs], user="bob")
        assert "mean JCT" in done.stdout and "runs done" in done.stderr
        return json.loads((scratch / "figures.json").read_text())

    # Jobs of other tests end meanwhile, and accounting hears of it later.
    deadline, jobs, live = time.monotonic() + 2 * WAIT_S, written(), study("--since", "1h")
    while (after := written()).keys() != jobs.keys():
        assert time.monotonic() < deadline, after.keys() ^ jobs.keys()
        jobs, live = after, study("--since", "1h")
    assert (jobs[str(wide)].gpus, jobs[str(wide)].nodes, jobs[str(wide)].limit_s) == (4, 2, 600.0)
    assert jobs[str(again)].run_s >= 2 and jobs[str(again)].gpus == 1 and str(never) not in jobs
    assert str(held) in jobs
    assert all(job.started is not None and job.run_s > 0 for job in jobs.values())

    file = study(f"{inside}/sacct.txt")
    assert live["trace"]["format"] == file["trace"]["format"] == "sacct"
    assert live["trace"]["jobs"] == file["trace"]["jobs"] == len(jobs)
    assert live["curves"] == file["curves"] and live["recorded"] == file["recorded"]
    assert "What would elasticity bring?" in (scratch / "page.html").read_text()
