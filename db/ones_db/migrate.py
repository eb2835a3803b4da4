"""Creating and upgrading the database, and telling which schema it has."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from ones_db.engine import database_file, open_engine, transaction
from ones_db.errors import SchemaError, StoreError
from ones_db.models import SCHEMA_REVISION
from ones_db.schema import revision_of

logger = logging.getLogger(__name__)


def head() -> str:
    """The newest schema that this version knows."""
    found = ScriptDirectory.from_config(_config()).get_current_head()
    assert found is not None
    return found


def current(url: str) -> str | None:
    """The schema of a database, None where there is none yet."""
    path = database_file(url)
    if not path.exists() or path.stat().st_size == 0:
        return None
    with transaction(open_engine(path, "ro"), path) as connection:
        return revision_of(connection, path)


def upgrade(url: str) -> tuple[str | None, str]:
    """Create the database or bring it to the newest schema; returns the schemas before and after.

    A database with content is first copied beside itself (`NAME.SCHEMA-TIME.bak`, named in the log). The
    upgrade is one transaction: when it fails, or is killed, the database is what it was. Needs room for the
    copy. Raises `SchemaError` where the file holds a newer schema or somebody else's tables, `StoreError`
    where it cannot be written.
    """
    path = database_file(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path.parent}: cannot be created: {error.strerror}") from None
    before = current(url)
    if before is not None and before > SCHEMA_REVISION:
        raise SchemaError(
            f"{path}: schema {before} is newer than {SCHEMA_REVISION}, the newest that this version knows; "
            "install the newer slurm-ones"
        )
    if before == SCHEMA_REVISION:
        return before, before
    if before is not None:
        logger.info("%s: copied to %s before the upgrade", path, backup(path, before))
    # Rebuilding a table drops the old one: with foreign keys in force that would fail, so they are checked
    # afterwards.
    engine = open_engine(path, "rwc", foreign_keys=False)
    try:
        with transaction(engine, path, write=True) as connection:
            command.upgrade(_config(connection), "head")
            broken = connection.execute(text("PRAGMA foreign_key_check")).fetchall()
            if broken:
                raise StoreError(f"{path}: the upgrade would leave rows without their parents: {broken[:3]}")
            after = revision_of(connection, path)
    finally:
        engine.dispose()
    assert after is not None
    logger.info("%s: schema %s, was %s", path, after, before or "none")
    return before, after


def backup(path: Path, revision: str) -> Path:
    """A durable copy of the database beside it, consistent also while a companion writes; returns its
    path."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    copy = path.with_name(f"{path.name}.{revision}-{stamp}.bak")
    unfinished = copy.with_name(f".{copy.name}.{os.getpid()}")
    try:
        source = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        target = sqlite3.connect(unfinished)
        try:
            source.backup(target)
        finally:
            target.close()
            source.close()
        unfinished.chmod(path.stat().st_mode & 0o777)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.rename(copy)
    except (OSError, sqlite3.Error) as error:
        unfinished.unlink(missing_ok=True)
        raise StoreError(f"{path}: cannot be copied to {copy} before the upgrade: {error}") from error
    return copy


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    # Alembic's settings expand percent signs.
    place = str(Path(__file__).with_name("migrations")).replace("%", "%%")
    config.set_main_option("script_location", place)
    config.attributes["connection"] = connection
    return config
