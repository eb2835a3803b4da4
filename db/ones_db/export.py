"""A user's own rows as a file of their own, for sites without a server: the same tables and views, of one user's jobs.

Others' work is in none of its rows, so that its `gpu_hours` too counts that user's alone. The file says so itself: its
`actions` hold the export, and nothing else.
"""

from __future__ import annotations

import os
import pwd
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, func, or_, select, tuple_
from sqlalchemy.engine import make_url

from ones_db import migrate
from ones_db.access import CLOSED, parents
from ones_db.engine import add_rows, backend_of, check_revision, transaction
from ones_db.errors import SchemaError, StoreError
from ones_db.tables import ACTIONS, CLUSTERS, DECISION_JOBS, DECISIONS, JOBS, METADATA, RESIZES

EXPORT = 0x6F6E6578
"""SQLite's `application_id` of such a file: only these are replaced."""
ROWS = 20_000
"""Rows held at a time."""
MODE = 0o640


@dataclass(frozen=True)
class Exported:
    """What became of one user's file."""

    user: str
    path: Path
    jobs: int
    owned: bool
    """The file is that user's; only root can give it away, and only to users whom the machine knows."""


def export_user(url: str, user: str, path: Path, by: str) -> Exported:
    """Write the user's jobs, and all that belongs to them, to a file, as of one moment; `by` is whoever asks for it.

    It appears whole or not at all, in place of an older export. Raises `StoreError` where the user has no job, or the
    file is there and is no export, or cannot be written; `SchemaError` as `Store.open` does.
    """
    with _reading(url) as connection:
        return _export(connection, user, path.absolute(), by)


def export_users(url: str, directory: Path, by: str) -> list[Exported]:
    """`export_user` for each user that has jobs, to DIRECTORY/USER.sqlite, all as of one moment.

    Raises `StoreError` also where a user's name is no name for a file; the files before it are there.
    """
    with _reading(url) as connection:
        users = connection.scalars(select(JOBS.c.user_name).distinct().order_by(JOBS.c.user_name)).all()
        odd = [user for user in users if not re.fullmatch(r"[\w@+-][\w@.+-]{0,99}", user)]
        if odd:
            raise StoreError(f"{odd[0][:100]!r} is no name for a file; export each user's with --user NAME FILE")
        return [_export(connection, user, directory.absolute() / f"{user}.sqlite", by) for user in users]


@contextmanager
def _reading(url: str) -> Iterator[Connection]:
    backend = backend_of(url)
    if not backend.exists():
        raise SchemaError(f"{backend.place}: no such database")
    engine = backend.engine("read")
    try:
        with transaction(engine) as connection:
            check_revision(connection)
            yield connection
    finally:
        engine.dispose()


def _export(connection: Connection, user: str, path: Path, by: str) -> Exported:
    jobs = connection.scalar(select(func.count()).select_from(JOBS).where(JOBS.c.user_name == user)) or 0
    if not jobs:
        raise StoreError(f"no job of {user!r} is known, so nothing was exported")
    _check(path)
    try:
        # Nobody else can open it before it is whole.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            _fill(connection, user, unfinished, by)
            owned = _finish(unfinished, user)
            unfinished.rename(path)
        finally:
            for left in (unfinished, *(Path(f"{unfinished}-{end}") for end in ("wal", "shm", "journal"))):
                left.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{path}: cannot be written: {error}") from error
    return Exported(user, path, jobs, owned)


def _check(path: Path) -> None:
    """Raise `StoreError` where something other than an export would be replaced, such as the database itself, or where
    no URL could name the file."""
    if make_url(f"sqlite:///{path}").database != str(path):
        raise StoreError(f"{path}: no database URL can name it; name another file")
    if not path.exists() and not path.is_symlink():
        return
    try:
        found = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            (mark,) = found.execute("PRAGMA application_id").fetchone()
        finally:
            found.close()
    except sqlite3.Error:
        mark = None
    if mark != EXPORT or path.is_symlink():
        raise StoreError(f"{path}: is there, and is no export that could be replaced; name another file")


def _fill(source: Connection, user: str, path: Path, by: str) -> None:
    url = f"sqlite:///{path}"
    migrate.upgrade(url)
    engine = backend_of(url).engine("write")
    try:
        with transaction(engine, write=True) as target:
            for table, rows in _rows(user):
                found = source.execution_options(stream_results=True, yield_per=ROWS).execute(rows)
                for page in found.partitions(ROWS):
                    add_rows(target, table, [tuple(row) for row in page])
            said = {"time": time.time(), "user_name": by, "action": "db export", "detail": f"of {user}'s jobs alone"}
            for number, cluster in enumerate(target.scalars(select(CLUSTERS.c.id)).all()):
                target.execute(
                    ACTIONS.insert(),
                    {
                        "id": number + 1,
                        "cluster_id": cluster,
                        **said,
                    },
                )
    finally:
        engine.dispose()


def _finish(path: Path, user: str) -> bool:
    """Mark it, make it one file without a log, durable, and the user's; returns whether it could be made theirs."""
    file = sqlite3.connect(path, isolation_level=None)
    try:
        file.execute(f"PRAGMA application_id = {EXPORT}")
        file.execute("PRAGMA journal_mode = DELETE")
    finally:
        file.close()
    owned = os.geteuid() != 0 and user == pwd.getpwuid(os.geteuid()).pw_name
    path.chmod(MODE)
    if os.geteuid() == 0:
        try:
            # The group stays: a user's own may be one of all users.
            os.chown(path, pwd.getpwnam(user).pw_uid, -1)
            owned = True
        except (KeyError, ValueError):
            owned = False
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
    return owned


def _rows(user: str) -> Iterator[tuple[Table, Select[Any]]]:
    """What a user's file holds of each table, parents first and in the order of their keys."""
    belongs = parents()
    own: dict[str, Select[Any]] = {JOBS.name: select(JOBS.c.id).where(JOBS.c.user_name == user)}
    for table in METADATA.sorted_tables:
        if table.name in CLOSED:
            continue
        rows = select(table).order_by(*table.primary_key)
        if table.name in belongs:
            column, parent = belongs[table.name]
            mine = table.columns[column].in_(own[parent])
            rows = rows.where(mine)
            if "id" in table.columns:
                own[table.name] = select(table.columns["id"]).where(mine)
        elif table.name == JOBS.name:
            rows = rows.where(JOBS.c.user_name == user)
        elif table.name == DECISIONS.name:
            rows = rows.where(_told(own[JOBS.name]))
        yield table, rows


def _told(jobs: Select[Any]) -> ColumnElement[bool]:
    """Decisions that tell of these jobs, and each cluster's last, up to which a run that goes on counts."""
    every = DECISIONS.alias()
    last = select(every.c.cluster_id, func.max(every.c.time)).group_by(every.c.cluster_id)
    return or_(
        DECISIONS.c.id.in_(select(DECISION_JOBS.c.decision_id).where(DECISION_JOBS.c.job_id.in_(jobs))),
        DECISIONS.c.id.in_(select(RESIZES.c.decision_id).where(RESIZES.c.job_id.in_(jobs))),
        tuple_(DECISIONS.c.cluster_id, DECISIONS.c.time).in_(last),
    )
