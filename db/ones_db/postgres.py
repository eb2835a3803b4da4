"""PostgreSQL through psycopg 3. An advisory lock lets one writer in at a time, and COPY stores many rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import URL, BigInteger, Connection, Double, Engine, Table, create_engine, event, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.util import immutabledict

from ones_db import backend
from ones_db.backend import TOO_LARGE, UPGRADE, Mode, SchemaError, StoreBusy, StoreError, StoreLost, this_process

LOCK = 0x6F6E6573
"""Key of the advisory lock that each transaction takes before it writes."""
FEW = 50
"""Number of rows up to which INSERT is faster than COPY."""
ABOUT = ("hostaddr", "host", "port", "service")
"""Parameters of a URL that say where the server is."""

# A network that fell silent is noticed, by the waiting client also, in about a minute.
_QUIET: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

_REFUSED = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry")


def named(holder: str) -> str:
    """Return the application name for sessions of a process (host:process id). The server keeps 63 characters."""
    return f"slurm-ones {holder[-50:]}"


class PostgreSQL(backend.Backend):
    """A database on a PostgreSQL server. The password is from libpq's own files or the URL, and is never shown."""

    def __init__(self, url: URL) -> None:
        self._url = url.set(drivername="postgresql+psycopg")
        about = {name: value for name, value in url.query.items() if name in ABOUT}
        self.place = url._replace(drivername="postgresql", password=None, query=immutabledict(about)).render_as_string()

    def prepare(self) -> None:
        engine = self.engine("read")
        try:
            with engine.connect() as connection:
                encoding = connection.scalar(text("SHOW server_encoding"))
        except DBAPIError as error:
            raise self.explained(error) from error
        finally:
            engine.dispose()
        if encoding != "UTF8":
            raise StoreError(f"{self.place}: its encoding is {encoding}; names need a database made with UTF8")

    def engine(self, mode: Mode) -> Engine:
        try:
            engine = create_engine(
                self._url,
                connect_args={name: value for name, value in _QUIET.items() if name not in self._url.query},
                # A server that was restarted since the last call is met with a new connection.
                pool_pre_ping=True,
                execution_options={"ones_backend": self},
            )
        except ModuleNotFoundError:
            raise StoreError(f"{self.place}: PostgreSQL needs psycopg: pip install 'ones-db[postgres]'") from None

        @event.listens_for(engine, "connect")
        def _connected(connection: Any, record: Any) -> None:
            settings = {
                "lock_timeout": f"{backend.BUSY_S * 1000:.0f}ms",
                "default_transaction_read_only": "on" if mode in ("read", "watch") else "off",
                # A server may be set to answer before it flushed; a call that returned must be durable.
                "synchronous_commit": "on",
                # What a killed writer had asked for does not keep the next one waiting (PostgreSQL 14).
                "client_connection_check_interval": "5s",
                # By it, who takes the lead from a process that hangs ends all sessions of that one.
                "application_name": named(this_process()),
            }
            connection.execute(
                "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS ours (name, value)"
                " JOIN pg_settings USING (name)",
                (list(settings), list(settings.values())),
            )
            connection.commit()

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            # Each statement of a writer sees what was committed before it, so the lock comes first.
            if connection.get_execution_options().get("ones_write", False):
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")

        return engine

    def options(self, write: bool) -> Mapping[str, Any]:
        level = "READ COMMITTED" if write else "REPEATABLE READ"
        return {"isolation_level": level, "postgresql_readonly": not write}

    def explained(self, error: DBAPIError) -> StoreError:
        words = " ".join(str(error.orig).split())
        state = getattr(error.orig, "sqlstate", None) or ""
        place = self.place
        if state == "55P03":
            waited = f"{backend.BUSY_S:.0f} s"
            return StoreBusy(f"{place}: locked by another session for {waited}; is a second companion writing it?")
        if state.startswith("53"):
            return StoreError(f"{place}: the server has no room ({words}); nothing of this call was stored")
        if state == "22003":
            return StoreError(f"{place}: {TOO_LARGE}: {words}")
        if state in ("25006", "42501"):
            return StoreError(f"{place}: you may not write it, or not read this: {words}")
        if state == "42P01":
            return SchemaError(f"{place}: {words}; run `{UPGRADE}`")
        if not state and "database" in words and "does not exist" in words:
            return SchemaError(f"{place}: no such database; make it (createdb), then run `{UPGRADE}`")
        if not state and any(known in words for known in _REFUSED):
            return StoreError(f"{place}: {words}; a password is taken from ~/.pgpass, PGPASSWORD or a service file")
        lost = not state and isinstance(error, OperationalError)
        if lost or error.connection_invalidated or state.startswith(("08", "57")):
            return StoreLost(f"{place}: the server is not there or went away ({words}); the next call connects again")
        return StoreError(f"{place}: {words}")

    insert = staticmethod(insert)

    def add_rows(self, connection: Connection, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows by COPY. If a key is stored already, which is rare, the rows go through a temporary table."""
        if not rows:
            return
        names = [column.name for column in table.columns]
        if len(rows) < FEW:
            values = [dict(zip(names, row, strict=True)) for row in rows]
            connection.execute(insert(table).on_conflict_do_nothing(), values)
            return
        try:
            with connection.begin_nested():
                _copy(connection, table.name, table, rows)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "23505":
                raise
            columns = ", ".join(f'"{name}"' for name in names)
            connection.exec_driver_sql(f"CREATE TEMPORARY TABLE ones_new (LIKE {table.name}) ON COMMIT DROP")
            _copy(connection, "ones_new", table, rows)
            copied = f"SELECT {columns} FROM ones_new ON CONFLICT DO NOTHING"
            connection.exec_driver_sql(f"INSERT INTO {table.name} ({columns}) {copied}")
            connection.exec_driver_sql("DROP TABLE ones_new")

    def renumber(self, connection: Connection, table: Table) -> None:
        column = table.autoincrement_column
        if column is None:
            return
        names = {"table": table.name, "column": column.name}
        sequence = connection.scalar(text("SELECT pg_get_serial_sequence(:table, :column)"), names)
        if sequence is not None:
            following = f"SELECT coalesce(max({column.name}), 0) + 1 FROM {table.name}"
            connection.exec_driver_sql(f"SELECT setval('{sequence}', ({following}), false)")


_NUMBERS = {BigInteger: "int8", Double: "float8"}
"""PostgreSQL's name of each type whose values are sent in binary form, which is faster."""


def _copy(connection: Connection, target: str, table: Table, rows: Sequence[Sequence[Any]]) -> None:
    """COPY rows of `table` into the table `target`. Raises the driver's errors as SQLAlchemy's, and `OverflowError`."""
    driver: Any = connection.connection.driver_connection
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    types = [_NUMBERS.get(type(column.type)) for column in table.columns]
    form = " (FORMAT BINARY)" if None not in types else ""
    try:
        with driver.cursor() as cursor, cursor.copy(f"COPY {target} ({columns}) FROM STDIN{form}") as copy:
            if form:
                copy.set_types(types)
            for row in rows:
                copy.write_row(row)
    except connection.dialect.loaded_dbapi.Error as error:
        lost = bool(driver.closed)
        if lost:
            connection.invalidate(error)
        raise DBAPIError(f"COPY {target}", None, error, connection_invalidated=lost) from error
