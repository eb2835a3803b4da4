"""Files of one user's rows: exports, and the views that are published."""

from __future__ import annotations

import os
import pwd
import re
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from ones_db import Store, StoreError, connect
from ones_db.query import Reader
from ones_db.tables import METADATA
from ones_db.user_files import KEEP_S, MOST_DECISIONS, MOST_JOBS, MOST_RESIZES, ViewSource, export_user, export_users
from ones_db.views import VIEWS
from tests.commands import call
from tests.db.make import ask, change, decision, job, resize, resized_job, said
from tests.db.owned import JOBS, OPEN, OWNED, fill
from tests.db.server import Server

DOCUMENT = (Path(__file__).parents[2] / "docs/database.md").read_text(encoding="utf-8")
LOCKS = ("SELECT pg_advisory_lock(1)", "SELECT pg_try_advisory_xact_lock_shared(1, 2)")
"""By such a lock a reader could keep every companion from leading, or from writing."""


@pytest.mark.slow
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
    assert ask(own, "SELECT user_name, action, detail FROM actions") == [("ops", "db export", "only alice's jobs")]
    for name, view in VIEWS.items():
        if any(column.name == "job_id" for column in view.columns):
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


@pytest.mark.slow
def test_a_file_is_replaced_whole_or_not_at_all(sqlite_url: str, tmp_path: Path) -> None:
    """Protects the site's own database, and any other file, from being overwritten; and the last export."""
    fill(sqlite_url)
    live = Path(sqlite_url.removeprefix("sqlite:///"))
    before = live.read_bytes()
    other, link, path = tmp_path / "notes.txt", tmp_path / "link", tmp_path / "alice"
    other.write_text("mine")
    link.symlink_to(other)
    for target in (live, other, link):
        with pytest.raises(StoreError, match="exists and is not an export"):
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


