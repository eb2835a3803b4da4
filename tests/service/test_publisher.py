"""What users may see without the database: files of theirs, written by the companion."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ones_db import HealthRecord, Store
from ones_db.leader import LeaderLock
from ones_db.user_files import KEEP_S
from slurm_ones.config import SITE_VIEW, view_name
from slurm_ones.service import publisher as service_publisher
from slurm_ones.service.publisher import ACL, FOLDER_MODE, Publisher, let_read, readable_by
from slurm_ones.untrusted_files import NotBelieved
from tests.db.make import change, decision, job, resized_job
from tests.db.owned import fill

NOW = 4000.0
AS = "import os, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); print(open(sys.argv[1], 'rb').read(6))"


@pytest.fixture
def url(tmp_path: Path, empty_sqlite: Path) -> str:
    """A site with jobs of alice and bob, both ended at 3600."""
    path = tmp_path / "ones.sqlite"
    shutil.copy(empty_sqlite, path)
    fill(f"sqlite:///{path}")
    change(f"sqlite:///{path}", "DELETE FROM accounting")
    return f"sqlite:///{path}"


@pytest.fixture
def folder(public: Path) -> Path:
    """Where every user can look for a name, as on a site's shared file system."""
    return public / "views"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The users that the machine knows, by name."""
    found = {"alice": 2001, "bob": 2002}

    def getpwnam(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", found[name], found[name], "", "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwnam", getpwnam)
    return found


@pytest.fixture
def make(
    url: str, folder: Path, names: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Publisher]]:
    made = []

    def publisher(now: float = NOW, round_s: float = 10.0) -> Publisher:
        clocks = SimpleNamespace(time=lambda: now, monotonic=time.monotonic, thread_time=time.thread_time)
        monkeypatch.setattr(service_publisher, "time", clocks)
        monkeypatch.setattr(service_publisher, "ROUND_S", round_s)
        made.append(Publisher(url, "gres", folder))
        return made[-1]

    yield publisher
    for one in made:
        one.close()


def test_the_list_is_the_kernels(tmp_path: Path) -> None:
    """Protects the format: the kernel takes it, gives it back, and shows its mask as the group's bits."""
    path = tmp_path / "file"
    path.write_text("secret")
    path.chmod(0o600)
    with path.open() as file:
        let_read(file.fileno(), 2001)
    assert os.getxattr(path, ACL) == readable_by(2001)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    if shutil.which("getfacl"):
        shown = subprocess.run(["getfacl", "-n", "-p", path], capture_output=True, text=True, check=True).stdout
        assert "user:2001:r--" in shown and "group::---" in shown and "other::---" in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_each_user_reads_their_own_file_alone(make: Callable[..., Publisher], folder: Path) -> None:
    """Protects alice's jobs from bob, by the kernel; everybody reads how the companion is, and nobody lists users."""
    assert make().publish() == (2, 0)

    def reads(uid: int, name: str) -> bool:
        command = [sys.executable, "-I", "-c", AS.format(uid), str(folder / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
        return done.returncode == 0

    alice, bob = 2001, 2002
    assert [reads(uid, view_name(alice)) for uid in (alice, bob, 2003)] == [True, False, False]
    assert [reads(uid, view_name(bob)) for uid in (alice, bob, 2003)] == [False, True, False]
    assert reads(2003, SITE_VIEW)
    assert stat.S_IMODE(folder.stat().st_mode) == FOLDER_MODE


def test_how_the_companion_is(make: Callable[..., Publisher], url: str, folder: Path) -> None:
    """Everybody sees that it is well, and nobody its last complaint, which may name jobs of others."""
    with Store.open(url, "gres") as store, LeaderLock(url, "gres") as lock:
        lock.take(3999.0)
        store.record_health(HealthRecord(4000.0, "act", 60.0, 4000.0, 0.5, 3, 1, 12, "job secret of bob", 3990.0))
        make().publish()
        with Store.open(f"sqlite:///{folder / SITE_VIEW}", "", read_only=True) as site:
            health = site.health()
            assert health is not None and (health.running, health.error, health.error_time) == (3, "", None)
            assert site.leader() == store.leader()
    assert b"secret" not in (folder / SITE_VIEW).read_bytes()


def test_only_what_changed_is_written_and_old_files_go(
    make: Callable[..., Publisher], url: str, folder: Path, names: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Protects the shared file system, and users whose jobs ended long ago; a user whom nobody knows costs nothing."""
    publisher = make()
    publisher.publish()
    publisher._rest_until = 0.0
    before = (folder / view_name(2002)).stat().st_ino
    assert publisher.publish() == (0, 0)
    with Store.open(url, "gres") as store:
        store.record_jobs([job(30, user="alice"), job(31, user="nobody knows")])
    publisher._rest_until = 0.0
    assert publisher.publish() == (1, 0) and "'nobody knows' is not known on this machine" in caplog.text
    assert (folder / view_name(2002)).stat().st_ino == before
    with Store.open(url, "gres") as store:
        store.add_decision(decision(5000.0, 30))
    publisher._rest_until = 0.0
    assert publisher.publish() == (1, 0)
    # Within the rest after a round, SITE_VIEW alone.
    assert publisher._rest_until > 0.0
    publisher._rest_until = time.monotonic() + 600.0
    with Store.open(url, "gres") as store:
        resized_job(store, 32)
    assert publisher.publish() == (0, 0)
    make(3600.0 + KEEP_S + 1.0).publish()
    assert sorted(path.name for path in folder.iterdir()) == [view_name(2001), SITE_VIEW]


def test_a_round_ends_in_time_and_the_next_goes_on(make: Callable[..., Publisher], folder: Path) -> None:
    publisher = make(round_s=0.0)
    assert publisher.publish() == (1, 1)
    publisher._rest_until = 0.0
    assert (publisher.publish(), len(list(folder.iterdir()))) == ((1, 0), 3)


def test_the_last_round_is_a_whole_one(make: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects users from a companion that seems to run: its end is published also where it comes during a round."""
    publisher, rounds, within, go = make(), [], threading.Event(), threading.Event()

    def publish() -> None:
        rounds.append(publisher._closing)
        within.set()
        go.wait(30)

    monkeypatch.setattr(publisher, "publish", publish)
    publisher.start()
    publisher.ticked()
    assert within.wait(30)
    threading.Timer(0.1, go.set).start()
    publisher.close()
    assert rounds == [False, True]


def test_an_end_as_a_round_begins(make: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects users from an end between a tick and its round, which was missed: its last round never came."""
    publisher, rounds = make(), []

    class Wake(threading.Event):
        def clear(self) -> None:
            publisher._closing = True
            self.set()
            super().clear()

    monkeypatch.setattr(publisher, "_wake", Wake())
    monkeypatch.setattr(publisher, "publish", lambda: rounds.append(publisher._closing))
    publisher.start()
    publisher.ticked()
    assert publisher._thread is not None
    publisher._thread.join(30)
    assert rounds == [True] and not publisher._thread.is_alive()


def test_a_folder_of_others_is_not_written_to(make: Callable[..., Publisher], folder: Path, tmp_path: Path) -> None:
    """Protects the companion's files elsewhere: no link is followed, and nobody else may rename what is published."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(NotBelieved):
        make().publish()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NotBelieved, match="others may write there"):
        make().publish()
    if os.geteuid() == 0:
        folder.chmod(0o755)
        os.chown(folder, 2002, -1)
        with pytest.raises(NotBelieved, match="belongs to uid 2002"):
            make().publish()
    assert list(elsewhere.iterdir()) == []


def test_links_laid_in_place_of_files_are_replaced(make: Callable[..., Publisher], folder: Path, url: str) -> None:
    """What lies under a file's name, or its temporary one, is replaced and never written through."""
    folder.mkdir(mode=0o711)
    victim = folder.parent / "victim"
    victim.write_text("keep")
    for name in (view_name(2001), f".{view_name(2001)}", SITE_VIEW):
        (folder / name).symlink_to(victim)
    make().publish()
    assert victim.read_text() == "keep" and not (folder / view_name(2001)).is_symlink()


def test_a_file_system_without_lists_publishes_nothing(
    make: Callable[..., Publisher], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather nothing than a file that others could read; it is said once, and what to do."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    publisher = make()
    publisher.start()
    publisher.ticked()
    publisher.close()
    assert [path.name for path in folder.iterdir()] == [SITE_VIEW]
    told = [record.getMessage() for record in caplog.records if "POSIX ACLs" in record.getMessage()]
    assert len(told) == 1 and "set `views` in the settings" in told[0]
