"""Another user of the same machine can neither join a training on a real Slurm, nor read it, nor stop it."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.cluster import Cluster, paths
from tests.endtoend.block_site import Site
from tests.endtoend.harness import Harness
from tests.endtoend.test_blocks import Training

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
LISTEN = """
import socket, time
ports = [10_000 + job % 1000 * 20 + k for job in range({first}, {first} + 6) for k in range(20)]
kept = [socket.create_server(("", port)) for port in ports]
print("listens", flush=True)
time.sleep(600)
"""


def test_bob_cannot_join_alices_training(gres: Cluster) -> None:
    """He listens where jobs used to meet before hers begins; then, while her blocks join and leave, reads and joins as
    once was enough, and knocks at everything. Her training ends as one that nobody attacked: each step made, each
    sample used once, and no loss that was not."""
    harness = Harness(gres)
    site = Site(harness, owner=True)
    try:
        last = int(harness.cluster.run(["sbatch", "--parsable", "--hold", "--wrap", "true"], user="bob").stdout)
        listen = harness.cluster.popen(
            [gres.python, "-c", LISTEN.format(first=last + 1)], user="bob", stdout=subprocess.PIPE
        )
        harness.kill_at_end(listen)
        assert listen.stdout is not None and listen.stdout.readline()
        training = Training(site, 200)
        job_id = training.job_id
        at = training.sizes(2, batch=32)

        hot = f"/home/alice/ones-{job_id}/hot"
        for path in (f"{hot}/secret", f"{hot}/leader-0.json", hot):
            denied = harness.cluster.run(["cat", path], user="bob", check=False)
            assert "Permission denied" in denied.stderr
        # What he could not read he may guess; he is even given it.
        leader = json.loads(max(harness.directory(job_id).glob("hot/leader-*.json")).read_text())
        alice = harness.directory(job_id).stat().st_uid
        command = [gres.python, "-m", "tests.endtoend.stranger"]
        command += [leader["host"], str(leader["port"]), leader["place"], str(alice)]
        with (training.folder / "stranger").open("w") as words:
            stranger = harness.cluster.popen(command, user="bob", cwd=paths.REPOSITORY, stdout=words, stderr=words)
            harness.kill_at_end(stranger)
            training.member(lambda m: m.generation >= at.generation, "membership")
            training.sizes(4, batch=32)
            training.sizes(1, batch=16)
            assert stranger.poll() is None
        said = (training.folder / "stranger").read_text()
        assert "begins" in said and "joined" not in said and "read" not in said, said
        training.end()
        told = harness.memberships(job_id)
        assert [m.world for m in told] == [1, 2, 4, 1], told
        log = harness.log(job_id)
        assert "was refused" in log and "so says a stranger" not in log
        assert log.count("later refusals of") <= 12, log[-4000:]
    finally:
        harness.clear()
