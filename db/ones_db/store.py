"""The store: the only access to a cluster's stored data."""

from __future__ import annotations

from sqlalchemy import select

from ones_db.backend import StoreError
from ones_db.decisions import DecisionStore
from ones_db.engine import add_new, backend_behind, check_revision, checked, transaction
from ones_db.history import HistoryStore
from ones_db.jobs import BlockStore, JobStore
from ones_db.reports import ReportStore
from ones_db.retention import RetentionStore
from ones_db.site import AccountingStore, SiteStore
from ones_db.summary import SummaryStore
from ones_db.tables import CLUSTERS


class Store(
    JobStore,
    BlockStore,
    ReportStore,
    DecisionStore,
    HistoryStore,
    SummaryStore,
    SiteStore,
    AccountingStore,
    RetentionStore,
):
    """Stored data of one cluster; each base class has the methods of one subject. Its contract:

    **Consistency.** One writer a cluster: the companion that leads. Any number of readers, in any process, at the same
    time; neither waits for the other. A second writer is not wrong, but each waits for the other's call to end, and
    gets `StoreBusy` when that takes longer than half a minute.

    * Every method is one transaction. When a writing method returns, what it wrote survives a crash of the process and
    of the machine. When it raises, or the process is killed in it, nothing of it is stored. So an intent may be acted
    on as soon as the call that stored it has returned. A server that is lost at the very end of a call (`StoreLost`)
    may have stored all of it: who needs to know calls again.

    **Raises.** `StoreError` and its kinds, which say what to do.
    """

    @classmethod
    def open(cls, url: str, cluster: str, *, read_only: bool = False, term: int | None = None) -> Store:
        """The store of one cluster in the database at `url`, such as
        ``sqlite:////var/lib/slurm-ones/ones.sqlite`` or ``postgresql://ones@server/ones``.

        Opened for writing, it makes the cluster known; for reading, an empty name means the only one there is. With the
        `term` of a leader (`ones_db.leader`) every writing method raises `NotLeader`, and stores nothing, once there is
        a newer one. Without, as commands open it, none asks who leads. A server's password is best left to ~/.pgpass,
        PGPASSWORD or a service file. Raises `SchemaError`, saying what to run, if the database is absent, older or
        newer than this version, or not ours. Raises `StoreError` if it cannot be opened, or is read for a cluster that
        is not among those it has.
        """
        if not cluster and not read_only:
            raise StoreError("no cluster is named: whose jobs are to be stored?")
        # Looked at before it is opened for writing, which leaves a mark even in another program's file.
        engine = checked(url)
        backend = backend_behind(engine)
        if not read_only:
            engine.dispose()
            engine = backend.engine("write")
        try:
            with transaction(engine, write=not read_only) as connection:
                if not read_only:
                    add_new(connection, CLUSTERS, [{"name": cluster}])
                known = {row.name: row.id for row in connection.execute(select(CLUSTERS))}
        except BaseException:
            engine.dispose()
            raise
        if read_only and not cluster and len(known) == 1:
            (cluster,) = known
        if known and cluster not in known:
            engine.dispose()
            raise StoreError(f"{backend.place}: nothing of cluster {cluster!r}; it has {', '.join(sorted(known))}")
        return cls(engine, cluster, known.get(cluster, -1), read_only, term)

    @property
    def key(self) -> int:
        """The cluster's clusters.id."""
        return self._cluster

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self) -> None:
        """Keep a connection open from now on, for repeated reading."""
        self._engine.dispose()
        self._engine = self._backend.engine("watch" if self.read_only else "write")

    def check_schema(self) -> None:
        """Raise `SchemaError` if the database was upgraded since it was opened."""
        with self._read() as connection:
            check_revision(connection)

    def stamp(self) -> object:
        """Return a value that changes with each write to the database, at next to no cost; None if only reading tells.
        Raises OSError if the database is gone."""
        return self._backend.stamp()
