"""Database files for users: the same tables and views, with the rows of one user. They name no other user, and no job
or account of another user. A user gets two kinds of file:

* An **export** has all rows of a user, for analysis. Its table `actions` has only the export itself.
* A user's **view** is published again and again, for `slurm-ones jobs`, `why` and `status`. Of rows that grow without
limit, such as samples and decisions, it has only the newest.

One more file, for everybody, has the companion's health.
"""

from __future__ import annotations

import os
import pwd
import re
import sqlite3
import tempfile
import time
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, bindparam, func, or_, select, tuple_
from sqlalchemy.engine import make_url

from ones_db import migrate
from ones_db.backend import StoreError
from ones_db.engine import add_rows, backend_of, check_revision, opened, transaction
from ones_db.jobs import CLUSTER, keyed, newest, observed
from ones_db.tables import (
    ACTIONS,
    ALTERNATIVES,
    BATCHES,
    BLOCKS,
    CLUSTERS,
    DECISION_JOBS,
    DECISIONS,
    EPOCHS,
    HEALTH,
    JOBS,
    LEADERS,
    MEMBERSHIPS,
    METADATA,
    PROMISES,
    RESIZES,
    RUNS,
    STEPS,
    THROUGHPUT,
)
from ones_db.views import MOST_MEMBERSHIPS

EXPORT = 0x6F6E6578
"""SQLite's `application_id` of an export. Only a file that has it is replaced."""
ROWS = 20_000
"""Largest number of rows that are in memory at once."""
MODE = 0o640


@dataclass(frozen=True)
class Exported:
    """Result of one user's export."""

    user: str
    path: Path
    jobs: int
    owned: bool
    """True if the file belongs to the user. Only root can give it to a user, and only if the machine knows the user."""


def export_user(url: str, user: str, path: Path, by: str) -> Exported:
    """Write all rows of a user's jobs, as of one moment, to a file. `by` is the login name of the caller.

    The file is replaced as a whole, and only if it is an older export. Raises `StoreError` if the user has no job, if
    another file is there, or if the file cannot be written. Raises `SchemaError` as `Store.open` does.
    """
    with _reading(url) as connection:
        return _export(connection, user, path.absolute(), by)


def export_users(url: str, directory: Path, by: str) -> list[Exported]:
    """Export each user with jobs to DIRECTORY/USER.sqlite, all as of one moment.

    Raises what `export_user` raises, and `StoreError` before the first export if a user's name is no name for a file.
    """
    with _reading(url) as connection:
        users = connection.scalars(select(JOBS.c.user_name).distinct().order_by(JOBS.c.user_name)).all()
        odd = [user for user in users if not re.fullmatch(r"[\w@+-][\w@.+-]{0,99}", user)]
        if odd:
            raise StoreError(f"{odd[0][:100]!r} is no name for a file; export each user's with --user NAME FILE")
        return [_export(connection, user, directory.absolute() / f"{user}.sqlite", by) for user in users]


@contextmanager
def _reading(url: str) -> Iterator[Connection]:
    with opened(url) as engine, transaction(engine) as connection:
        check_revision(connection)
        yield connection


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
    """Raise `StoreError` if there is a file that is no export, or if a database URL cannot have this path."""
    if make_url(f"sqlite:///{path}").database != str(path):
        raise StoreError(f"{path}: no database URL can name it; name another file")
    if not path.exists() and not path.is_symlink():
        return
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as found:
            (mark,) = found.execute("PRAGMA application_id").fetchone()
    except sqlite3.Error:
        mark = None
    if mark != EXPORT or path.is_symlink():
        raise StoreError(f"{path}: exists and is not an export, so it is not replaced; name another file")


def _fill(source: Connection, user: str, path: Path, by: str) -> None:
    url = f"sqlite:///{path}"
    migrate.upgrade(url)
    with opened(url, "write") as engine, transaction(engine, write=True) as target:
        for table, rows in _rows(user):
            found = source.execution_options(stream_results=True, yield_per=ROWS).execute(rows)
            for page in found.partitions(ROWS):
                add_rows(target, table, [tuple(row) for row in page])
        said = {"time": time.time(), "user_name": by, "action": "db export", "detail": f"only {user}'s jobs"}
        for number, cluster in enumerate(target.scalars(select(CLUSTERS.c.id)).all(), 1):
            target.execute(ACTIONS.insert(), {"id": number, "cluster_id": cluster, **said})


