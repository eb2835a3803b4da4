"""The cluster's nodes: a row for each change of one, and none while nothing changes."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, Table, and_, func, select

from ones_db.models import Base
from ones_db.records import NodeChange, NodeRecord
from ones_db.upsert import add_new, add_or_replace

NODES: Table = Base.metadata.tables["nodes"]
CHANGES: Table = Base.metadata.tables["node_changes"]

GONE = "GONE"
"""State of a node that Slurm no longer knows."""


def see_nodes(connection: Connection, cluster: int, time: float, nodes: Collection[NodeRecord]) -> None:
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
    newest = (
        select(CHANGES.c.node_id, func.max(CHANGES.c.time).label("time"))
        .join(NODES, NODES.c.id == CHANGES.c.node_id)
        .where(NODES.c.cluster_id == cluster)
        .group_by(CHANGES.c.node_id)
        .subquery()
    )
    query = (
        select(NODES.c.name, *(CHANGES.c[name] for name in NodeRecord._fields if name != "name"))
        .join(CHANGES, CHANGES.c.node_id == NODES.c.id)
        .join(newest, and_(newest.c.node_id == CHANGES.c.node_id, newest.c.time == CHANGES.c.time))
    )
    return {row.name: NodeRecord(*row) for row in connection.execute(query)}


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
