"""Files of one user's rows, for sites without a server."""

from __future__ import annotations

import os
import pwd
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ones_db import Store, StoreError, connect
from ones_db.access import OPEN
from ones_db.export import export_user, export_users
from ones_db.query import Reader
from ones_db.views import VIEWS
from slurm_ones.cli import app
from tests.db.make import ask, decision, job, resized_job
from tests.db.owned import JOBS, OWNED, fill


def test_a_user_gets_their_own_rows(url: str, tmp_path: Path) -> None:
    """Protects others' jobs, in every table and view and in the bytes of the file; all that is the user's is there."""
    fill(url)
    path = tmp_path / "alice.sqlite"
    done = export_user(url, "alice", path, "ops")
    assert (done.user, done.jobs, done.path) == ("alice", 1, path)
    own = f"sqlite:///{path}"
    for table in OWNED:
        (there,), (here,) = ask(url, f"SELECT count(*) FROM {table}")[0], ask(own, f"SELECT count(*) FROM {table}")[0]
        assert there == 2 * here > 0, table
    for table in OPEN:
        assert ask(own, f"SELECT count(*) FROM {table}") == ask(url, f"SELECT count(*) FROM {table}"), table
    assert ask(own, "SELECT user_name, action, detail FROM actions") == [("ops", "db export", "of alice's jobs alone")]
    for name, view in VIEWS.items():
        if not view.aggregate:
            alices = "WHERE user_name = 'alice'"
            assert ask(own, f"SELECT * FROM {name}") == ask(url, f"SELECT * FROM {name} {alices}") != [], name
    assert {row[0] for row in ask(own, "SELECT user_name FROM gpu_hours")} == {"alice"}
    assert b"bob" not in path.read_bytes() and b"policy ones" not in path.read_bytes()
    assert [file.name for file in tmp_path.iterdir() if "alice" in file.name] == ["alice.sqlite"]
    # Opened as any other, also from a directory that its reader may not write to.
    assert list(connect(own).scaling(job_id=7)["gpus"]) == [1, 4]
    with Store.open(own, "gres", read_only=True) as store:
        assert list(store.jobs([7, 8])) == [7] and len(store.runs(7)) == 2
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert sqlite3.connect(path).execute("PRAGMA foreign_key_check").fetchall() == []


def test_decisions_of_others_stay_behind(sqlite_url: str, tmp_path: Path) -> None:
    """Protects a small file: of decisions only those about the user's jobs, and the last, which ends open runs."""
    fill(sqlite_url)
    with Store.open(sqlite_url, "gres") as store:
        resized_job(store, 9, "eve")
        for second in range(50):
            store.add_decision(decision(5000.0 + second, 9))
    export_user(sqlite_url, "alice", tmp_path / "a", "ops")
    assert ask(f"sqlite:///{tmp_path}/a", "SELECT time FROM decisions ORDER BY time") == [(2400.0,), (5049.0,)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_each_user_gets_a_file_that_is_theirs(sqlite_url: str, tmp_path: Path) -> None:
    """Protects each file from other users, also while it is written, and a user whom the machine does not know."""
    fill(sqlite_url)
    somebody = next(user for user in pwd.getpwall() if user.pw_uid not in (0, os.geteuid()))
    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(30, user=somebody.pw_name)])
    old = os.umask(0)
    try:
        done = {one.user: one for one in export_users(sqlite_url, tmp_path, "ops")}
    finally:
        os.umask(old)
    assert set(done) == {*JOBS, somebody.pw_name} and done[somebody.pw_name].owned
    theirs = (tmp_path / f"{somebody.pw_name}.sqlite").stat()
    assert theirs.st_uid == somebody.pw_uid and theirs.st_gid == os.getegid()
    for one in done.values():
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o640
        known = one.user in [user.pw_name for user in pwd.getpwall()]
        assert one.owned == known
        assert ask(f"sqlite:///{one.path}", "SELECT DISTINCT user_name FROM jobs") == [(one.user,)]


