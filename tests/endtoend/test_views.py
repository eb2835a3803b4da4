"""What users see at an operator's site, on a real Slurm: database closed, settings open, a view for each user."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from slurm_ones.config import view_name
from tests.cluster.sites import OPERATOR, USERS
from tests.endtoend.harness import Harness
from tests.endtoend.unit import Unit
from tests.waiting import until

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_each_user_sees_their_own_jobs(harness: Harness) -> None:
    """Protects the promise that `jobs`, `why`, `status` and `doctor` work for users, and alice's job from bob: by the
    kernel, as these users, while the companion runs under its own account."""
    if not harness.cluster.accounting:
        pytest.skip(f"there is no operator: {harness.cluster.accounting_why}")
    spool, state = harness.spool(OPERATOR), harness.folder("state")
    settings = harness.settings(
        OPERATOR,
        spool=f'"/scratch/{spool.name}"',
        mode='"advise"',
        database=f'"sqlite:////scratch/{state.name}/ones.sqlite"',
    )
    own = [str(Path(settings).parent), f"/scratch/{state.name}"]
    harness.cluster.run(["chown", "-R", OPERATOR, *own], user="root")
    harness.cluster.run(["chmod", "644", settings], user="root")
    state.chmod(0o750)

    def call(user: str, *command: str) -> subprocess.CompletedProcess[str]:
        return harness.cluster.run(["slurm-ones", *command, "--config", settings], user=user, check=False)

    mine = harness.light(ONES_SPOOL=f"/scratch/{spool.name}")
    bobs = harness.light(user="bob", ONES_SPOOL=f"/scratch/{spool.name}")
    rigid = harness.rigid()
    early = call("alice", "jobs")
    assert early.returncode == 2 and "closed to you" in early.stderr and "Traceback" not in early.stderr

    unit = Unit(harness, settings, OPERATOR)
    process = unit.start()
    view = spool / "views" / view_name(USERS["alice"])
    unit.until(lambda: view.exists() and unit.count("elastic jobs run") > 2, "alice's view")

    def seen(user: str) -> list[dict[str, object]]:
        """The jobs of this test: Slurm also knows those of others, which have ended."""
        jobs = json.loads(call(user, "jobs", "--json").stdout)
        assert {job["user"] for job in jobs} <= {user, *([] if user != OPERATOR else ("alice", "bob"))}
        return [job for job in jobs if job["job_id"] >= mine]

    until(lambda: any(job["batch"] for job in seen("alice")), unit.log, 30.0, 0.5)
    assert [job["job_id"] for job in seen("alice")] == [mine] and [job["job_id"] for job in seen("bob")] == [bobs]
    assert f"job {mine} " in call("alice", "why", str(mine)).stdout
    refused = call("bob", "why", str(mine))
    assert refused.returncode == 2 and "it belongs to alice, and each user sees only their own jobs" in refused.stderr
    never = call("alice", "jobs", str(rigid))
    assert never.returncode == 1 and "it belongs to bob" in never.stderr
    never = call("bob", "jobs", str(rigid), "99999")
    assert never.returncode == 1
    assert "it has not opted in: it has no comment" in never.stderr and "Slurm does not know it" in never.stderr
    # With ticks as quick as a test's, one that is slow for once counts as missing.
    unit.until(lambda: call("bob", "status", "--no-slurm").returncode == 0, "that all is well, to bob")
    assert json.loads(call("bob", "status", "--json").stdout)["last"]["gpus"] >= 2
    doctor = {one["what"]: one["verdict"] for one in json.loads(call("alice", "doctor", "--json").stdout)}
    assert (doctor["permission"], doctor["your jobs"], doctor["spool"]) == ("ok", "ok", "ok")
    operators = json.loads(call(OPERATOR, "doctor", "--json").stdout)
    assert {one["verdict"] for one in operators if one["what"] in ("views", "settings", "database")} == {"ok"}
    assert [job["job_id"] for job in seen(OPERATOR)] == [mine, bobs]

    # The files, with no program of ours in between.
    path = f"/scratch/{spool.name}/views/{view.name}"
    assert harness.cluster.run(["head", "-c", "6", path], user="alice").stdout == "SQLite"
    for command in (["cat", path], ["ls", str(Path(path).parent)], ["ls", f"/scratch/{state.name}"]):
        done = harness.cluster.run(command, user="bob", check=False)
        assert done.returncode != 0 and "ermission denied" in done.stderr, done
    assert harness.cluster.run(["touch", path], user="alice", check=False).returncode != 0

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, unit.log()
    gone = call("bob", "status")
    assert gone.returncode == 1 and "the last one stopped" in gone.stdout
    unit.close()