def _finish(path: Path, user: str) -> bool:
    """Mark a finished export, make it durable, and give it to the user. Return True if it belongs to the user then."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute(f"PRAGMA application_id = {EXPORT}")
        file.execute("PRAGMA journal_mode = DELETE")
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


def _parents() -> dict[str, tuple[str, str]]:
    """Return (foreign key, parent table) for each table whose rows belong to a job, directly or through a parent."""
    found: dict[str, tuple[str, str]] = {}
    for table in METADATA.sorted_tables:
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name):
            target = key.column.table.name
            if table.name not in found and (target == JOBS.name or target in found):
                found[table.name] = (key.parent.name, target)
    return found


def _rows(user: str) -> Iterator[tuple[Table, Select[Any]]]:
    """Yield each table with the query of a user's rows, in the order of their keys. Parent tables come first."""
    belongs = _parents()
    own: dict[str, Select[Any]] = {JOBS.name: select(JOBS.c.id).where(JOBS.c.user_name == user)}
    for table in METADATA.sorted_tables:
        if table in (ACTIONS, HEALTH):
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
            rows = rows.where(_concerning(own[JOBS.name]))
        yield table, rows


def _concerning(jobs: Select[Any]) -> ColumnElement[bool]:
    """Return the condition that a decision is about these jobs, or is the newest of its cluster.

    Runs that have not ended count until its time (`views.UNTIL`).
    """
    every = DECISIONS.alias()
    last = select(every.c.cluster_id, func.max(every.c.time)).group_by(every.c.cluster_id)
    return or_(
        DECISIONS.c.id.in_(select(DECISION_JOBS.c.decision_id).where(DECISION_JOBS.c.job_id.in_(jobs))),
        DECISIONS.c.id.in_(select(RESIZES.c.decision_id).where(RESIZES.c.job_id.in_(jobs))),
        tuple_(DECISIONS.c.cluster_id, DECISIONS.c.time).in_(last),
    )


# The file that is published for each user

KEEP_S = 7 * 86_400.0
"""Time for which a user's view has a job after its end, in seconds."""
MOST_JOBS = 500
"""Largest number of jobs in a user's view. Jobs that have not ended come first, then the last submitted ones."""
MOST_RUNS, MOST_RESIZES, MOST_BLOCKS = 100, 50, 200
"""Largest number of runs, resizes and blocks of a job in a user's view. The newest are kept."""
MOST_DECISIONS = 20

Rows = tuple[Table, Sequence[Sequence[Any]]]


class ViewSource:
    """Source of each user's view. Only one thread at a time may use it."""

    def __init__(self, url: str, cluster: str) -> None:
        """Prepare to read; the database is opened later. All other methods may raise `StoreError`."""
        self._engine = backend_of(url).engine("read")
        self._cluster = cluster
        self._known_key: int | None = None
        self._decisions: dict[int, int] = {}
        """Id of the newest decision that was read about each job, by jobs.id."""
        self._last: int | None = None
        """Id of the newest decision that was read; None before the first read."""

    def close(self) -> None:
        """Close all connections to the database."""
        self._engine.dispose()

    def users(self, now: float) -> dict[str, Hashable]:
        """Return the users who have jobs to show, each with a value that changes whenever the user's view does."""
        with transaction(self._engine) as connection:
            shown = {"cluster": self._key(connection), "since": now - KEEP_S}
            jobs = connection.execute(_JOBS, shown).all()
            keys = {"keys": [job.id for job in jobs]}
            self._note_decisions(connection, {*keys["keys"]})
            of_job: dict[int, list[Any]] = {}
            for query in _FIGURES:
                for key, *figures in connection.execute(query, keys):
                    of_job.setdefault(key, []).extend(figures)
        found: dict[str, list[Hashable]] = {}
        for job in jobs:
            known = (tuple(job), *of_job.get(job.id, ()), self._decisions.get(job.id))
            found.setdefault(job.user_name, []).append(hash(known))
        return {user: tuple(known) for user, known in found.items()}

    def views(self, users: Iterable[str], now: float) -> Generator[tuple[str, bytes], None, None]:
        """Yield (user, database file) for these users, as of one moment. Each file is made when the caller takes it."""
        with transaction(self._engine) as connection:
            key = self._key(connection)
            for user in users:
                yield user, _file(_rows_of(connection, key, user, now - KEEP_S))

    def site(self) -> bytes:
        """Return the file for everybody: the leader and the health, without the last error, which may name jobs."""
        with transaction(self._engine) as connection:
            key = self._key(connection)
            health = connection.execute(select(HEALTH).where(HEALTH.c.cluster_id == key)).mappings().all()
            leaders = connection.execute(select(LEADERS).where(LEADERS.c.cluster_id == key)).all()
            said = [tuple({**row, "error": "", "error_time": None}.values()) for row in health]
            return _file([(CLUSTERS, [(key, self._cluster)]), (HEALTH, said), (LEADERS, _plain(leaders))])

    def _key(self, connection: Connection) -> int:
        if self._known_key is None:
            check_revision(connection)
            self._known_key = connection.scalar(select(CLUSTERS.c.id).where(CLUSTERS.c.name == self._cluster))
        if self._known_key is None:
            raise StoreError(f"nothing is known of cluster {self._cluster!r}")
        return self._known_key

    def _note_decisions(self, connection: Connection, keys: set[int]) -> None:
        """Read the decisions that were added since the last call."""
        if self._last is None:
            self._last = connection.scalar(select(func.max(DECISIONS.c.id))) or 0
        for key, decision in connection.execute(_NEW_DECISIONS, {"last": self._last}):
            self._decisions[key] = decision
            self._last = max(self._last, decision)
        self._decisions = {key: last for key, last in self._decisions.items() if key in keys}


