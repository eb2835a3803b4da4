"""Creation and upgrade of the database, and its schema revision."""

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
"""Oldest schema revision that can be upgraded."""
SCRIPTS = Path(__file__).with_name("migrations")

Step = Callable[[str, str], None]
"""Callback after each migration, with the new revision and the migration's title."""


def current(url: str, *, unfinished: bool = False) -> str | None:
    """Return the schema revision of the database at a URL as `revision_of` does; None if it does not exist."""
    if not backend_of(url).exists():
        return None
    with opened(url) as engine, transaction(engine) as connection:
        return revision_of(connection, unfinished=unfinished)


def upgrade(url: str, step: Step = lambda revision, what: None) -> tuple[str | None, str]:
    """Create the database, or upgrade its schema to this version. Return the revisions before and after.

    An SQLite file is first copied to `NAME.SCHEMA-TIME.bak` in its directory. The log names the copy, which takes as
    much disk space as the file. A database on PostgreSQL must exist, and the admin must copy it. The upgrade is one
    transaction: if it fails or is killed, nothing has changed, and it can be repeated.

    Raises `SchemaError` if the schema is newer than this version's, older than `FIRST` or another program's. Raises
    `StoreBusy` while another process keeps the database locked, and `StoreError` if it cannot be written.
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
    """Return the package alembic, which reading does not need. Raises `StoreError` if it is missing."""
    try:
        import alembic.command
        import alembic.config
    except ImportError:
        raise StoreError("creating and upgrading databases needs alembic: pip install 'ones-db[migrate]'") from None
    return alembic


def _config(connection: Connection, step: Step) -> Config:
    config: Config = _alembic().config.Config()
    # Alembic's settings expand percent signs.
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["step"] = step
    return config
