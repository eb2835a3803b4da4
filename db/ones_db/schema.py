"""Which schema a database has, read without alembic so that commands start quickly."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ones_db.engine import UPGRADE
from ones_db.errors import SchemaError
from ones_db.models import SCHEMA_REVISION


def revision_of(connection: Connection, path: Path) -> str | None:
    """The schema that the database says it has, None where it is empty.

    Raises `SchemaError` where it holds tables and none of ours.
    """
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables and "clusters" in tables:
        return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
    if tables:
        raise SchemaError(f"{path}: holds tables of another program ({', '.join(tables[:3])}); name another file")
    return None


def check_revision(connection: Connection, path: Path) -> None:
    """Raise `SchemaError`, saying what to run, unless the schema is the one that this version works with."""
    found = revision_of(connection, path)
    if found is None:
        raise SchemaError(f"{path}: an empty database; run `{UPGRADE}`")
    if found < SCHEMA_REVISION:
        raise SchemaError(
            f"{path}: schema {found} is older than {SCHEMA_REVISION}; run `{UPGRADE}` (it makes a copy first)"
        )
    if found > SCHEMA_REVISION:
        raise SchemaError(
            f"{path}: schema {found} is newer than {SCHEMA_REVISION}, the newest that this version knows; "
            f"install the newer slurm-ones (`{UPGRADE}` goes forward only)"
        )
