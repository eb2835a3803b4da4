"""Transactions, INSERT and UPDATE statements, the check of the schema, and the base class of `Store`.

A leader's term fences its writes: once a newer term has begun, they fail. alembic is not imported here, so that
commands start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from threading import local
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, Table, bindparam, inspect, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from ones_db.backend import TOO_LARGE, UPGRADE, Backend, Mode, NotLeader, SchemaError, StoreError
from ones_db.postgres import PostgreSQL
from ones_db.sqlite import SQLite
from ones_db.tables import LEADERS, SCHEMA_REVISION

FORMS = "write sqlite:///PATH (sqlite:////PATH from the root) or postgresql://USER@HOST/DATABASE"


def backend_of(url: str) -> Backend:
    """Return the database that a URL names. Raises `StoreError` if the URL is malformed or of an unknown kind."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # its port is no number
        # Not shown if it may hold a password.
        shown = "the given text" if "@" in url else repr(url)
        raise StoreError(f"{shown} is not a database URL; {FORMS}") from None
    kind = parsed.get_backend_name()
    if kind == "sqlite":
        return SQLite(parsed)
    if kind == "postgresql":
        return PostgreSQL(parsed)
    raise StoreError(f"{kind}: unknown kind of database; {FORMS}")


def names_password(url: str) -> bool:
    """Return True if the URL has a password, which lists of processes and shell histories would show."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return "@" in url
    return parsed.password is not None or "password" in parsed.query


def backend_behind(source: Engine | Connection) -> Backend:
    """Return the backend that made this engine, or the engine of this connection."""
    return cast(Backend, source.get_execution_options()["ones_backend"])


def _existing(url: str) -> Backend:
    backend = backend_of(url)
    if backend.exists():
        return backend
    problem = "no such database, or an empty one; the first `slurm-ones run` makes it, or"
    raise SchemaError(f"{backend.place}: {problem} `{UPGRADE}`")


@contextmanager
def opened(url: str, mode: Mode = "read") -> Iterator[Engine]:
    """Context with an engine for the database at a URL. To read, it must exist: raises `SchemaError` if it does not."""
    backend = _existing(url) if mode == "read" else backend_of(url)
    engine = backend.engine(mode)
    try:
        yield engine
    finally:
        engine.dispose()


def checked(url: str) -> Engine:
    """Return an engine that reads the database at a URL. Raises `SchemaError` if its schema is of another version."""
    engine = _existing(url).engine("read")
    try:
        with transaction(engine) as connection:
            check_revision(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def transaction(engine: Engine, *, write: bool = False) -> Iterator[Connection]:
    """Context of a transaction. Its changes are durable after the block, and undone if the block raises an error.

    A transaction that only reads sees the database of one moment. Writers wait for each other; readers never wait.
    """
    backend = backend_behind(engine)
    try:
        options = backend.options(write)
        with engine.connect().execution_options(ones_write=write, **options) as connection, connection.begin():
            yield connection
    except DBAPIError as error:
        raise backend.explained(error) from error
    except OverflowError as error:
        raise StoreError(f"{backend.place}: {TOO_LARGE}: {error}") from error


OF_JOBS = ("positions", "reported", "members", "histories", "resizes")
"""Names of the queries whose results are cached for each job."""
Known = TypeVar("Known", bound=Hashable)
Found = TypeVar("Found")
UNFINISHED = " copying"
"""Suffix of the target's schema revision while `ones_db.copy` has not finished a copy."""


def revision_of(connection: Connection, *, unfinished: bool = False) -> str | None:
    """Return the schema revision of the database; None if the database is empty.

    Raises `SchemaError` for another program's tables and, unless `unfinished` is True, for an unfinished copy.
    """
    place = backend_behind(connection).place
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables and "clusters" in tables:
        found = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
        if found.endswith(UNFINISHED) and not unfinished:
            raise SchemaError(f"{place}: holds a copy that was not finished; run `slurm-ones db copy` again")
        return found.removesuffix(UNFINISHED)
    if tables:
        raise SchemaError(f"{place}: holds tables of another program ({', '.join(tables[:3])}); name another database")
    return None