def _rows_of(connection: Connection, cluster: int, user: str, since: float) -> Iterator[Rows]:
    """Yield each table with the rows in a user's view. Parent tables come first."""

    def rows(query: Select[Any], **given: Any) -> list[tuple[Any, ...]]:
        return _plain(connection.execute(query, given))

    jobs = rows(_JOBS_OF_USER, cluster=cluster, since=since, user=user)
    keys = [job[0] for job in jobs]
    yield CLUSTERS, rows(select(CLUSTERS).where(CLUSTERS.c.id == cluster))
    yield JOBS, jobs
    runs = rows(_RUNS, keys=keys)
    yield RUNS, runs
    of_runs: dict[Table, set[tuple[Any, ...]]] = {}
    for table, query in _OF_RUNS:
        of_runs.setdefault(table, set()).update(rows(query, keys=[run[0] for run in runs]))
    yield from ((table, [*found]) for table, found in of_runs.items())
    yield BLOCKS, rows(_BLOCKS, keys=keys)
    yield PROMISES, rows(_PROMISES, keys=keys)
    resizes = rows(_RESIZES, keys=keys)
    decided = rows(_DECIDED, keys=keys)
    place = [*RESIZES.columns].index(RESIZES.c.decision_id)
    decisions = {row[0] for row in decided}
    yield DECISIONS, rows(_DECISIONS, keys=[*(decisions | {row[place] for row in resizes} - {None})])
    yield DECISION_JOBS, decided
    pairs = {row[:2] for row in decided}
    yield ALTERNATIVES, [row for row in rows(_WEIGHED, keys=keys, decisions=[*decisions]) if row[:2] in pairs]
    yield RESIZES, resizes
    yield STEPS, rows(_STEPS, keys=[row[0] for row in resizes])


def _plain(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in rows]


# The statements, made once: to make them costs more than to run them.


def _newest(table: Table, of: Any, by: Any, most: int) -> Select[Any]:
    place = func.row_number().over(partition_by=of, order_by=by.desc())
    ranked = select(table, place.label("place")).where(keyed(of)).subquery()
    return select(*(ranked.c[column.name] for column in table.columns)).where(ranked.c.place <= most)


def _last(table: Table, *holds: str) -> Select[Any]:
    """Return the query of each run's newest row with values in these columns."""
    inner = table.alias()
    last = select(inner.c.number).where(inner.c.run_id == RUNS.c.id, *(inner.c[name].is_not(None) for name in holds))
    if table is THROUGHPUT:
        last = last.where(inner.c.seconds > 1e-6)
    last = last.order_by(inner.c.number.desc()).limit(1).correlate(RUNS)
    matched = (table.c.run_id == RUNS.c.id) & (table.c.number == last.scalar_subquery())
    return select(table).select_from(RUNS).join(table, matched).where(keyed(RUNS.c.id))


def _decided() -> Select[Any]:
    """Return the query of each job's rows in `decision_jobs`, for its `MOST_DECISIONS` newest decisions."""
    inner = DECISION_JOBS.alias()
    first = select(inner.c.decision_id).where(inner.c.job_id == JOBS.c.id).order_by(inner.c.decision_id.desc())
    first = first.limit(1).offset(MOST_DECISIONS - 1).correlate(JOBS)
    new = DECISION_JOBS.c.decision_id >= func.coalesce(first.scalar_subquery(), 0)
    mine = (DECISION_JOBS.c.job_id == JOBS.c.id) & new
    return select(DECISION_JOBS).select_from(JOBS).join(DECISION_JOBS, mine).where(keyed(JOBS.c.id))


