"""Who may read what, on PostgreSQL: a role for readers, and policies on the rows of jobs.

A user logs in under their own name, as a member of the role. Of `jobs` they see their own by the policy there; every
other table is followed by its foreign key to a row that they may see, so that one policy decides for all. The owner
of the tables, the companion, is held by none of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sqlalchemy import Connection, text

from ones_db.engine import backend_of, check_revision, transaction
from ones_db.errors import StoreError
from ones_db.tables import ACTIONS, HEALTH, JOBS, METADATA
from ones_db.views import VIEWS, can_secure

ROLE = "ones_reader"
"""The readers' role where no other is named."""

OPEN = ("clusters", "decisions", "leaders", "nodes", "node_changes")
"""Tables that are about no single job."""
CLOSED = (ACTIONS.name, HEALTH.name)
"""Tables for operators: readers get none of them."""

_OWN = "ones own"
_ALL = "ones all"
"""What policies are called, before the name of their role."""


def grant(url: str, role: str = ROLE, *, everything: bool = False) -> None:
    """Let members of the role read: their own jobs and what belongs to them, or everything.

    Makes the role where it is absent (NOLOGIN; members are the site's to add), and may be called again, also to change
    from one to the other. One transaction. Raises `StoreError` where the database is a file, the server older than 15
    and not everything is to be seen, or the caller neither owns the tables nor may make the role.
    """
    _check_name(role)
    backend = backend_of(url)
    engine = backend.engine("upgrade")
    try:
        with transaction(engine, write=True) as connection:
            _check(connection, backend.place)
            if not everything and not can_secure(connection):
                raise StoreError(
                    f"{backend.place}: the views of a server older than PostgreSQL 15 would show everybody's jobs; "
                    "upgrade the server, or let everybody see everything (--open)"
                )
            _make(connection, role, backend.place)
            _take(connection, role)
            _give(connection, role, everything)
    finally:
        engine.dispose()


def revoke(url: str, role: str = ROLE) -> None:
    """Take from the role whatever it may do with our tables and views; the role itself stays. Raises `StoreError`."""
    _check_name(role)
    backend = backend_of(url)
    engine = backend.engine("upgrade")
    try:
        with transaction(engine, write=True) as connection:
            _check(connection, backend.place)
            if not _known(connection, role):
                raise StoreError(f"{backend.place}: there is no role {role!r}")
            _take(connection, role)
    finally:
        engine.dispose()


def granted(connection: Connection) -> dict[str, bool]:
    """The roles that `grant` let read, each with whether it sees everything."""
    if connection.dialect.name != "postgresql":
        return {}
    found = connection.execute(
        text(
            "SELECT r.rolname, p.polname FROM pg_policy p JOIN pg_roles r ON r.oid = ANY (p.polroles)"
            " WHERE p.polrelid = to_regclass('jobs') AND p.polname LIKE 'ones %'"
        )
    )
    return {str(role): str(name).startswith(_ALL) for role, name in found}


def renew(connection: Connection) -> None:
    """Grant again what was granted, once an upgrade has made the views anew, and tables perhaps."""
    for role, everything in granted(connection).items():
        _take(connection, role)
        _give(connection, role, everything)


def parents() -> dict[str, tuple[str, str]]:
    """Of each table that belongs to jobs, other than theirs: its column that names a row of a table that does too, and
    that table."""
    found: dict[str, tuple[str, str]] = {}
    for table in METADATA.sorted_tables:
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name):
            target = key.column.table.name
            if table.name not in found and (target == JOBS.name or target in found):
                found[table.name] = (key.parent.name, target)
    return found


def _check_name(role: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,49}", role):
        raise StoreError(f"{role[:70]!r} is no name for a role; take letters, digits, '_', '-' and '.', 50 at most")


def _check(connection: Connection, place: str) -> None:
    if connection.dialect.name != "postgresql":
        raise StoreError(
            f"{place}: a file has no roles; who may read it sees all of it. Close it to others, and give users copies "
            "of their own rows: slurm-ones db export"
        )
    check_revision(connection)


def _known(connection: Connection, role: str) -> bool:
    return bool(connection.scalar(text("SELECT count(*) FROM pg_roles WHERE rolname = :role"), {"role": role}))


def _make(connection: Connection, role: str, place: str) -> None:
    if _known(connection, role):
        return
    may = connection.scalar(text("SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"))
    command = f"CREATE ROLE {_quoted(connection, role)} NOLOGIN"
    if not may:
        raise StoreError(f"{place}: there is no role {role!r}, and you may make none; have a superuser run: {command}")
    connection.exec_driver_sql(command)


def _give(connection: Connection, role: str, everything: bool) -> None:
    name = _quoted(connection, role)
    readable = ", ".join((*OPEN, *_owned(), *VIEWS, "alembic_version"))
    connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {_schema(connection)} TO {name}")
    connection.exec_driver_sql(f"GRANT SELECT ON {readable} TO {name}")
    policy = _quoted(connection, f"{_ALL if everything else _OWN} {role}")
    for table, rows in _owned().items():
        connection.exec_driver_sql(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        connection.exec_driver_sql(
            f"CREATE POLICY {policy} ON {table} FOR SELECT TO {name} USING ({'true' if everything else rows})"
        )
    if can_secure(connection):
        for view in VIEWS.values():
            # What counts everybody's jobs must not hand their rows to a reader's function on the way.
            option = "security_barrier" if view.aggregate else "security_invoker"
            connection.exec_driver_sql(f"ALTER VIEW {view.name} SET ({option} = true)")


def _take(connection: Connection, role: str) -> None:
    name = _quoted(connection, role)
    tables = [table.name for table in METADATA.sorted_tables]
    everything = ", ".join((*tables, *VIEWS, "alembic_version"))
    connection.exec_driver_sql(f"REVOKE ALL ON {everything} FROM {name}, PUBLIC")
    connection.exec_driver_sql(f"REVOKE ALL ON SCHEMA {_schema(connection)} FROM {name}")
    for table in _owned():
        for kind in (_OWN, _ALL):
            connection.exec_driver_sql(f"DROP POLICY IF EXISTS {_quoted(connection, f'{kind} {role}')} ON {table}")


def _owned() -> Mapping[str, str]:
    """Each table that belongs to jobs, with the condition on its rows."""
    rows = {JOBS.name: "user_name = CAST(current_user AS text)"}
    for table, (column, parent) in parents().items():
        # What of the parent is seen is the parent's own policy to say. By its key, so that a row costs a look-up; of
        # many rows PostgreSQL makes a hash of the parent's.
        rows[table] = f"EXISTS (SELECT 1 FROM {parent} ones_parent WHERE ones_parent.id = {table}.{column})"
    return rows


def _schema(connection: Connection) -> str:
    return _quoted(connection, str(connection.scalar(text("SELECT current_schema()"))))


def _quoted(connection: Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote_identifier(name)
