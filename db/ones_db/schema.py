"""Which schema a database has, read without alembic so that commands start quickly."""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text

from ones_db.backend import UPGRADE
from ones_db.engine import backend_behind
from ones_db.errors import SchemaError
from ones_db.models import SCHEMA_REVISION

UNFINISHED = " copying"
"""Behind the revision of a database that `ones_db.copy` has begun to fill."""


def revision_of(connection: Connection, *, unfinished: bool = False) -> str | None:
    """The schema that the database says it has, None where it is empty.

    Raises `SchemaError` where it holds tables and none of ours, or a copy that was not finished, unless that is
    expected.
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
    """Raise `SchemaError`, saying what to run, unless the schema is the one that this version works with."""
    place, found = backend_behind(connection).place, revision_of(connection, unfinished=unfinished)
    if found is None:
        raise SchemaError(f"{place}: an empty database; run `{UPGRADE}`")
    if found < SCHEMA_REVISION:
        raise SchemaError(
            f"{place}: schema {found} is older than {SCHEMA_REVISION}; "
            f"run `{UPGRADE}` (of a file, it makes a copy first)"
        )
    if found > SCHEMA_REVISION:
        raise SchemaError(
            f"{place}: schema {found} is newer than {SCHEMA_REVISION}, the newest that this version knows; "
            f"install the newer slurm-ones (`{UPGRADE}` goes forward only)"
        )
