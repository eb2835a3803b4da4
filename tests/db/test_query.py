"""Questions in SQL, and what they cannot do; `slurm-ones db query` as people meet it."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from ones_db import Store, StoreError
from ones_db.query import QueryError, Reader, one_query
from ones_db.views import VIEWS
from tests import commands
from tests.db.make import ask, job, resized_job

HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\n[red]x[/red]"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


def answer(url: str, sql: str, timeout_s: float = 60.0, **parameters: object) -> list[tuple[object, ...]]:
    reader = Reader(url, timeout_s=timeout_s)
    try:
        with reader.ask(sql, parameters) as told:
            return list(told.rows)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("sql", "kept"),
    [
        ("SELECT 1;", "SELECT 1"),
        ("  select 1 ; -- the end; really\n /* ; */ ;", "select 1"),
        ("-- one\nWITH a AS (SELECT 1) SELECT * FROM a", "WITH a AS (SELECT 1) SELECT * FROM a"),
        ("SELECT ';', \"a;b\", 'it''s; :x'", "SELECT ';', \"a;b\", 'it''s; \\:x'"),
        ("(SELECT 1)", "(SELECT 1)"),
    ],
)
def test_one_query_is_taken(sql: str, kept: str) -> None:
    assert " ".join(one_query(sql).split()) == kept


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "no SQL"),
        ("-- nothing", "no SQL"),
        ("SELECT 1; SELECT 2", "more than one"),
        ("SELECT 1; COMMIT; DROP TABLE jobs", "more than one"),
        (r"SELECT E'\'; DROP TABLE jobs; --'; DROP TABLE runs", "more than one"),
        ("SELECT $a$;$a$; DELETE FROM jobs", "more than one"),
        ("DELETE FROM jobs", "DELETE"),
        ("/* SELECT */ DROP TABLE jobs", "DROP"),
        ("PRAGMA query_only = OFF", "PRAGMA"),
        ("SET TRANSACTION READ WRITE", "SET"),
        ("COPY jobs TO PROGRAM 'id'", "COPY"),
        ("DO $$ BEGIN COMMIT; DELETE FROM jobs; END $$", "DO"),
        ("ATTACH 'other.sqlite' AS other", "ATTACH"),
    ],
)
def test_all_else_is_refused(sql: str, message: str) -> None:
    """Protects from a second statement that hides, and from commands that leave the transaction."""
    with pytest.raises(QueryError, match=message):
        one_query(sql)


PIECES = ("1", " ", "\n", "'", "''", '"', "`", "-- x", "/*", "*/", ";", ":x", "\\", "a", "SELECT 2", "(", ")", ",")


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_what_is_taken_is_one_statement_for_the_database_too(pieces: list[str]) -> None:
    """Protects from SQL that is read here in another way than by the database behind: SQLite itself is asked."""
    try:
        kept = one_query("SELECT 1 " + "".join(pieces))
    except QueryError:
        return
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(str(text(kept).compile()))
        except sqlite3.Error as error:
            assert "one statement" not in str(error), kept


@pytest.mark.parametrize(
    "sql",
    [
        "WITH gone AS (SELECT 1) DELETE FROM jobs",
        "WITH gone AS (DELETE FROM jobs RETURNING id) SELECT * FROM gone",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "SELECT nextval('jobs_id_seq')",
        "SELECT * INTO theirs FROM jobs",
        "SELECT writefile('/tmp/ones-was-here', 'x')",
    ],
)
def test_the_database_itself_refuses_to_write(store: Store, url: str, sql: str) -> None:
    """Protects the data where the SQL passes for a query: it is the database that holds it."""
    store.record_jobs([job(1)])
    with pytest.raises(StoreError):
        answer(url, sql)
    assert ask(url, "SELECT job_id FROM jobs") == [(1,)]


def test_parameters_and_texts_with_colons(store: Store, url: str) -> None:
    store.record_jobs([job(1, name="x'; DROP TABLE jobs; --"), job(2, name="10:30")])
    assert answer(url, "SELECT job_id FROM jobs WHERE name = :name", name="x'; DROP TABLE jobs; --") == [(1,)]
    assert answer(url, "SELECT job_id, '%s :no' FROM jobs WHERE name = '10:30'") == [(2, "%s :no")]
    assert answer(url, r"SELECT 'C:\a\:b' WHERE 'a_b' LIKE '_\__' ESCAPE '\'") == [(r"C:\a\:b",)]
    with pytest.raises(QueryError, match="--param name=VALUE"):
        answer(url, "SELECT job_id FROM jobs WHERE name = :name")
    with pytest.raises(QueryError, match="has no parameter 'other'"):
        answer(url, "SELECT job_id FROM jobs", other=1)


def test_rows_come_as_they_are_taken(url: str) -> None:
    """Protects memory: the first rows of an endless answer are there, and the rest is left."""
    reader = Reader(url, timeout_s=60)
    with reader.ask(ENDLESS if url.startswith("sqlite") else "SELECT i FROM generate_series(1, 10000000) i") as told:
        assert [next(told.rows) for _ in range(3)] == [(1,), (2,), (3,)]
    reader.close()


def test_a_question_without_end_is_given_up(url: str) -> None:
    began = time.monotonic()
    with pytest.raises(QueryError, match=r"not answered within 0\.2 s"):
        answer(url, f"SELECT COUNT(*) FROM ({ENDLESS}) n", timeout_s=0.2)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "sql", ["SELECT * FROM nothing", "SELECT nothing FROM jobs", "SELECT * FRM jobs", "SELECT (1", "SELECT 'a"]
)
def test_mistakes_are_explained(url: str, sql: str) -> None:
    with pytest.raises(QueryError, match="lists the views"):
        answer(url, sql)


def call(url: str, *arguments: str, width: int = 300) -> Result:
    return commands.call("db", "query", *arguments, "--database", url, width=width)


@pytest.fixture
def filled(sqlite_url: str) -> str:
    with Store.open(sqlite_url, "gres") as store:
        resized_job(store)
        store.record_jobs([job(9, name=HOSTILE, user=HOSTILE)])
    return sqlite_url


class TestCommand:
    """`slurm-ones db query`."""

    def test_without_a_question_the_views_are_listed(self, filled: str) -> None:
        shown = call(filled).stdout
        for view in VIEWS.values():
            assert view.name in shown and view.title in shown

    def test_a_view_of_one_job_in_each_format(self, filled: str, tmp_path: Path) -> None:
        asked = ("scaling", "--param", "job_id=7", "--columns", "gpus,samples_per_s,user_name,goodput")
        table = call(filled, *asked).stdout.split()
        assert table[4:] == ["1", "128", "alice", "–", "4", "512", "alice", "–"]
        expected = [
            {"gpus": 1, "samples_per_s": 128.0, "user_name": "alice", "goodput": None},
            {"gpus": 4, "samples_per_s": 512.0, "user_name": "alice", "goodput": None},
        ]
        assert json.loads(call(filled, *asked, "--format", "json").stdout) == expected
        read = list(csv.DictReader(io.StringIO(call(filled, *asked, "--format", "csv").stdout)))
        assert read == [{k: "" if v is None else str(v) for k, v in row.items()} for row in expected]
        file = tmp_path / "out.parquet"
        done = call(filled, *asked, "--format", "parquet", "--output", str(file))
        assert done.exit_code == 0, done.output
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(file).to_pylist() == expected

    def test_a_number_may_be_a_name(self, filled: str) -> None:
        with Store.open(filled, "gres") as store:
            store.record_jobs([job(10, account="0042")])
        told = json.loads(call(filled, "job_summary", "--param", "account=0042", "--format", "json").stdout)
        assert [row["job_id"] for row in told] == [10]

    def test_nothing_is_an_answer_too(self, filled: str) -> None:
        for format, shown in (("json", "[]\n"), ("csv", "job_id\n")):
            asked = ("--sql", "SELECT job_id FROM jobs WHERE job_id = 0", "--format", format)
            assert call(filled, *asked).stdout == shown
        assert call(filled, "scaling", "--param", "job_id=0").exit_code == 0

    @pytest.mark.parametrize("since", ["1970-01-01T00:00Z", "0", "36500d"])
    @pytest.mark.parametrize("saved", ["gpu_hours_by_user", "who_used_the_gpus"])
    def test_times_are_written_one_way(self, filled: str, saved: str, since: str) -> None:
        """A date, Unix seconds and how long ago are taken whether the SQL compares seconds or days."""
        until = () if saved == "who_used_the_gpus" else ("--param", "until=0d")
        told = json.loads(call(filled, saved, "--param", f"since={since}", *until, "--format", "json").stdout)
        assert told
        later = ("--param", "since=2038-01-01", *until)
        assert json.loads(call(filled, saved, *later, "--format", "json").stdout) == []

    def test_a_query_of_ones_own_declares_its_parameters(self, filled: str) -> None:
        """A comment gives a parameter's kind; a day is one of UTC, whatever the local time is."""
        sql = "--: since time\n--: day day\nSELECT :since AS since, :day AS day"
        given = ("--param", "since=1970-01-02T00:00Z", "--param", "day=1970-01-02")
        told = json.loads(call(filled, "--sql", sql, *given, "--format", "json").stdout)
        assert told == [{"since": 86400.0, "day": "1970-01-02"}]

    def test_limits(self, filled: str) -> None:
        """An endless answer ends where it is told to, and a table by itself."""
        assert call(filled, "--sql", ENDLESS, "--limit", "3", "--format", "csv").stdout == "i\n1\n2\n3\n"
        shown = call(filled, "--sql", ENDLESS)
        assert shown.stdout.split()[-1] == "1000" and "--limit" in shown.stderr

    def test_a_file_and_its_parameters(self, filled: str, tmp_path: Path) -> None:
        file = tmp_path / "mine.sql"
        file.write_text("-- mine\nSELECT :a AS a, :b AS b, :c AS c, :d AS d;\n")
        parameters = [word for item in ("a=1", "b=1.5", "c=x=y", "d=nan") for word in ("--param", item)]
        told = json.loads(call(filled, "--file", str(file), *parameters, "--format", "json").stdout)
        assert told == [{"a": 1, "b": 1.5, "c": "x=y", "d": "nan"}]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("nothing",), "there are job_summary"),
            (("scaling", "--param", "job=7"), "it has cluster, job_id"),
            (("scaling", "--param", "job_id"), "write NAME=VALUE"),
            (("scaling", "--param", "job_id=abc"), "--param job_id=abc: job_id is a whole number, such as 7"),
            (("scaling", "--param", "job_id=7.5"), "job_id is a whole number"),
            (("scaling", "--param", "job_id=99999999999999999999"), "job_id is a whole number"),
            (("scaling", "--param", "goodput=fast"), "goodput is a number"),
            (("run_timeline", "--param", "start_time=yesterday"), "start_time: 'yesterday' is no time"),
            (("gpu_hours", "--param", "day=soon"), "day: 'soon' is no time"),
            (("job_summary", "--param", "elastic=maybe"), "elastic is 0 or 1"),
            (("why", "--param", "job_id=abc"), "job_id is a whole number"),
            (("causes", "--param", "since=2026-13-01", "--param", "until=0d"), "since: '2026-13-01' is no time"),
            (("who_used_the_gpus", "--param", "since=week"), "since: 'week' is no time"),
            (("--sql", "--: a when\nSELECT :a", "--param", "a=1"), "parameter a: no kind is called 'when'"),
            (("scaling", "--sql", "SELECT 1"), "give only one"),
            (("scaling", "--columns", "gpus,nothing"), "no column 'nothing'"),
            (("--sql", "SELECT 1", "--columns", "a"), "only for views"),
            (("--sql", "DROP TABLE jobs"), "begin with SELECT"),
            (("--sql", "SELECT :x"), "--param x=VALUE"),
            (("--file", "/nonexistent.sql"), "cannot be read"),
            (("scaling", "--format", "parquet"), "--output"),
            (("scaling", "--format", "csv", "--output", "/nonexistent/x"), "cannot be written"),
            (("--sql", "SELECT 1 AS a, 2 AS a", "--format", "parquet", "--output", "/nonexistent/x"), "one name"),
        ],
    )
    def test_errors_say_what_to_do(self, filled: str, arguments: tuple[str, ...], message: str) -> None:
        """Exit code 2 and a line on stderr."""
        done = call(filled, *arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr

    def test_parquet_without_pyarrow(self, filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        done = call(filled, "scaling", "--format", "parquet", "--output", str(tmp_path / "x"))
        assert done.exit_code == 2 and "ones-db[notebook]" in done.stderr
