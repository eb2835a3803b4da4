"""Who sees what of a real PostgreSQL: readers logged in under their own names."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection
from typer.testing import CliRunner

from ones_db import Store, StoreError, access, connect
from ones_db.access import CLOSED, OPEN, ROLE, grant, granted, parents, renew, revoke
from ones_db.migrate import upgrade
from ones_db.query import QueryError
from ones_db.tables import METADATA
from ones_db.views import VIEWS, create_views, drop_views
from slurm_ones.cli import app
from tests.db.make import ask, opened
from tests.db.owned import JOBS, OWNED, fill
from tests.db.server import ADMIN, Server

DENIED = psycopg.errors.InsufficientPrivilege


@pytest.fixture(scope="session")
def people(server: Server) -> None:
    """Roles of users, who log in, and of a companion that is no superuser."""
    server.psql("CREATE ROLE alice LOGIN; CREATE ROLE bob LOGIN; CREATE ROLE eve LOGIN")
    server.psql(f"CREATE ROLE {ROLE} NOLOGIN; GRANT {ROLE} TO alice, bob")


@pytest.fixture
def site(people: None, postgresql_url: str) -> str:
    fill(postgresql_url)
    return postgresql_url


def as_user(url: str, user: str) -> str:
    return re.sub("//[a-z]+@", f"//{user}@", url)


def tell(url: str, user: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a statement in a session of the user's own, without any of our settings."""
    with psycopg.connect(as_user(url, user)) as connection:
        return connection.execute(sql).fetchall()


def counts(url: str, user: str) -> dict[str, int]:
    names = [*sorted(set(METADATA.tables) - set(CLOSED)), *VIEWS]
    return {name: tell(url, user, f"SELECT count(*) FROM {name}")[0][0] for name in names}


def test_every_table_is_open_closed_or_somebodys() -> None:
    """Protects a table that a later schema brings from being shown, or hidden, without a thought."""
    assert set(parents()) == set(OWNED) - {"jobs"}
    assert len(OWNED) + len(OPEN) + len(CLOSED) == len(METADATA.tables)


def test_users_see_their_own_jobs(site: str) -> None:
    """Protects bob's jobs from alice in every table and view, and shows each all that is theirs."""
    everything = counts(site, ADMIN)
    assert all(everything.values())
    grant(site)
    for user in JOBS:
        seen = counts(site, user)
        for name in (*OWNED, *(name for name, view in VIEWS.items() if not view.aggregate)):
            assert 2 * seen[name] == everything[name], name
        for name in (*OPEN, "gpu_hours"):
            assert seen[name] == everything[name], name
        assert tell(site, user, "SELECT DISTINCT user_name FROM jobs") == [(user,)]
        for name, view in VIEWS.items():
            if not view.aggregate:
                assert tell(site, user, f"SELECT DISTINCT user_name, job_id FROM {name}") == [(user, JOBS[user])]
    assert counts(site, ADMIN) == everything
    # Whoever is no member sees nothing at all.
    for name in (*METADATA.tables, *VIEWS):
        with pytest.raises(DENIED):
            tell(site, "eve", f"SELECT 1 FROM {name}")


def test_the_same_rows_whoever_asks(site: str) -> None:
    """Protects what a view tells of a job from changing under row-level security; `db query` and frames go through."""
    before = {name: ask(site, f"SELECT * FROM {name} WHERE job_id = 7") for name in VIEWS if name != "gpu_hours"}
    grant(site)
    for name, rows in before.items():
        assert ask(as_user(site, "alice"), f"SELECT * FROM {name} WHERE job_id = 7") == rows
        assert ask(as_user(site, "bob"), f"SELECT * FROM {name} WHERE job_id = 7") == []
    assert list(connect(as_user(site, "alice")).job_summary()["job_id"]) == [7]
    with Store.open(as_user(site, "bob"), "gres", read_only=True) as store:
        assert {number: job.user for number, job in store.jobs([7, 8]).items()} == {8: "bob"}
        assert len(store.runs(8)) == 2 and [resize.job_id for resize in store.resizes()] == [8]


@pytest.mark.parametrize("user", ["alice", "bob"])
def test_readers_only_read(site: str, user: str) -> None:
    """Protects the database from its readers, and operators' actions and other roles from everybody."""
    grant(site)
    for name in METADATA.tables:
        for sql in (f"DELETE FROM {name}", f"TRUNCATE {name}", f"INSERT INTO {name} DEFAULT VALUES"):
            with pytest.raises(DENIED):
                tell(site, user, sql)
    for sql in (
        "UPDATE jobs SET user_name = current_user",
        "SELECT * FROM actions",
        "CREATE TABLE mine (x int)",
        'DROP POLICY "ones own ones_reader" ON jobs',
        "ALTER TABLE jobs DISABLE ROW LEVEL SECURITY",
        "SET ROLE eve",
        f"SET ROLE {ADMIN}",
        "SET SESSION AUTHORIZATION eve",
        "SELECT nextval('jobs_id_seq')",
        "UPDATE alembic_version SET version_num = '0'",
    ):
        with pytest.raises(DENIED):
            tell(site, user, sql)
    # Turning the policies off is an error, not a way round; the group itself owns no jobs.
    with pytest.raises(DENIED):
        tell(site, user, "SET row_security = off; SELECT * FROM jobs")
    with psycopg.connect(as_user(site, user)) as connection:
        connection.execute(f"SET ROLE {ROLE}")
        assert connection.execute("SELECT * FROM jobs").fetchall() == []


