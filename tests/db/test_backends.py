"""What each kind of database needs said: passwords, bulk, partitions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_db import RunReports, Store, StoreError, migrate
from ones_db.engine import backend_of, names_password
from tests.db.make import ask, change, job, report, throughput
from tests.db.server import Server


@pytest.fixture
def locked(server: Server, postgresql_url: str) -> Iterator[str]:
    """The URL of a role that has to give its password, which is 'secret'."""
    server.psql("DROP ROLE IF EXISTS locked; CREATE ROLE locked LOGIN SUPERUSER PASSWORD 'secret'")
    yield postgresql_url.replace("ones@", "locked@", 1)


def test_a_password_comes_from_where_libpq_looks(
    locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    """Protects from passwords in settings and on command lines: the environment, a file and a service do."""
    for name in ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreError, match=r"a password is taken from ~/\.pgpass, PGPASSWORD or a service file"):
        Store.open(locked, "gres")
    with monkeypatch.context() as set_for_now:
        set_for_now.setenv("PGPASSWORD", "secret")
        Store.open(locked, "gres").close()
    passwords = tmp_path / "pgpass"
    passwords.write_text("*:*:*:locked:secret\n")
    passwords.chmod(0o600)
    with monkeypatch.context() as set_for_now:
        set_for_now.setenv("PGPASSFILE", str(passwords))
        Store.open(locked, "gres").close()
    services, database = tmp_path / "services", backend_of(locked)._url.database  # type: ignore[attr-defined]
    services.write_text(f"[site]\nhost={server.place}\ndbname={database}\nuser=locked\npassword=secret\n")
    with monkeypatch.context() as set_for_now:
        set_for_now.setenv("PGSERVICEFILE", str(services))
        with Store.open("postgresql://?service=site", "gres") as store:
            assert store.jobs() == {} and "secret" not in store.place


def test_a_password_is_never_shown(locked: str) -> None:
    """Protects a password that is in the URL after all from logs and messages."""
    for given in (locked.replace("locked@", "locked:s3same@"), f"{locked}&password=s3same"):
        assert names_password(given)
        with pytest.raises(StoreError, match="password authentication failed") as caught:
            Store.open(given, "gres")
        assert "s3same" not in str(caught.value)
    assert not names_password(locked)
    with Store.open(locked.replace("locked@", "locked:secret@"), "gres") as store:
        assert "secret" not in store.place and "locked@" in store.place


def test_a_database_that_is_not_there(server: Server) -> None:
    """Protects the first start on a server from an error without a way out."""
    with pytest.raises(StoreError, match=r"no such database; make it \(createdb\), then run `slurm-ones db upgrade`"):
        Store.open(server.url("nowhere"), "gres")
    with pytest.raises(StoreError, match="no such database"):
        migrate.upgrade(server.url("nowhere"))


def test_a_database_that_keeps_no_unicode(server: Server) -> None:
    """Protects users' names from a database that was made for one language."""
    name = server.fresh("template0", "ENCODING 'LATIN1' LOCALE 'C'")
    with pytest.raises(StoreError, match="encoding is LATIN1"):
        migrate.upgrade(server.url(name))
    server.drop(name)


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from ones_db import Store, StoreError, migrate
try:
    migrate.upgrade(sys.argv[2]) if sys.argv[1] == "alembic" else Store.open("postgresql://me@/ones", "gres")
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize(("module", "extra"), [("psycopg", "postgres"), ("alembic", "migrate")])
def test_without_what_only_some_need(module: str, extra: str, tmp_path: Path) -> None:
    """Protects notebooks and sites with SQLite alone from what they do not need, and tells others what to install."""
    order = [sys.executable, "-c", WITHOUT, module, f"sqlite:///{tmp_path}/ones.sqlite"]
    done = subprocess.run(order, capture_output=True, text=True, check=False)
    assert f"pip install 'ones-db[{extra}]'" in done.stdout, done.stderr


def test_many_rows_some_of_them_twice(store: Store, url: str) -> None:
    """Protects a long look at a file in which a number stands twice: the first is believed, the others stored once."""
    store.record_jobs([job(1)])
    samples = [throughput(n) for n in range(2, 302)]
    doubled = [throughput(n, samples=1) for n in range(2, 302, 7)]
    store.add_reports([RunReports(1, 0, 1, 301, lines=[*samples, *doubled])])
    assert ask(url, "SELECT count(*), min(samples) FROM throughput") == [(300, 64)]
    more = [throughput(n, loss=None, noise=2.5, nonfinite=n) for n in range(302, 402)]
    store.add_reports([RunReports(1, 0, 2, 401, lines=more)])
    assert ask(url, "SELECT count(*), sum(noise), max(nonfinite) FROM throughput WHERE loss IS NULL") == [
        (100, 250.0, 401)
    ]


@pytest.mark.parametrize("rows", [1, 100])
def test_numbers_beyond_64_bits(store: Store, url: str, rows: int) -> None:
    """Protects from a job's absurd figure, alone or among many: an error in words, and nothing stored."""
    store.record_jobs([job(1)])
    samples = [throughput(n, samples=2**63) for n in range(2, 2 + rows)]
    with pytest.raises(StoreError, match="64 bits"):
        report(store, 1, 0, throughput=samples, offset=1, number=rows + 1)
    assert ask(url, "SELECT count(*) FROM throughput") == [(0,)]
    report(store, 1, 0, throughput=[throughput(2, samples=2**63 - 1)], offset=1, number=2)
    assert ask(url, "SELECT samples FROM throughput") == [(2**63 - 1,)]


def test_counts_are_whole_numbers(store: Store) -> None:
    store.record_jobs([job(1)])
    report(store, 1, 0, throughput=[throughput(2, nonfinite=3)], offset=1, number=2)
    (summary,) = store.job_summaries()
    assert (type(summary.nonfinite), type(summary.attempts), type(summary.pause_s)) == (int, int, float)


def test_a_role_that_may_only_read(server: Server, postgresql_url: str) -> None:
    """Protects the data from a reader's own SQL: the server refuses, and says so in words."""
    server.psql("DROP ROLE IF EXISTS looker; CREATE ROLE looker LOGIN")
    change(postgresql_url, "GRANT SELECT ON ALL TABLES IN SCHEMA public TO looker")
    url = postgresql_url.replace("ones@", "looker@", 1)
    with pytest.raises(StoreError, match="may not write"):
        change(url, "DELETE FROM jobs")
    with pytest.raises(StoreError, match="may not write"):
        Store.open(url, "gres")
