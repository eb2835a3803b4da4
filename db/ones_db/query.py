"""SQL queries that only read, and the database's views as pandas frames, for notebooks::

    import ones_db

    ones = ones_db.connect("sqlite:///ones.sqlite")
    ones.scaling(job_id=7).plot(x="gpus", y="samples_per_s")

The database itself refuses changes. An SQLite file is opened for reading and set to allow only queries; on PostgreSQL
each transaction is set to read-only first. In addition, only a single SELECT, WITH or VALUES statement is sent. Frames
need pandas (``pip install 'ones-db[notebook]'``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from ones_db.backend import StoreError
from ones_db.engine import backend_behind, checked, transaction
from ones_db.views import KINDS, VIEWS, Column
from ones_wrapper.protocol.choices import listed

if TYPE_CHECKING:
    from pandas import DataFrame, Series


R = TypeVar("R", bound="Reader")

_SAVED = Path(__file__).with_name("queries")
TIMEOUT_S = 300.0
"""Default time limit of a query, in seconds: on SQLite for all its rows, on PostgreSQL for each fetch of rows. It is
needed because SQLite cannot empty its write-ahead log while a query runs."""
ROWS = 1_000
"""Number of rows that are fetched at once."""

_QUERIES = ("SELECT", "WITH", "VALUES")
_MISTAKES = ("no such", "does not exist", "syntax error", "ambiguous", "misuse", "incomplete", "unrecogn", "untermin")
# What may hold a semicolon or a colon that is no part of the SQL itself, then the two.
_PARTS = re.compile(
    r"""(?P<held>\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?\*/)|(?P<end>;)""",
    re.DOTALL,
)


class QueryError(StoreError):
    """Error: the query cannot be answered. The message says what to change."""


@dataclass(frozen=True)
class Answer:
    """Result of a query: names of columns, and rows. Rows are fetched while the query's context is open."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


def one_query(sql: str) -> str:
    """Return the query in the text, without comments and semicolon, in the form for SQLAlchemy's `text`.

    Raises `QueryError` if the text has no statement, more than one, or one that is not a query.
    """
    kept: list[str] = []
    place = 0
    for part in _PARTS.finditer(sql):
        kept.append(sql[place : part.start()])
        if part["held"]:
            # A colon in a text is no parameter.
            kept.append(part["held"].replace(":", r"\:"))
        elif part["comment"]:
            kept.append(" ")
        elif _PARTS.sub(lambda part: part["held"] or "", sql[part.end() :]).strip():
            raise QueryError("more than one statement; ask one question at a time")
        place = part.end()
    found = "".join([*kept, sql[place:]]).strip()
    first = re.match(r"[\s(]*(\w*)", found)
    word = first[1].upper() if first else ""
    if not found:
        raise QueryError("no SQL is given")
    if word not in _QUERIES:
        raise QueryError(f"{word or found[:20]!r} is no query, and only queries are taken; begin with SELECT or WITH")
    return found


