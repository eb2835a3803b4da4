"""SIGKILL to the companion between any two steps of a resize: the next one finds its way."""

from __future__ import annotations

import json
import subprocess

import pytest

from slurm_ones.act.states import State
from tests.cluster import paths
from tests.endtoend.desk import Desk

JOBS = 4
"""Side by side, each with a companion and a database of its own."""


@pytest.mark.cluster
def test_a_companion_killed_anywhere_is_succeeded(desk: Desk) -> None:
    """After every death the job runs at its old or its new shape, held by nobody, and the resize is closed."""
    job_ids = [desk.light() for _ in range(JOBS)]
    desk.trains(*job_ids)
    processes = []
    for first, job_id in enumerate(job_ids):
        settings = desk.settings(scope='"own"', tick_s="0.3", resize="dwell_s = 0\nadvance_s = 0.1")
        command = [desk.cluster.python, "-m", "tests.endtoend.killed", settings, str(job_id), str(first), str(JOBS)]
        pipe = subprocess.PIPE
        processes.append(desk.cluster.popen(command, cwd=paths.REPOSITORY, stdout=pipe, stderr=pipe))
    rounds = []
    for process in processes:
        output, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors[-4000:]
        rounds += [json.loads(line) for line in output.splitlines()]
    for told in rounds:
        assert told["running"] and not told["held"], told
        assert told["open"] == 0, told
        assert told["shape"] in ("1x1", "1x2") and told["restarts"] in (0, 1), told
        assert (told["shape"] != told["from"]) == (told["resize"] == State.DONE and told["restarts"] == 1), told
        assert told["statuses"][1] == 0, told
    deaths = {told["event"] for told in rounds if told["killed"]}
    unkilled = [told for told in rounds if not told["killed"]]
    assert len(unkilled) == JOBS and all(told["resize"] == State.DONE for told in unkilled)
    # Every number up to the last was tried.
    assert sorted(told["fatal"] for told in rounds if told["killed"]) == list(range(len(rounds) - JOBS))
    for name in (
        "begin_resize",
        "step_resize",
        "end_resize",
        "order",
        "requeuehold",
        "NumNodes",
        "StartTime",
        "release",
    ):
        assert any(event.startswith(f"before {name}") for event in deaths), (name, deaths)
        assert any(event.startswith(f"after {name}") for event in deaths), (name, deaths)
