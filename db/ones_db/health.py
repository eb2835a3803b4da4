"""How the companion was at its last tick: one row a cluster, written anew each time."""

from __future__ import annotations

from sqlalchemy import Connection, Table, select

from ones_db.models import Base
from ones_db.records import HealthRecord
from ones_db.upsert import add_or_replace

HEALTH: Table = Base.metadata.tables["health"]


def see_health(connection: Connection, cluster: int, record: HealthRecord) -> None:
    add_or_replace(connection, HEALTH, ("cluster_id",), [{"cluster_id": cluster, **record._asdict()}])


def health(connection: Connection, cluster: int) -> HealthRecord | None:
    columns = [HEALTH.c[name] for name in HealthRecord._fields]
    row = connection.execute(select(*columns).where(HEALTH.c.cluster_id == cluster)).first()
    return None if row is None else HealthRecord(*row)
