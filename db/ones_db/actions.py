"""What people did to the companion, its database and its jobs."""

from __future__ import annotations

from sqlalchemy import Connection, Table, select

from ones_db.models import Base
from ones_db.records import ActionRecord
from ones_db.upsert import add_new

ACTIONS: Table = Base.metadata.tables["actions"]


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