def test_a_function_of_ones_own_sees_nothing_more(site: str) -> None:
    """Protects others' rows behind gpu_hours from a function that a reader slips in before they are added up."""
    grant(site)
    with psycopg.connect(as_user(site, "alice")) as connection:
        said: list[str] = []
        connection.add_notice_handler(lambda notice: said.append(str(notice.message_primary)))
        connection.execute(
            "CREATE FUNCTION pg_temp.peek(x text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS"
            " $$ BEGIN RAISE NOTICE '%', x; RETURN true; END $$"
        )
        groups = connection.execute("SELECT * FROM gpu_hours WHERE pg_temp.peek(user_name)").fetchall()
        assert sorted(said) == sorted(str(row[1]) for row in groups)
        said.clear()
        connection.execute("SELECT * FROM jobs WHERE pg_temp.peek(user_name)").fetchall()
        connection.execute("SELECT * FROM job_summary WHERE pg_temp.peek(user_name)").fetchall()
        assert set(said) == {"alice"}


def test_a_site_opens_and_closes_itself(site: str) -> None:
    """Protects a site that lets everybody see everything, from then on and until it thinks otherwise."""
    everything = counts(site, ADMIN)
    grant(site)
    own = counts(site, "alice")
    grant(site)
    assert counts(site, "alice") == own != everything
    grant(site, everything=True)
    assert counts(site, "alice") == counts(site, "bob") == everything
    with opened(site) as connection:
        assert granted(connection) == {ROLE: True}
    with pytest.raises(DENIED):
        tell(site, "alice", "SELECT * FROM actions")
    grant(site)
    assert counts(site, "alice") == own
    revoke(site)
    revoke(site)
    for name in (*METADATA.tables, *VIEWS):
        with pytest.raises(DENIED):
            tell(site, "alice", f"SELECT 1 FROM {name}")
    assert counts(site, ADMIN) == everything


def test_two_roles(site: str, server: Server) -> None:
    """Protects users' policy from a second role that sees everything, a dashboard's say, and makes that role."""
    server.psql('DROP ROLE IF EXISTS "dash-board"')
    everything = counts(site, ADMIN)
    grant(site)
    own = counts(site, "alice")
    grant(site, "dash-board", everything=True)
    server.psql('GRANT "dash-board" TO eve')
    assert counts(site, "eve") == everything and counts(site, "alice") == own
    assert server.psql("SELECT rolcanlogin FROM pg_roles WHERE rolname = 'dash-board'") == "f"
    revoke(site, "dash-board")
    assert counts(site, "alice") == own
    server.psql('DROP ROLE "dash-board"')


def test_an_upgrade_keeps_what_was_granted(site: str) -> None:
    """Protects readers from an upgrade, which makes the views anew."""
    grant(site)
    own = counts(site, "alice")
    with opened(site, write=True) as connection:
        drop_views(connection)
        create_views(connection)
        renew(connection)
    assert counts(site, "alice") == own
    upgrade(site)
    assert counts(site, "bob") == own


def test_a_companion_that_is_no_superuser(people: None, server: Server) -> None:
    """Protects the ordinary set-up: an owner who may make no role says what to run, and is held by no policy."""
    server.psql("DROP ROLE IF EXISTS companion")
    server.psql("CREATE ROLE companion LOGIN")
    name = server.fresh()
    server.psql(f'ALTER DATABASE "{name}" OWNER TO companion')
    url = server.url(name, "companion")
    upgrade(url)
    with pytest.raises(StoreError, match='have a superuser run: CREATE ROLE "others" NOLOGIN'):
        grant(url, "others")
    grant(url)
    fill(url)
    with Store.open(url, "gres") as store:
        assert sorted(store.jobs([7, 8])) == [7, 8]
    assert counts(url, "alice")["jobs"] == 1
    with pytest.raises(StoreError, match="may not"):
        grant(server.url(name, "alice"))
    server.drop(name)
    server.psql("DROP ROLE companion")


def test_what_cannot_be_granted(site: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from rights that would not hold: those of a file, and of a server whose views cannot be secured."""
    with pytest.raises(StoreError, match="a file has no roles"):
        grant(sqlite_url)
    for name in ('x"; DROP TABLE jobs; --', "", "a" * 51):
        with pytest.raises(StoreError, match="no name for a role"):
            grant(site, name)
    with pytest.raises(StoreError, match="there is no role 'nobody_here'"):
        revoke(site, "nobody_here")

    def old(connection: Connection) -> bool:
        return False

    monkeypatch.setattr(access, "can_secure", old)
    with pytest.raises(StoreError, match="older than PostgreSQL 15"):
        grant(site)
    with pytest.raises(DENIED):
        tell(site, "alice", "SELECT 1 FROM job_summary")
    grant(site, everything=True)
    assert counts(site, "alice") == counts(site, ADMIN)


def test_commands(site: str) -> None:
    """Protects the words for it, and that a reader who asks for what is closed is told so."""
    done = CliRunner().invoke(app, ["db", "grant", "--database", site])
    assert done.exit_code == 0 and "members of ones_reader see their own jobs" in done.output
    alice = as_user(site, "alice")
    query = ["db", "query", "--database", alice, "--format", "csv", "--sql"]
    assert CliRunner().invoke(app, [*query, "SELECT job_id FROM jobs"]).output.split() == ["job_id", "7"]
    done = CliRunner().invoke(app, [*query, "SELECT * FROM actions"])
    assert done.exit_code == 2 and "not read this" in done.output
    done = CliRunner().invoke(app, ["db", "revoke", "--database", site])
    assert done.exit_code == 0 and "ones_reader may read nothing" in done.output
    with pytest.raises((StoreError, QueryError)):
        connect(alice).job_summary()
