"""The row that says which companion of a cluster leads, and the fence that it is."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, select

from ones_db.engine import add_or_replace, backend_behind
from ones_db.errors import NotLeader
from ones_db.tables import LEADERS


class LeaderRecord(NamedTuple):
    """Which companion of a cluster acts, or did last."""

    term: int
    """How often the lead was taken, this time included."""
    holder: str
    """As host:process id; empty once it gave the lead back."""
    since: float
    beat: float
    """When it was last heard of, by its own clock."""


def leader(connection: Connection, cluster: int) -> LeaderRecord | None:
    """Who leads, or did last; None where none ever did."""
    columns = (LEADERS.c[name] for name in LeaderRecord._fields)
    row = connection.execute(select(*columns).where(LEADERS.c.cluster_id == cluster)).one_or_none()
    return None if row is None else LeaderRecord(*row)


def begin_term(connection: Connection, cluster: int, holder: str, now: float) -> int:
    """Write down that `holder` leads from now on; returns its term."""
    before = leader(connection, cluster)
    term = 1 if before is None else before.term + 1
    row = {"cluster_id": cluster, "term": term, "holder": holder, "since": now, "beat": now}
    add_or_replace(connection, LEADERS, ("cluster_id",), [row])
    return term


def beat(connection: Connection, cluster: int, term: int, now: float) -> bool:
    """Store a heartbeat of the leader of that term; returns whether that term is the newest."""
    mine = (LEADERS.c.cluster_id == cluster, LEADERS.c.term == term)
    return connection.execute(LEADERS.update().where(*mine).values(beat=now)).rowcount == 1


def end_term(connection: Connection, cluster: int, term: int, now: float) -> None:
    """Write down that the leader of that term, if it still is, gave the lead back."""
    mine = (LEADERS.c.cluster_id == cluster, LEADERS.c.term == term)
    connection.execute(LEADERS.update().where(*mine).values(holder="", beat=now))


def check_term(connection: Connection, cluster: int, term: int) -> None:
    """Raise `NotLeader` unless that term is the newest.

    A transaction that writes has its turn among writers by now, and so has whoever begins a term: what a leader of an
    older term was in the middle of storing is either before the new term, or does not happen.
    """
    found = leader(connection, cluster)
    if found is None or found.term != term:
        place = backend_behind(connection).place
        by = f"{found.holder or 'nobody'} leads since, in term {found.term}" if found else "no term is known"
        raise NotLeader(f"{place}: the lead of term {term} is lost: {by}; nothing was stored")
