"""A study as jobs of a real Slurm: the command killed in the middle, started again, and a study of this machine's."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slurm_ones.cli import app
from tests.endtoend.harness import Harness

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

STUDY = (
    "slurm-ones", "simulate", "--idealized", "--jobs", "6", "--cluster", "4x4", "--policy", "fifo",
    "--policy", "fifo:backfill=false", "--seeds", "2", "--load", "2",
)  # fmt: skip
SBATCH = "--partition=gpu -t 5 --nodelist=n1 --exclusive"
"""One part at a time, so that a command is killed between two."""


def unclocked(found: Any) -> Any:
    """Without what a clock measured."""
    if isinstance(found, dict):
        return {k: unclocked(v) for k, v in found.items() if k not in ("wall_s", "decision_s", "decision_p99_s")}
    return [unclocked(one) for one in found] if isinstance(found, list) else found


def test_a_study_goes_on_after_a_kill(harness: Harness) -> None:
    """Parts that had ended are not run again and those that wait are not sent again; figures are those of one machine.
    No job has a comment by which a companion would take it for one of its own."""
    cluster = harness.cluster
    work = harness.folder("study")
    command = [*STUDY, "--executor", "slurm", "--sbatch", SBATCH, "--figures", "slurm.json"]

    def start() -> subprocess.Popen[str]:
        process = cluster.popen(command, cwd=f"/scratch/{work.name}", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        harness.kill_at_end(process)
        return process

    def array() -> str:
        """The array of the study's jobs; empty until there is one."""
        return cluster.run(["squeue", "-h", "-u", "alice", "-o", "%F"]).stdout.partition("\n")[0]

    def results() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in work.glob("ones-study/results/*.pkl")}

    # All wait for the node; then one may have it, and the others wait for us.
    blocker = harness.rigid("--nodelist=n1", "--exclusive")
    harness.wait(blocker, lambda job: job.running, "running")
    first = start()
    deadline = time.monotonic() + 60
    while not array():
        assert time.monotonic() < deadline and first.poll() is None, first.stderr and first.stderr.read()
        time.sleep(0.1)
    others = f"{array()}_[1-3]"
    cluster.run(["scontrol", "uhold", others])
    cluster.run(["scancel", str(blocker)], user="bob")
    while not results():
        assert time.monotonic() < deadline and first.poll() is None, first.stderr and first.stderr.read()
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    queue = cluster.run(["squeue", "-h", "--array", "--states=all", "-u", "alice", "-o", "%F|%j|%k"]).stdout.split("\n")
    rows = [row.split("|") for row in queue if "|ones-study-" in row]
    assert len(rows) == 4 and {row[2] for row in rows} == {"(null)"}, queue
    there = results()
    assert len(there) == 1

    second = start()
    guard = threading.Timer(120, second.kill)
    guard.start()
    said = ""
    for line in second.stderr or ():
        said += line
        if "done before" in line:
            cluster.run(["scontrol", "release", others])
    assert second.wait() == 0, said
    guard.cancel()
    assert "of 4 runs were done before" in said and "0 are sent now" in said and "runs done after" in said
    assert {path: results()[path] for path in there} == there
    jobs = cluster.run(["squeue", "-h", "--array", "--states=all", "-u", "alice", "-o", "%F|%j"]).stdout.splitlines()
    assert {job for job in jobs if "ones-study-" in job} == {f"{rows[0][0]}|{rows[0][1]}"}

    here = CliRunner().invoke(app, [*STUDY[1:], "--processes", "1", "--figures", str(work / "here.json")])
    assert here.exit_code == 0, here.stderr
    found = [unclocked(json.loads((work / name).read_text())) for name in ("slurm.json", "here.json")]
    assert found[0] == found[1]
