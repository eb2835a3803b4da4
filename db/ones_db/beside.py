"""What the store keeps beside the jobs that a companion looks after, and how old rows leave it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from sqlalchemy import Connection

from ones_db import accounting, actions, health, leaders, nodes, retention
from ones_db.records import (
    AccountingJob,
    ActionRecord,
    HealthRecord,
    Imported,
    LeaderRecord,
    NodeChange,
    NodeRecord,
    PastJob,
    RolledUp,
)


class Beside:
    """The part of `Store` that is about nodes, people, accounting and retention; its contract is the store's."""

    _cluster: int

    def _read(self) -> AbstractContextManager[Connection]:
        raise NotImplementedError

    def _write(self) -> AbstractContextManager[Connection]:
        raise NotImplementedError

    def see_nodes(self, time: float, nodes_now: Collection[NodeRecord]) -> None:
        """Store the nodes as they are now: those that changed, and those that are gone."""
        with self._write() as connection:
            nodes.see_nodes(connection, self._cluster, time, nodes_now)

    def node_changes(self, name: str | None = None) -> list[NodeChange]:
        """What one node was, or all were, from when on; oldest first."""
        with self._read() as connection:
            return nodes.node_changes(connection, self._cluster, name)

    def add_action(self, record: ActionRecord) -> None:
        """Store what somebody did. The same at the same moment by the same person is the same action."""
        with self._write() as connection:
            actions.add_action(connection, self._cluster, record)

    def actions(self, limit: int = 100) -> list[ActionRecord]:
        """What was done last, newest first."""
        with self._read() as connection:
            return actions.actions(connection, self._cluster, limit)

    def leader(self) -> LeaderRecord | None:
        """Which companion leads, or did last; None where none ever did."""
        with self._read() as connection:
            return leaders.leader(connection, self._cluster)

    def see_health(self, record: HealthRecord) -> None:
        """Store how the companion is."""
        with self._write() as connection:
            health.see_health(connection, self._cluster, record)

    def health(self) -> HealthRecord | None:
        """How the companion that acted last was at its last tick; None where there was none."""
        with self._read() as connection:
            return health.health(connection, self._cluster)

    def add_accounting(self, told: Sequence[AccountingJob]) -> Imported:
        """Store jobs that have ended, as accounting has them, in one transaction.

        A job that the companion has seen stays as it is; of one that is known from accounting, what is new is added.
        """
        with self._write() as connection:
            return accounting.add_accounting(connection, self._cluster, told)

    def past_jobs(self, since: float, until: float) -> list[PastJob]:
        """The jobs that were submitted in that span and have ended, by their submission."""
        with self._read() as connection:
            return accounting.past_jobs(connection, self._cluster, since, until)

    def rollups_due(self, before: float, stretch_s: float) -> list[int]:
        """The runs (runs.id) of jobs that ended before then whose samples are not rolled up that far."""
        with self._read() as connection:
            return retention.due(connection, self._cluster, before, stretch_s)

    def roll_up(self, works: deque[retention.Work], before: float, stretch_s: float, *, dry: bool = False) -> RolledUp:
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