def test_a_file_is_replaced_whole_or_not_at_all(sqlite_url: str, tmp_path: Path) -> None:
    """Protects the site's own database, and any other file, from being overwritten; and the last export."""
    fill(sqlite_url)
    live = Path(sqlite_url.removeprefix("sqlite:///"))
    before = live.read_bytes()
    other, link, path = tmp_path / "notes.txt", tmp_path / "link", tmp_path / "alice"
    other.write_text("mine")
    link.symlink_to(other)
    for target in (live, other, link):
        with pytest.raises(StoreError, match="is no export that could be replaced"):
            export_user(sqlite_url, "alice", target, "ops")
    assert live.read_bytes() == before and other.read_text() == "mine"
    export_user(sqlite_url, "alice", path, "ops")
    reader = Reader(f"sqlite:///{path}")
    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(40)])
    export_user(sqlite_url, "alice", path, "ops")
    with reader.ask("SELECT count(*) FROM jobs") as answer:
        assert list(answer.rows) == [(2,)]
    reader.close()
    kept = path.read_bytes()
    with pytest.raises(StoreError, match="no job of 'nobody'"):
        export_user(sqlite_url, "nobody", path, "ops")
    with pytest.raises(StoreError, match="no database URL can name it"):
        export_user(sqlite_url, "alice", tmp_path / "alice?mode=rw", "ops")
    with pytest.raises(StoreError, match="cannot be written"):
        export_user(sqlite_url, "alice", tmp_path / "absent" / "alice", "ops")
    assert path.read_bytes() == kept


def test_one_that_is_killed_leaves_the_old_file(sqlite_url: str, tmp_path: Path) -> None:
    """Protects the last export from one that ends in the middle, where only a hidden file may stay behind."""
    fill(sqlite_url)
    path = tmp_path / "alice"
    export_user(sqlite_url, "alice", path, "ops")
    kept = path.read_bytes()
    script = (
        "import os, sys; from pathlib import Path; from ones_db import export\n"
        "export._finish = lambda *_: os._exit(9)\n"
        "export.export_user(sys.argv[1], 'alice', Path(sys.argv[2]), 'ops')"
    )
    done = subprocess.run([sys.executable, "-c", script, sqlite_url, str(path)], check=False)
    assert done.returncode == 9 and path.read_bytes() == kept
    left = list(tmp_path.glob(".alice.*"))
    assert left and all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in left)


@pytest.mark.parametrize("name", ["../eve", ".hidden", "", "a/b", "x" * 101, "a\nb"])
def test_a_name_that_is_no_files_name(sqlite_url: str, tmp_path: Path, name: str) -> None:
    """Protects the rest of the disk from a user's odd name; it can be exported to a file that is named."""
    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(1, user=name)])
    with pytest.raises(StoreError, match="is no name for a file"):
        export_users(sqlite_url, tmp_path / "out", "ops")
    assert export_user(sqlite_url, name, tmp_path / "one", "ops").jobs == 1


def test_commands(sqlite_url: str, tmp_path: Path) -> None:
    """Protects the words for it."""
    fill(sqlite_url)
    start = ["db", "export", "--database", sqlite_url]
    file, folder = tmp_path / "mine.sqlite", tmp_path / "all"
    folder.mkdir()
    done = CliRunner().invoke(app, [*start, "--user", "alice", str(file)])
    assert done.exit_code == 0 and "1 jobs of alice, nobody else's" in done.output, done.output
    query = ["db", "query", "job_summary", "--columns", "job_id", "--format", "csv", "--database"]
    assert CliRunner().invoke(app, [*query, f"sqlite:///{file}"]).output.split() == ["job_id", "7"]
    assert CliRunner().invoke(app, [*start, "--to", str(folder)]).exit_code == 0
    assert sorted(file.name for file in folder.iterdir()) == ["alice.sqlite", "bob.sqlite"]
    for wrong in ([], ["--user", "alice"], [str(file)], ["--user", "alice", str(file), "--to", str(folder)]):
        done = CliRunner().invoke(app, [*start, *wrong])
        assert done.exit_code == 2 and "--user NAME FILE" in done.output