def saved_queries() -> dict[str, str]:
    """Return this package's saved queries: for each name, a sentence on what the query returns."""
    found = {}
    for path in sorted(_SAVED.glob("*.sql")):
        text_of = " ".join(line[3:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("-- "))
        found[path.stem] = text_of.split(". ")[0].rstrip(".")
    return found


def saved_query(name: str) -> str:
    """Return the SQL of a saved query. Raises `QueryError` with all names if there is no such query."""
    if name not in saved_queries():
        raise QueryError(f"no query is called {name!r}; there are {listed(saved_queries(), name)}")
    return (_SAVED / f"{name}.sql").read_text(encoding="utf-8")


def parameters_of(sql: str) -> dict[str, str]:
    """Return the kind of each parameter that a comment such as ``--: since time`` declares. Raises `QueryError`."""
    found = dict(re.findall(r"^--:\s*(\w+)\s+(\w+)\s*$", sql, re.MULTILINE))
    for name, kind in found.items():
        if kind not in KINDS:
            raise QueryError(f"parameter {name}: no kind is called {kind!r}; there are {listed(KINDS, kind)}")
    return found


def view_query(name: str, where: Sequence[str] = (), columns: Sequence[str] = ()) -> str:
    """Return SQL that reads these columns of a view, or all of them.

    Each column in `where` must equal the parameter of its name. Raises `QueryError` for an unknown view or column.
    """
    if name not in VIEWS:
        raise QueryError(f"no view is called {name!r}; there are {listed(VIEWS, name)}")
    view = VIEWS[name]
    known = [column.name for column in view.columns]
    for column in (*where, *columns):
        if column not in known:
            raise QueryError(f"{name} has no column {column!r}; it has {listed(known, column)}")
    condition = " WHERE " + " AND ".join(f"{column} = :{column}" for column in where) if where else ""
    order = ", ".join(f"{column} NULLS FIRST" for column in view.order)
    return f"SELECT {', '.join(columns or known)} FROM {name}{condition} ORDER BY {order}"


class Reader:
    """Read-only access to the database at a URL."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Open the database. Raises `StoreError` and `SchemaError` as `Store.open` does."""
        self._engine = checked(url)
        self._backend = backend_behind(self._engine)
        self._timeout_s = timeout_s
        self.place = self._backend.place

    def close(self) -> None:
        """Close all connections to the database."""
        self._engine.dispose()

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def ask(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Iterator[Answer]:
        """Context with the answer to one query. `parameters` has a value for each ``:name`` in the SQL.

        All rows are of one moment, and are fetched as the caller iterates. Raises `QueryError` if the SQL is not a
        single query, names an unknown table or column, or takes too long.
        """
        question, values = text(one_query(sql)), dict(parameters or {})
        _check_parameters(set(question._bindparams), set(values))
        with transaction(self._engine) as connection:
            self._limit(connection)
            try:
                result = connection.execution_options(stream_results=True, yield_per=ROWS).execute(question, values)
            except DBAPIError as error:
                raise self._explained(error) from error
            try:
                yield Answer(tuple(result.keys()), self._rows(result))
            finally:
                result.close()

    def _limit(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {max(int(self._timeout_s * 1000), 1)}")
            return
        end = time.monotonic() + self._timeout_s
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: time.monotonic() > end, 10_000)

    def _rows(self, result: Any) -> Iterator[tuple[Any, ...]]:
        try:
            for row in result:
                yield tuple(row)
        except DBAPIError as error:
            raise self._explained(error) from error

    def _explained(self, error: DBAPIError) -> StoreError:
        words = str(error.orig).strip().splitlines()[0]
        if "interrupted" in words or "statement timeout" in words:
            return QueryError(f"not answered within {self._timeout_s:g} s; select fewer jobs, or set a longer limit")
        if "readonly" in words or "read-only" in words:
            return QueryError(f"{words}: the database is only read here")
        if any(sign in words for sign in _MISTAKES):
            return QueryError(f"{words}; `slurm-ones db query` lists the views, SELECT * FROM one LIMIT 1 its columns")
        return self._backend.explained(error)


def _check_parameters(asked: set[str], given: set[str]) -> None:
    for name in sorted(asked - given):
        raise QueryError(f"the query has a parameter {name!r} that is not given; give --param {name}=VALUE")
    for name in sorted(given - asked):
        raise QueryError(f"the query has no parameter {name!r}; write :{name} where its value belongs")


_TYPES = {"int": "Int64", "float": "float64", "text": "string", "day": "string", "bool": "boolean"}
"""pandas type for each kind of column. All of these types allow missing values."""


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> Database:
    """Open a database for reading, such as ``sqlite:///build/demo/ones.sqlite`` or ``postgresql://host/ones``.

    Raises `StoreError` if pandas is missing, and the errors of `Store.open`.
    """
    _pandas()
    return Database(url, timeout_s=timeout_s)


def _reads(name: str) -> Callable[..., DataFrame]:

    def read(self: Database, **where: Any) -> DataFrame:
        return self.view(name, **where)

    read.__name__, read.__doc__ = name, f"{VIEWS[name].title}."
    return read


class Database(Reader):
    """The views of a database that `connect` opens. Each is a method that returns a pandas frame.

    docs/tables.md has the columns of each frame. Times are `datetime64` with the zone UTC; columns with the same
    times as text are left out. Keywords select rows: ``job_id=7``, ``user_name="alice"``. A frame shows the database of
    one moment; the next frame may show a later one.
    """

    job_summary = _reads("job_summary")
    run_timeline = _reads("run_timeline")
    block_timeline = _reads("block_timeline")
    membership_timeline = _reads("membership_timeline")
    scaling = _reads("scaling")
    resize_cost = _reads("resize_cost")
    gpu_hours = _reads("gpu_hours")
    idle_gpus = _reads("idle_gpus")
    decisions_explained = _reads("decisions_explained")
    what_if = _reads("what_if")
    size_limits = _reads("size_limits")

    def view(self, name: str, **where: Any) -> DataFrame:
        """Return a view's rows in its order. Keywords select rows by values of columns. Raises `QueryError`."""
        pandas = _pandas()
        with self.ask(view_query(name, list(where)), where) as answer:
            rows = list(answer.rows)
        kinds = {column.name: column for column in VIEWS[name].columns}
        frame = pandas.DataFrame.from_records(rows, columns=list(answer.columns))
        shown = [name for name in answer.columns if kinds[name].kind != "said"]
        return pandas.DataFrame({name: _typed(frame[name], kinds[name]) for name in shown})

    def query(self, sql: str, **parameters: Any) -> DataFrame:
        """Return the rows of a SQL query. Keywords give the values of its ``:names``. Raises `QueryError`."""
        with self.ask(sql, parameters) as answer:
            frame = _pandas().DataFrame.from_records(list(answer.rows), columns=list(answer.columns))
        return frame.convert_dtypes()


def _typed(series: Series, column: Column) -> Series:
    if column.kind == "time":
        return _pandas().to_datetime(series.astype("float64"), unit="s", utc=True).dt.as_unit("us")
    return series.astype(_TYPES[column.kind])


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise StoreError("frames need pandas: pip install 'ones-db[notebook]'") from None
    return pandas