_LATELY = or_(JOBS.c.end_time.is_(None), JOBS.c.end_time > bindparam("since"))
_JOBS = select(JOBS).where(newest(CLUSTER), _LATELY, observed())
_JOBS_OF_USER = _JOBS.where(JOBS.c.user_name == bindparam("user"))
_JOBS_OF_USER = _JOBS_OF_USER.order_by(JOBS.c.end_time.is_not(None), JOBS.c.submit_time.desc()).limit(MOST_JOBS)
_FIGURES = (
    select(RUNS.c.job_id, func.count(), func.sum(RUNS.c.report_number), func.count(RUNS.c.end_time))
    .where(keyed(RUNS.c.job_id))
    .group_by(RUNS.c.job_id),
    select(RESIZES.c.job_id, func.count(), func.sum(RESIZES.c.pause_s))
    .outerjoin(STEPS, STEPS.c.resize_id == RESIZES.c.id)
    .where(keyed(RESIZES.c.job_id))
    .group_by(RESIZES.c.job_id),
    select(BLOCKS.c.job_id, func.count(), func.count(BLOCKS.c.end_time))
    .where(keyed(BLOCKS.c.job_id))
    .group_by(BLOCKS.c.job_id),
    select(PROMISES.c.job_id, PROMISES.c.time).where(keyed(PROMISES.c.job_id)),
)
"""Queries of a few numbers about each job. If they stay equal, so do the job's rows in its user's view."""
_NEW_DECISIONS = (
    select(DECISION_JOBS.c.job_id, func.max(DECISION_JOBS.c.decision_id))
    .where(DECISION_JOBS.c.decision_id > bindparam("last"))
    .group_by(DECISION_JOBS.c.job_id)
)
_RUNS = _newest(RUNS, RUNS.c.job_id, RUNS.c.restart, MOST_RUNS)
_OF_RUNS = (
    (THROUGHPUT, _last(THROUGHPUT)),
    (EPOCHS, _last(EPOCHS, "loss")),
    (EPOCHS, _last(EPOCHS, "accuracy")),
    (BATCHES, _last(BATCHES)),
    (MEMBERSHIPS, _newest(MEMBERSHIPS, MEMBERSHIPS.c.run_id, MEMBERSHIPS.c.number, MOST_MEMBERSHIPS)),
)
_BLOCKS = _newest(BLOCKS, BLOCKS.c.job_id, BLOCKS.c.start_time, MOST_BLOCKS)
_PROMISES = select(PROMISES).where(keyed(PROMISES.c.job_id))
_RESIZES = _newest(RESIZES, RESIZES.c.job_id, RESIZES.c.id, MOST_RESIZES)
_STEPS = select(STEPS).where(keyed(STEPS.c.resize_id))
_DECIDED = _decided()
_DECISIONS = select(DECISIONS).where(keyed(DECISIONS.c.id))
_WEIGHED = select(ALTERNATIVES).where(keyed(ALTERNATIVES.c.decision_id, "decisions"), keyed(ALTERNATIVES.c.job_id))


def _file(tables: Iterable[Rows]) -> bytes:
    """Return a database file with these rows, as bytes. It is made in a directory that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="slurm-ones-") as folder:
        path = Path(folder) / "view.sqlite"
        path.write_bytes(_empty())
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            # Nobody else has this file, and what a crash leaves of it nobody reads.
            file.execute("PRAGMA journal_mode = OFF")
            file.execute("PRAGMA synchronous = OFF")
            file.execute("BEGIN")
            for table, rows in tables:
                marks = ", ".join("?" * len(table.columns))
                file.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
            file.execute("COMMIT")
        return path.read_bytes()


@cache
def _empty() -> bytes:
    """Return the smallest database file without rows and indexes, as bytes."""
    with tempfile.TemporaryDirectory(prefix="slurm-ones-") as folder:
        path = Path(folder) / "empty.sqlite"
        migrate.upgrade(f"sqlite:///{path}")
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            file.execute("PRAGMA journal_mode = DELETE")
            named = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
            for (name,) in file.execute(named).fetchall():
                file.execute(f'DROP INDEX "{name}"')
            file.execute("PRAGMA page_size = 512")
            file.execute("VACUUM")
        return path.read_bytes()
