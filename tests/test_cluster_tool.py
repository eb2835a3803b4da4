"""The tool that gives the other tests a real Slurm: what they rely on holds, and nothing is left."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests import waiting
from tests.cluster import Cluster, accounting, unavailable

until = partial(waiting.until, within_s=240.0, look_s=0.1)
REPOSITORY = Path(__file__).resolve().parents[1]
WHY_NOT = unavailable()
real = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def submit(cluster: Cluster, *arguments: str, user: str = "alice") -> str:
    return cluster.run(["sbatch", "--parsable", *arguments], user=user).stdout.strip()


def job(cluster: Cluster, number: str) -> dict[str, str]:
    shown = cluster.run(["scontrol", "-o", "show", "job", number]).stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def leftovers(name: str) -> list[str]:
    """The processes and mounts on this machine that belong to the cluster of that name."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"clusters/{name}/" in (process / "mountinfo").read_text():
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.fixture(scope="module", params=["gres", "old"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Of this file alone: jobs here need all nodes."""
    with Cluster(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def gres() -> Iterator[Cluster]:
    with Cluster("gres") as running:
        yield running


class TestAccounting:
    """`ops` is a real operator, neither root nor SlurmUser; without a database there is none."""

    pytestmark = real

    def test_without_a_database_the_cluster_comes_up_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accounting, "_database_conf", lambda: "[mariadbd]\ndatadir=/nowhere\n")
        with Cluster("gres") as without:
            assert not without.accounting
            assert "/nowhere" in without.accounting_why
            assert submit(without, "--gres=gpu:1", "--wrap", "true")
            for daemon in accounting.DAEMONS:
                assert without.run(["pgrep", "-x", daemon], check=False).returncode == 1


class TestCommands:
    """What `run` and `popen` promise."""

    pytestmark = real

    def test_at_the_time_limit_children_die_too(self, gres: Cluster) -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            gres.run(["sh", "-c", "sleep 4321 & wait"], timeout=0.5)
        until(lambda: gres.run(["pgrep", "-fx", "sleep 4321"], check=False).returncode == 1, "the child's death")

    def test_the_repository_is_safe_from_it(self, gres: Cluster) -> None:
        for folder in (REPOSITORY, sys.prefix):
            done = gres.run(["touch", f"{folder}/spoilt"], user="root", check=False)
            assert "Read-only file system" in done.stderr

    def test_devices_are_its_own(self, gres: Cluster, tmp_path: Path) -> None:
        """A mode that root changes in here, as daemons do, must not be that of the host's device."""
        host = Path("/dev/null").stat()
        try:
            os.mknod(tmp_path / "null", stat.S_IFCHR, host.st_rdev)
        except PermissionError:
            pytest.skip("this machine lets nobody make devices: they are the host's")
        made = (gres.root / "dev/null").stat()
        assert (made.st_rdev, stat.S_IMODE(made.st_mode)) == (host.st_rdev, 0o666)
        assert (made.st_dev, made.st_ino) != (host.st_dev, host.st_ino)
        assert gres.run(["sh", "-c", "echo gone > /dev/null; head -c 2 /dev/zero | wc -c"]).stdout == "2\n"


class TestLife:
    """Clusters side by side, and nothing left of them whatever happens."""

    pytestmark = real

    def test_two_of_one_site_do_not_meet(self, gres: Cluster) -> None:
        gres.run(["touch", "/usr/bin/spoilt"], user="root")
        with Cluster("gres") as second:
            assert not (second.root / "usr/bin/spoilt").exists()
            submit(second, "--hold", "--job-name=only-here", "--wrap", "true")
            assert "only-here" in second.run(["squeue", "-h", "-o", "%j"]).stdout
            assert "only-here" not in gres.run(["squeue", "-h", "-o", "%j"]).stdout
            assert leftovers(second.name)
        assert not leftovers(second.name)
        assert not second.box.folder.exists()

    def test_a_killed_owner_leaves_nothing(self) -> None:
        name = f"orphan-{secrets.token_hex(2)}"
        script = (
            "import sys, time; from tests.cluster import Cluster\n"
            "c = Cluster('gres', sys.argv[1]).start(); c.popen(['sleep', '999'])\n"
            "print('up', flush=True); time.sleep(999)"
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", script, name], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert leftovers(name)
        owner.kill()
        owner.wait()
        owner.stdout.close()
        until(lambda: not leftovers(name), "the end of every process")
        folder = Cluster("gres", name).box.folder
        until(lambda: not folder.exists(), "the end of every file")

    def test_a_killed_keeper_leaves_files_only_and_the_name_is_free(self) -> None:
        cluster = Cluster("old", f"kept-{secrets.token_hex(2)}").start()
        os.kill(cluster.box.keeper, signal.SIGKILL)
        until(lambda: not leftovers(cluster.name), "the end of every process")
        assert not cluster.alive
        with Cluster("old", cluster.name) as again:
            assert again.alive
        assert not again.box.folder.exists()

    def test_up_stays_and_down_leaves_nothing(self) -> None:
        name = f"cli-{secrets.token_hex(2)}"
        tool = [sys.executable, "-m", "tests.cluster"]

        def call(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*tool, *arguments], cwd=REPOSITORY, capture_output=True, text=True)

        assert call("up", "gres", "--name", name).returncode == 0
        try:
            assert "already running" in call("up", "gres", "--name", name).stderr
            done = call("exec", name, "-u", "bob", "--cwd", "/scratch", "--", "sh", "-c", "id -un; pwd; exit 5")
            assert (done.returncode, done.stdout) == (5, "bob\n/scratch\n")
            assert name in call("status").stdout
            sleeps = ["exec", name, "--", "pgrep", "-fx", "sleep 4321"]
            process = subprocess.Popen([*tool, "exec", name, "--", "sleep", "4321"], cwd=REPOSITORY)
            until(lambda: call(*sleeps).returncode == 0, "its sleep")
            process.terminate()
            assert process.wait() == -signal.SIGTERM
            assert call(*sleeps).returncode == 1
        finally:
            down = call("down", "--name", name)
        assert down.returncode == 0
        assert not leftovers(name)
        assert call("exec", name, "true").returncode == 1
