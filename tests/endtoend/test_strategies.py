"""Every strategy on a real Slurm: a job of its contract, resized twice by its owner, ends where its reference does.

The rows are those of `tests/wrapper/strategies`; a strategy that has one there is here, too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from ones_wrapper.protocol import Hello, Throughput
from slurm_ones.slurm.model import JobState
from tests.cluster import ClusterError
from tests.cluster.paths import REPOSITORY
from tests.endtoend.harness import Harness
from tests.wrapper.forked import Team
from tests.wrapper.strategies.rows import Row, rows
from tests.wrapper.strategies.script import HURRY, OUT, PACE_MS

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
ROWS = rows()


@pytest.fixture(scope="module")
def alone() -> Iterator[Team]:
    team = Team(1)
    yield team
    team.close()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_its_owner_resizes_it_twice(row: Row, harness: Harness, alone: Team) -> None:
    """By `slurm-ones resize`, under a companion that knows its limits."""
    folder = harness.folder(row.name.replace(" ", "-"))
    inside = f"/scratch/{folder.name}"
    env = {**row.env, OUT: f"{inside}/out.json", HURRY: f"{inside}/hurry", PACE_MS: "2000"}
    first, *others = row.sizes
    options = (f"--comment=ones: gpus=1-{max(row.sizes)}", f"--gres=gpu:{first}", "--time=10")
    arguments = (str(row.script), *row.arguments)
    job_id = harness.submit(*arguments, options=options, PYTHONPATH=str(REPOSITORY), **env)
    settings = harness.settings(scope='"own"', policy='"ones"', resize="dwell_s = 300")
    with harness.running(settings, "--act"):
        harness.report(job_id, 0, lambda report: isinstance(report, Throughput), "steps")
        for restart, size in enumerate(others, start=1):
            try:
                harness.cluster.run(["slurm-ones", "resize", str(job_id), f"1x{size}"], timeout=120.0)
            except (ClusterError, subprocess.TimeoutExpired) as error:
                words = f"{error}\n{harness.companion_log(settings)[-3000:]}\n{harness.log(job_id)[-3000:]}"
                raise AssertionError(words) from None
            hello = harness.report(job_id, restart, lambda report: isinstance(report, Hello), "hello")
            assert isinstance(hello, Hello) and hello.world == size and hello.step > 0
            harness.report(job_id, restart, lambda report: isinstance(report, Throughput), "steps")
        if row.make is not None:
            why = harness.cluster.run(["slurm-ones", "why", str(job_id), "--config", settings]).stdout
            assert f"Its strategy: {row.make().name}" in why, why
        (folder / "hurry").touch()
        job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended", 120.0)
    assert (job.state, job.exit_code) == (JobState.COMPLETED, 0), harness.log(job_id)
    (wanted,) = alone.run(row.expected)
    row.check(json.loads((folder / "out.json").read_text()), wanted)