@pytest.mark.slow
def test_one_that_is_killed_leaves_the_old_file(sqlite_url: str, tmp_path: Path) -> None:
    """Protects the last export from one that ends in the middle, where only a hidden file may stay behind."""
    fill(sqlite_url)
    path = tmp_path / "alice"
    export_user(sqlite_url, "alice", path, "ops")
    kept = path.read_bytes()
    script = (
        "import os, sys; from pathlib import Path; from ones_db import user_files\n"
        "user_files._finish = lambda *_: os._exit(9)\n"
        "user_files.export_user(sys.argv[1], 'alice', Path(sys.argv[2]), 'ops')"
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


def test_the_command_that_exports(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    start = ["db", "export", "--database", sqlite_url]
    file, folder = tmp_path / "mine.sqlite", tmp_path / "all"
    folder.mkdir()
    done = call(*start, "--user", "alice", str(file))
    assert done.exit_code == 0 and "1 jobs, only alice's" in done.output, done.output
    query = ["db", "query", "job_summary", "--columns", "job_id", "--format", "csv", "--database"]
    assert call(*query, f"sqlite:///{file}").output.split() == ["job_id", "7"]
    assert call(*start, "--to", str(folder)).exit_code == 0
    assert sorted(file.name for file in folder.iterdir()) == ["alice.sqlite", "bob.sqlite"]
    for wrong in ([], ["--user", "alice"], [str(file)], ["--user", "alice", str(file), "--to", str(folder)]):
        done = call(*start, *wrong)
        assert done.exit_code == 2 and "--user NAME FILE" in done.output


EMPTY = {"accounting", "checkpoints", "rollups"}
"""Tables of which nothing is shown."""


@pytest.mark.slow
def test_a_view_has_the_users_rows_of_each_table(url: str, tmp_path: Path) -> None:
    """Protects `jobs` and `why` on PostgreSQL as on SQLite, and others' rows and texts."""
    fill(url)
    change(url, "DELETE FROM accounting")
    source = ViewSource(url, "gres")
    assert sorted(source.users(4000.0)) == ["alice", "bob"]
    for user, content in source.views(["alice", "bob"], 4000.0):
        (tmp_path / user).write_bytes(content)
    own = f"sqlite:///{tmp_path / 'alice'}"
    for table in OWNED:
        (count,) = ask(own, f"SELECT count(*) FROM {table}")[0]
        assert (count > 0) == (table not in EMPTY), table
    with Store.open(url, "gres", read_only=True) as site, Store.open(own, "", read_only=True) as view:
        assert (view.cluster, view.job_summaries([8])) == ("gres", [])
        assert view.job_summaries() == site.job_summaries([7])
        for part in ("runs", "blocks", "memberships", "resizes", "decisions"):
            assert getattr(view, part)(7) == getattr(site, part)(7) != [], part
        (resize,) = view.resizes(7)
        assert view.resize_steps(resize.id) == site.resize_steps(resize.id) != []
        assert {job.job_id for one in view.recent_decisions() for job in one.jobs} == {7}
    alice, bob = ((tmp_path / user).read_bytes() for user in ("alice", "bob"))
    assert not any(word in alice for word in (b"bob", b"job8", b"reason 8")) and b"alice" not in bob
    assert len(alice) < 100_000
    source.close()


def test_what_changes_a_view(url: str) -> None:
    """Protects users from old news: a new decision, job, step of a resize or note is seen, and else nothing."""
    fill(url)
    change(url, "DELETE FROM accounting")
    source = ViewSource(url, "gres")
    before = source.users(4000.0)
    assert source.users(4000.0) == before
    with Store.open(url, "gres") as store:

        def changed() -> set[str]:
            nonlocal before
            now = source.users(4000.0)
            found, before = {user for user in now if now[user] != before.get(user)}, now
            return found

        store.add_decision(decision(5000.0, 7))
        assert changed() == {"alice"}
        store.record_jobs([job(20, user="bob", submit_time=3000.0)])
        assert changed() == {"bob"}
        number = store.begin_resize(resize(20, started=3500.0)).id or 0
        assert changed() == {"bob"}
        store.step_resize(number, "drained", detail=said("step 21"), time=3600.0)
        assert changed() == {"bob"}
        store.record_jobs([job(20, user="bob", submit_time=3000.0, report_note="odd")])
        assert changed() == {"bob"} and changed() == set()
    assert sorted(source.users(3600.0 + KEEP_S + 1.0)) == ["bob"]
    source.close()


def test_a_view_does_not_grow_with_the_age_of_a_job(url: str, tmp_path: Path) -> None:
    """Protects the shared file system: of what grows for ever the newest is shown."""
    with Store.open(url, "gres") as store:
        store.record_jobs([job(1), job(2)])
        for second in range(MOST_DECISIONS + 10):
            store.add_decision(decision(3000.0 + second, 1, 2))
        for number in range(MOST_RESIZES + 5):
            begun = store.begin_resize(resize(1, started=2500.0 + number))
            store.end_resize(begun.id or 0, "done", said("ok"), 2501.0 + number)
    source = ViewSource(url, "gres")
    ((_, content),) = source.views(["alice"], 4000.0)
    source.close()
    (tmp_path / "view").write_bytes(content)
    with Store.open(f"sqlite:///{tmp_path / 'view'}", "", read_only=True) as view:
        for number in (1, 2):
            assert [one.time for one in view.decisions(number, 1000)] == [
                3000.0 + second for second in reversed(range(10, MOST_DECISIONS + 10))
            ]
        assert [one.started for one in view.resizes(1)] == [2505.0 + number for number in range(MOST_RESIZES)]


def test_a_view_has_each_job_that_runs(sqlite_url: str, tmp_path: Path) -> None:
    with Store.open(sqlite_url, "gres") as store:
        store.record_jobs([job(1), *(job(n, submit_time=2000.0 + n, end_time=4000.0) for n in range(2, MOST_JOBS + 9))])
    source = ViewSource(sqlite_url, "gres")
    ((_, content),) = source.views(["alice"], 5000.0)
    source.close()
    (tmp_path / "view").write_bytes(content)
    with Store.open(f"sqlite:///{tmp_path / 'view'}", "", read_only=True) as view:
        assert len(found := view.jobs()) == MOST_JOBS and 1 in found


def test_a_cluster_that_is_not_there(sqlite_url: str) -> None:
    source = ViewSource(sqlite_url, "other")
    with pytest.raises(StoreError, match="nothing is known of cluster 'other'"):
        source.users(0.0)
    source.close()


def test_readers_of_a_server_see_their_own_rows(postgresql_url: str, server: Server) -> None:
    """Protects a site that runs the document's lines: each reader has their own jobs in every view, others' in
    gpu_hours alone, also behind a function that they slip in; and can neither read a table nor write."""
    fill(postgresql_url)
    (lines,) = re.findall(r"```sql\n(CREATE ROLE ones_reader.*?)```", DOCUMENT, re.DOTALL)
    readers = "DROP ROLE IF EXISTS ones_reader, alice, bob; "
    server.psql(readers)
    database = str(make_url(postgresql_url).database)
    server.psql("GRANT CREATE ON SCHEMA public TO PUBLIC", database)  # as before PostgreSQL 15
    server.psql(
        f"{lines} CREATE ROLE alice LOGIN IN ROLE ones_reader; CREATE ROLE bob LOGIN IN ROLE ones_reader", database
    )
    try:
        for user, number in JOBS.items():
            with psycopg.connect(postgresql_url.replace("ones@", f"{user}@", 1), autocommit=True) as session:
                for name in VIEWS.keys() - {"gpu_hours"}:
                    job = number if name == "idle_gpus" else "job_id"
                    found = session.execute(f"SELECT DISTINCT user_name, {job} FROM own.{name}").fetchall()
                    assert found == [(user, number)], name
                whose = session.execute("SELECT DISTINCT user_name FROM own.gpu_hours ORDER BY 1").fetchall()
                assert whose == [(each,) for each in JOBS]
                heard: list[str] = []
                session.add_notice_handler(lambda notice, heard=heard: heard.append(str(notice.message_primary)))
                session.execute(
                    "CREATE FUNCTION pg_temp.peek(x text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS"
                    " $$ BEGIN RAISE NOTICE '%', x; RETURN true; END $$"
                )
                session.execute("SELECT * FROM own.job_summary WHERE pg_temp.peek(user_name)")
                assert set(heard) == {user}
                # The server would drop it only some time after the session's end, and a role that owns it stays.
                session.execute("DROP FUNCTION pg_temp.peek(text)")
                closed = [f"SELECT 1 FROM {name}" for name in (*METADATA.tables, *VIEWS)]
                made = [f"CREATE TABLE {schema}.mine (x int)" for schema in ("own", "public")]
                for sql in (*closed, "DELETE FROM jobs", *made, "SET ROLE ones", *LOCKS):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        session.execute(sql)
    finally:
        server.psql(f"DROP OWNED BY ones_reader; {readers}", database)
