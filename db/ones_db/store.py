"""Access to the stored data of a cluster, by one class."""

from __future__ import annotations

from contextlib import AbstractContextManager

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
from ones_wrapper.protocol.choices import listed


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
    AbstractContextManager["Store"],
):
    """Stored data of one cluster. Each base class has the methods of one subject. All methods keep this contract:

    **Consistency.** A cluster has one writer: the companion that leads. It has any number of readers, in any process,
    at the same time. Reading and writing never wait for each other. A second writer is allowed: each of the two waits
    for the other's call to end, and gets `StoreBusy` after half a minute.

    Every method is one transaction. When a writing method returns, its rows survive a crash of the process and of the
    machine. If the method raises an error, or the process is killed in the call, no row of the call is stored. So an
    intent may be acted on as soon as the call that stored it has returned. If the server is lost at the very end of a
    call (`StoreLost`), all its rows may be stored. To be sure, repeat the call: no row is stored twice.

    **Raises.** `StoreError` and its subclasses, whose messages say what to do.
    """

    @classmethod
    def open(cls, url: str, cluster: str, *, read_only: bool = False, term: int | None = None) -> Store:
        """Open the store of one cluster in the database at `url`.

        The URL is such as ``sqlite:////var/lib/slurm-ones/ones.sqlite`` or ``postgresql://ones@server/ones``. Leave a
        server's password to ~/.pgpass, PGPASSWORD or a service file. Opening for writing adds an unknown cluster to the
        database. For reading, an empty name means the only cluster in the database.

        `term` is the term of a leader (`ones_db.leader`). Once a newer term has begun, writing methods raise
        `NotLeader` and store nothing. Commands give no term, and then it is not checked who leads.

        Raises `SchemaError`, whose message says what to run, if the database does not exist, has another schema, or is
        another program's. Raises `StoreError` if it cannot be opened, or lacks the cluster that a reader names.
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
            there = listed(sorted(known), cluster)
            raise StoreError(f"{backend.place}: nothing of cluster {cluster!r}; it has {there}")
        return cls(engine, cluster, known.get(cluster, -1), read_only, term)

    @property
    def key(self) -> int:
        """Key of the cluster: clusters.id."""
        return self._cluster

    def close(self) -> None:
        """Close all connections to the database."""
        self._engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self) -> None:
        """Keep a connection open from now on, which makes repeated reads fast."""
        self._engine.dispose()
        self._engine = self._backend.engine("watch" if self.read_only else "write")

    def check_schema(self) -> None:
        """Raise `SchemaError` if the database was upgraded after this store was opened."""
        with self._read() as connection:
            check_revision(connection)

    def stamp(self) -> object:
        """Return a value that changes with each write; None if it is unknown. Raises OSError if the file is gone."""
        return self._backend.stamp()