def check_revision(connection: Connection, *, unfinished: bool = False) -> None:
    """Raise `SchemaError` if the database does not have this version's schema. The message says what to run."""
    place, found = backend_behind(connection).place, revision_of(connection, unfinished=unfinished)
    if found is None:
        raise SchemaError(f"{place}: an empty database; run `{UPGRADE}`")
    if found < SCHEMA_REVISION:
        what_to_do = f"run `{UPGRADE}` (it copies an SQLite file first)"
        raise SchemaError(f"{place}: schema {found} is older than {SCHEMA_REVISION}; {what_to_do}")
    if found > SCHEMA_REVISION:
        raise SchemaError(
            f"{place}: schema {found} is newer than {SCHEMA_REVISION}, the newest that this version knows; "
            f"install the newer slurm-ones (`{UPGRADE}` goes forward only)"
        )


def add_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows whose keys are new. Existing rows stay as they are."""
    if rows:
        connection.execute(_storing(backend_behind(connection).insert, table, (), ()), rows)


def add_rows(connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
    """Insert many rows whose keys are new, fast. Each row has a value for every column, in the table's order."""
    backend_behind(connection).add_rows(connection, table, rows)


def add_or_replace(connection: Connection, table: Table, key: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, and update those whose key is stored already. All rows must have the same columns."""
    if rows:
        connection.execute(_storing(backend_behind(connection).insert, table, tuple(key), tuple(rows[0])), rows)


@cache
def _storing(insert: Callable[[Table], Any], table: Table, key: Sequence[str], names: Sequence[str]) -> Any:
    statement = insert(table)
    if not key:
        return statement.on_conflict_do_nothing()
    changed = {name: statement.excluded[name] for name in names if name not in key}
    return statement.on_conflict_do_update(index_elements=list(key), set_=changed)


def change_rows(connection: Connection, table: Table, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Update the columns `names` of rows. Each row maps columns to new values, and "key" to its id."""
    if names and rows:
        connection.execute(_changing(table, tuple(names)), rows)


@cache
def _changing(table: Table, names: Sequence[str]) -> Any:
    return table.update().where(table.c.id == bindparam("key")).values({name: bindparam(name) for name in names})


class LeaderRecord(NamedTuple):
    """Row of the table `leaders`: the companion that leads a cluster, or that led it last."""

    term: int
    holder: str
    since: float
    beat: float


def leader_of(connection: Connection, cluster: int) -> LeaderRecord | None:
    """Return the companion that leads the cluster (clusters.id) or led it last; None if none ever led it."""
    row = connection.execute(_LEADER, {"cluster": cluster}).one_or_none()
    return None if row is None else LeaderRecord(*row)


_LEADER = select(*(LEADERS.c[one] for one in LeaderRecord._fields)).where(LEADERS.c.cluster_id == bindparam("cluster"))


def check_term(connection: Connection, cluster: int, term: int) -> None:
    """Raise `NotLeader` if `term` is not the cluster's newest term.

    Beginning a term is a write too, and writers wait for each other. So a transaction of an older term either commits
    before the new term begins, or fails here.
    """
    found = leader_of(connection, cluster)
    if found is None or found.term != term:
        place = backend_behind(connection).place
        by = f"{found.holder or 'no companion'} leads now, in term {found.term}" if found else "no term is stored"
        raise NotLeader(f"{place}: the lead of term {term} is lost: {by}; nothing was stored")


class Transactions:
    """Base of all parts of a `Store`: transactions over one cluster's data, and the cache of query results."""

    def __init__(self, engine: Engine, cluster: str, cluster_key: int, read_only: bool, term: int | None) -> None:
        """Use `Store.open`."""
        self._engine = engine
        self._backend = backend_behind(engine)
        self._cluster = cluster_key
        self._term = term
        self._thread = local()
        """Thread-local storage. Its attribute `connection` is the connection with which the thread reads at present."""
        self._memory: dict[str, dict[Any, Any]] | None = None
        """Cache: for each query's name, results by the query's arguments. None if this store does not cache."""
        self.place = self._backend.place
        self.cluster = cluster
        self.read_only = read_only

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Context in which all reads of this thread see the database of the same moment."""
        if getattr(self._thread, "connection", None) is not None:
            yield
            return
        with transaction(self._engine) as connection:
            self._thread.connection = connection
            try:
                yield
            finally:
                self._thread.connection = None

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self.one_moment():
            yield self._thread.connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        if self.read_only:
            raise StoreError(f"{self.place}: opened for reading only")
        try:
            with transaction(self._engine, write=True) as connection:
                if self._term is not None:
                    check_term(connection, self._cluster, self._term)
                yield connection
        except BaseException:
            # It may have been stored, and the lead may be another's.
            self._forget()
            raise

    def remember(self) -> None:
        """Cache results from now on. Only the leader's store may do so, because no other process writes then.

        From then on only one thread may use the store. Its writes update the cache; a write that fails empties it.
        """
        self._memory = {}

    def _recall(
        self, question: str, about: Collection[Known], ask: Callable[[Connection, list[Known]], Mapping[Known, Found]]
    ) -> dict[Known, Found]:
        """Return the result for each key that has one. A single call of `ask` reads all results that are not cached."""
        known = {} if self._memory is None else self._memory.setdefault(question, {})
        if unknown := [one for one in about if one not in known]:
            with self._read() as connection:
                known.update(ask(connection, unknown))
        return {one: known[one] for one in about if one in known}

    def _remembered(self, question: str) -> dict[Any, Any]:
        """Return the cached results of a query, by its arguments. Methods that write the query's rows update them."""
        return {} if self._memory is None else self._memory.get(question, {})

    def _forget(self, *questions: str, of: Callable[[int], object] | None = None) -> None:
        """Drop the cached results of these queries; without a name, of all queries.

        With `of`, drop only results of jobs for whose id it returns True.
        """
        for question in questions or tuple(self._memory or ()):
            known = self._remembered(question)
            for one in [one for one in known if of is None or of(one[0] if isinstance(one, tuple) else one)]:
                del known[one]


Part = TypeVar("Part", bound=Transactions)
Given = ParamSpec("Given")


Asked: TypeAlias = Callable[Concatenate[Part, Connection, Given], Found]
Answered: TypeAlias = Callable[Concatenate[Part, Given], Found]


def reading(method: Asked[Part, Given, Found], *, write: bool = False) -> Answered[Part, Given, Found]:
    """Decorate a method that reads. A call opens a transaction and passes its connection as the first argument."""

    @wraps(method)
    def call(self: Part, /, *given: Given.args, **named: Given.kwargs) -> Found:
        with self._write() if write else self._read() as connection:
            return method(self, connection, *given, **named)

    return call


def noting(method: Asked[Part, Given, Found]) -> Answered[Part, Given, Found]:
    """Decorate a method that writes, as `reading` does. The method itself must update cached results."""
    return reading(method, write=True)


def remembering(question: str) -> Callable[[Asked[Part, Given, Found]], Answered[Part, Given, Found]]:
    """Decorate a method that reads, as `reading` does. If the store caches, it keeps the results under this name."""

    def remembered(method: Asked[Part, Given, Found]) -> Answered[Part, Given, Found]:
        @wraps(method)
        def call(self: Part, /, *given: Given.args, **named: Given.kwargs) -> Found:
            about = (*given, *named.values())
            known = self._recall(question, [about], lambda found, _: {about: method(self, found, *given, **named)})
            return known[about]

        return call

    return remembered
