"""Creating and upgrading the database, and which schema it has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from ones_db.backend import SchemaError, StoreError
from ones_db.engine import backend_of, opened, revision_of, transaction
from ones_db.tables import METADATA, SCHEMA_REVISION

if TYPE_CHECKING:
    from alembic.config import Config

logger = logging.getLogger(__name__)

FIRST = "0018"
"""The oldest schema that is upgraded."""
SCRIPTS = Path(__file__).with_name("migrations")

Step = Callable[[str, str], None]
"""Callback after each migration, or the creation of a database: the revision, and what was done."""


def head() -> str:
    """Return the newest schema revision of this version."""
    return str(_alembic().script.ScriptDirectory.from_config(_config()).get_current_head())


def current(url: str) -> str | None:
    """Return the schema revision of a database; None if it does not exist yet."""
    if not backend_of(url).exists():
        return None
    with opened(url) as engine, transaction(engine) as connection:
        return revision_of(connection)


def upgrade(url: str, step: Step = lambda revision, what: None) -> tuple[str | None, str]:
    """Create the database or bring it to the newest schema; returns the schemas before and after.

    An SQLite file with content is first copied next to itself (`NAME.SCHEMA-TIME.bak`, named in the log), which needs
    room. On PostgreSQL the database itself must be there, and copies are its administrator's. The upgrade is one
    transaction: when it fails, or is killed, the database is what it was, and running it again does it all. Raises
    `SchemaError` if the database holds a newer schema, one before `FIRST` or somebody else's tables. Raises `StoreBusy`
    while a companion or a long reader keeps it from its turn, and `StoreError` if it cannot be written.
    """
    backend = backend_of(url)
    backend.prepare()
    before = current(url)
    if before is not None and before > SCHEMA_REVISION:
        raise SchemaError(
            f"{backend.place}: schema {before} is newer than {SCHEMA_REVISION}, the newest that this version knows; "
            "install the newer slurm-ones"
        )
    if before is not None and before < FIRST:
        raise SchemaError(
            f"{backend.place}: schema {before} is older than {FIRST}, the oldest that this version upgrades; move the "
            "database away, or name another, and run `slurm-ones db upgrade` again"
        )
    if before == SCHEMA_REVISION:
        return before, before
    kept = None if before is None else backend.back_up(before)
    if kept is not None:
        logger.info("%s: copied to %s before the upgrade", backend.place, kept)
    with opened(url, "upgrade") as engine, transaction(engine, write=True) as connection:
        if revision_of(connection) is None:
            METADATA.create_all(connection)
            _alembic().command.stamp(_config(connection, step), "head")
        else:
            _alembic().command.upgrade(_config(connection, step), "head")
        broken = backend.orphans(connection)
        if broken:
            raise StoreError(f"{backend.place}: the upgrade would leave rows without their parents: {broken[:3]}")
        after = revision_of(connection)
    assert after is not None
    logger.info("%s: schema %s, was %s", backend.place, after, before or "none")
    return before, after


def _alembic() -> Any:
    """Alembic, which a notebook does without. Raises `StoreError` if it is missing."""
    try:
        import alembic.command
        import alembic.config
        import alembic.script
    except ImportError:
        raise StoreError(
            "creating and upgrading databases needs alembic, which is missing: pip install 'ones-db[migrate]'"
        ) from None
    return alembic


def _config(connection: Connection | None = None, step: Step = lambda revision, what: None) -> Config:
    config: Config = _alembic().config.Config()
    # Alembic's settings expand percent signs.
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["step"] = step
    return config
