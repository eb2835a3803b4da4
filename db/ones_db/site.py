"""What is known beside the jobs that the companion looks after: nodes, what people did, the companion's health;
and the part of the store that is about these, accounting and retention."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, func, select

from ones_db import accounting, leaders, retention
from ones_db.accounting import AccountingJob, Imported, PastJob
from ones_db.engine import add_new, add_or_replace
from ones_db.leaders import LeaderRecord
from ones_db.retention import RolledUp
from ones_db.tables import ACTIONS, CHANGES, HEALTH, NODES


class NodeRecord(NamedTuple):
    """A node as it is now."""

    name: str
    state: str
    """UP while it takes jobs, has it any or not; RESERVED; else what Slurm says of it."""
    usable: bool
    """Up, and neither drained, reserved, failing nor in maintenance."""
    gpus: int
    """0 where Slurm knows of none."""
    partitions: str = ""
    """Separated by commas."""


class NodeChange(NamedTuple):
    """What a node was from a moment on, until its next change."""

    time: float
    node: NodeRecord


class ActionRecord(NamedTuple):
    """What somebody did to the companion, its database or its jobs."""

    time: float
    user: str
    """Login name."""
    action: str
    """A command such as `run --act`, or what was seen of a file."""
    detail: str = ""


class HealthRecord(NamedTuple):
    """How the companion that acted last was at its last tick."""

    time: float
    """When it wrote this, Unix seconds."""
    mode: str
    interval_s: float
    """Seconds from one tick to the next."""
    tick_time: float | None = None
    """End of its last tick that was not in vain, Unix seconds; None before the first."""
    tick_s: float | None = None
    """What that tick took, seconds."""
    running: int | None = None
    """Elastic jobs that ran then."""
    waiting: int | None = None
    gpus: int | None = None
    """On which elastic jobs ran."""
    error: str = ""
    """Its last complaint since it started."""
    error_time: float | None = None


GONE = "GONE"
"""State of a node that Slurm no longer knows."""


def record_nodes(connection: Connection, cluster: int, time: float, nodes: Collection[NodeRecord]) -> None:
    last = _last(connection, cluster)
    there = {node.name for node in nodes}
    lost = [node for name, node in last.items() if name not in there and node.state != GONE]
    changed = [node for node in nodes if last.get(node.name) != node]
    changed += [node._replace(state=GONE, usable=False) for node in lost]
    if not changed:
        return
    add_new(connection, NODES, [{"cluster_id": cluster, "name": node.name} for node in changed])
    keys = {row.name: row.id for row in connection.execute(select(NODES).where(NODES.c.cluster_id == cluster))}
    rows = [{**node._asdict(), "node_id": keys[node.name], "time": time} for node in changed]
    for row in rows:
        del row["name"]
    add_or_replace(connection, CHANGES, ("node_id", "time"), rows)


def _last(connection: Connection, cluster: int) -> dict[str, NodeRecord]:
    return {row.name: NodeRecord(*row) for row in connection.execute(_last_of(cluster))}


@cache
def _last_of(cluster: int) -> Select[Any]:
    newest = (
        select(CHANGES.c.node_id, func.max(CHANGES.c.time).label("time"))
        .join(NODES, NODES.c.id == CHANGES.c.node_id)
        .where(NODES.c.cluster_id == cluster)
        .group_by(CHANGES.c.node_id)
        .subquery()
    )
    return (
        select(NODES.c.name, *(CHANGES.c[name] for name in NodeRecord._fields if name != "name"))
        .join(CHANGES, CHANGES.c.node_id == NODES.c.id)
        .join(newest, and_(newest.c.node_id == CHANGES.c.node_id, newest.c.time == CHANGES.c.time))
    )


def node_changes(connection: Connection, cluster: int, name: str | None) -> list[NodeChange]:
    query = (
        select(CHANGES.c.time, NODES.c.name, *(CHANGES.c[name] for name in NodeRecord._fields if name != "name"))
        .join(NODES, NODES.c.id == CHANGES.c.node_id)
        .where(NODES.c.cluster_id == cluster)
        .order_by(CHANGES.c.time, NODES.c.id)
    )
    if name is not None:
        query = query.where(NODES.c.name == name)
    return [NodeChange(row[0], NodeRecord(*row[1:])) for row in connection.execute(query)]


def add_action(connection: Connection, cluster: int, record: ActionRecord) -> None:
    values = {**record._asdict(), "user_name": record.user, "cluster_id": cluster}
    del values["user"]
    add_new(connection, ACTIONS, [values])


def actions(connection: Connection, cluster: int, limit: int) -> list[ActionRecord]:
    query = (
        select(ACTIONS.c.time, ACTIONS.c.user_name, ACTIONS.c.action, ACTIONS.c.detail)
        .where(ACTIONS.c.cluster_id == cluster)
        .order_by(ACTIONS.c.time.desc(), ACTIONS.c.id.desc())
        .limit(limit)
    )
    return [ActionRecord(*row) for row in connection.execute(query)]


def record_health(connection: Connection, cluster: int, record: HealthRecord) -> None:
    add_or_replace(connection, HEALTH, ("cluster_id",), [{"cluster_id": cluster, **record._asdict()}])


def health(connection: Connection, cluster: int) -> HealthRecord | None:
    columns = [HEALTH.c[name] for name in HealthRecord._fields]
    row = connection.execute(select(*columns).where(HEALTH.c.cluster_id == cluster)).first()
    return None if row is None else HealthRecord(*row)


class SiteStore:
    """The part of `Store` that is about nodes, people, accounting and retention; its contract is the store's."""

    _cluster: int

    def _read(self) -> AbstractContextManager[Connection]:
        raise NotImplementedError

    def _write(self) -> AbstractContextManager[Connection]:
        raise NotImplementedError

    def record_nodes(self, time: float, nodes_now: Collection[NodeRecord]) -> None:
        """Store the nodes as they are now: those that changed, and those that are gone."""
        with self._write() as connection:
            record_nodes(connection, self._cluster, time, nodes_now)

    def nodes(self) -> list[NodeRecord]:
        """The nodes as they are now, by their names."""
        with self._read() as connection:
            return [node for _, node in sorted(_last(connection, self._cluster).items()) if node.state != GONE]

    def node_changes(self, name: str | None = None) -> list[NodeChange]:
        """What one node was, or all were, from when on; oldest first."""
        with self._read() as connection:
            return node_changes(connection, self._cluster, name)

    def add_action(self, record: ActionRecord) -> None:
        """Store what somebody did. The same at the same moment by the same person is the same action."""
        with self._write() as connection:
            add_action(connection, self._cluster, record)

    def actions(self, limit: int = 100) -> list[ActionRecord]:
        """What was done last, newest first."""
        with self._read() as connection:
            return actions(connection, self._cluster, limit)

    def leader(self) -> LeaderRecord | None:
        """Which companion leads, or did last; None where none ever did."""
        with self._read() as connection:
            return leaders.leader(connection, self._cluster)

    def record_health(self, record: HealthRecord) -> None:
        """Store how the companion is."""
        with self._write() as connection:
            record_health(connection, self._cluster, record)

    def health(self) -> HealthRecord | None:
        """How the companion that acted last was at its last tick; None where there was none."""
        with self._read() as connection:
            return health(connection, self._cluster)

    def add_accounting(self, jobs: Sequence[AccountingJob]) -> Imported:
        """Store jobs that have ended, as accounting has them, in one transaction.

        A job that the companion has seen stays as it is; of one that is known from accounting, what is new is added.
        """
        with self._write() as connection:
            return accounting.add_accounting(connection, self._cluster, jobs)

    def past_jobs(self, since: float, until: float) -> list[PastJob]:
        """The jobs that were submitted in that span and have ended, by their submission."""
        with self._read() as connection:
            return accounting.past_jobs(connection, self._cluster, since, until)

    def rollups_due(self, before: float, stretch_s: float) -> list[int]:
        """The runs (runs.id) of jobs that ended before then whose samples are not rolled up that far."""
        with self._read() as connection:
            return retention.due(connection, self._cluster, before, stretch_s)

    def roll_up(
        self, works: deque[retention.RollUpWork], before: float, stretch_s: float, *, dry: bool = False
    ) -> RolledUp:
        """Put the next samples of these runs together, as many as one short transaction can; those done leave the
        queue. `dry` counts alone."""
        with self._read() if dry else self._write() as connection:
            return retention.roll_up(connection, works, before, stretch_s, dry=dry)

    def forgettable_jobs(self, before: float) -> list[int]:
        """The jobs (jobs.id) that ended before then and have decisions that led to nothing, or steps of resizes."""
        with self._read() as connection:
            return retention.forgettable(connection, self._cluster, before)

    def forget(self, before: float, keys: Sequence[int], *, dry: bool = False) -> int:
        """Delete what these jobs (jobs.id) weighed, decisions on them that led to nothing, and the steps of their
        resizes; returns how many rows. Resizes and what they cost stay. `dry` counts alone."""
        with self._read() if dry else self._write() as connection:
            return retention.forget(connection, self._cluster, before, keys, dry=dry)
