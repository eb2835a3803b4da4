"""The one way in to what is remembered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, local
from types import TracebackType

from sqlalchemy import Connection, Engine, select

from ones_db import blocks, decisions, history, jobs, leaders, promises, reports, resizes, summary
from ones_db.backend import UPGRADE
from ones_db.engine import add_new, backend_behind, backend_of, check_revision, transaction
from ones_db.errors import SchemaError, StoreError
from ones_db.history_cache import HistoryCache
from ones_db.reasons import NO_REASON, Reason
from ones_db.records import (
    BlockRecord,
    DecisionJobRecord,
    DecisionRecord,
    HeldRecord,
    JobHistory,
    JobRecord,
    MembershipRecord,
    PromiseRecord,
    ResizeRecord,
    ResizeStepRecord,
    RunRecord,
    RunReports,
)
from ones_db.site import SiteStore
from ones_db.summary import JobSummary, TimelineRow
from ones_db.tables import CLUSTERS
from ones_wrapper.protocol import Checkpoint


class Store(SiteStore):
    """What is remembered of one cluster. The contract of every database behind it:

    * One writer a cluster: the companion that leads. Any number of readers, in any process, at the same time; neither
      waits for the other. A second writer is not wrong, but each waits for the other's call to end, and gets
      `StoreBusy` when that takes longer than half a minute.
    * Every method is one transaction. When a writing method returns, what it wrote survives a crash of the
      process and of the machine; when it raises, or the process is killed in it, nothing of it is stored. So
      an intent may be acted on as soon as the call that stored it has returned. A server that is lost at the very end
      of a call (`StoreLost`) may have stored all of it: who needs to know calls again.
    * Every writing method may be called again with the same data, and then changes nothing.
    * A reading method sees one moment: all calls that had returned, and none in part.
    * A job id means the newest submission with that id, since Slurm uses ids again.
    * A connection that was lost costs the call in which that is found; the next one connects anew.
    * Methods may be called from any thread. A store does not survive a fork; open another in the child.

    Errors are `StoreError` and its kinds, which say what to do.
    """

    def __init__(
        self, engine: Engine, cluster: str, cluster_key: int, read_only: bool, term: int | None = None
    ) -> None:
        """Use `open`."""
        self._engine = engine
        self._backend = backend_behind(engine)
        self._cluster = cluster_key
        self._term = term
        self._cache = HistoryCache()
        self._cache_lock = Lock()
        self._thread = local()
        """Of each thread: the connection over which it reads now."""
        self.place = self._backend.place
        self.cluster = cluster
        self.read_only = read_only

    @classmethod
    def open(cls, url: str, cluster: str, *, read_only: bool = False, term: int | None = None) -> Store:
        """The store of one cluster in the database at `url`, such as
        ``sqlite:////var/lib/slurm-ones/ones.sqlite`` or ``postgresql://ones@server/ones``.

        Opened for writing, it makes the cluster known; for reading, an empty name means the only one there is.
        With the `term` of a leader (`ones_db.leader_lock`) every writing method raises `NotLeader`, and stores nothing,
        once there is a newer one; without, as commands open it, none asks who leads.
        A server's password is best left to ~/.pgpass, PGPASSWORD or a service file.
        Raises `SchemaError`, saying what to run, where the database is absent, older or newer than this version, or
        not ours, and `StoreError` where it cannot be opened, or is read for a cluster that is not among those it has.
        """
        backend = backend_of(url)
        if not cluster and not read_only:
            raise StoreError("no cluster is named: whose jobs are to be stored?")
        if not backend.exists():
            raise SchemaError(f"{backend.place}: no such database, or an empty one; run `{UPGRADE}` to create it")
        engine = backend.engine("read")
        try:
            # Looked at before it is opened for writing, which leaves a mark even in another program's file.
            with transaction(engine) as connection:
                check_revision(connection)
            if not read_only:
                engine.dispose()
                engine = backend.engine("write")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def watch(self) -> None:
        """Stay connected from now on: for who reads again and again."""
        self._engine.dispose()
        self._engine = self._backend.engine("watch" if self.read_only else "write")

    def check_schema(self) -> None:
        """Raise `SchemaError` where the database was upgraded since it was opened."""
        with self._read() as connection:
            check_revision(connection)

    def stamp(self) -> object:
        """What is another one after each write to the database, found at next to no cost; None where only reading
        tells. Raises OSError where the database is gone."""
        return self._backend.stamp()

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Within the block, whatever this thread reads is of one and the same moment, and over one connection."""
        if getattr(self._thread, "connection", None) is not None:
            yield
            return
        with transaction(self._engine) as connection:
            self._thread.connection = connection
            try:
                yield
            finally:
                self._thread.connection = None

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self.one_moment():
            yield self._thread.connection

    @contextmanager
    def _read_with_cache(self) -> Iterator[Connection]:
        with self._cache_lock, self._read() as connection:
            try:
                yield connection
            except BaseException:
                self._cache.clear()
                raise

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        if self.read_only:
            raise StoreError(f"{self.place}: opened for reading")
        with transaction(self._engine, write=True) as connection:
            if self._term is not None:
                leaders.check_term(connection, self._cluster, self._term)
            yield connection

    # What snapshots and jobs say

    def record_jobs(self, records: Iterable[JobRecord]) -> None:
        """Store jobs as they are now; what did not change is not written.

        A record with restart 0 and a later submission time than the stored one is a new job that got an old
        id. What the job asked for, and when it was submitted, stay as first seen.
        """
        with self._write() as connection:
            jobs.record_jobs(connection, self._cluster, records)

    def record_runs(self, records: Iterable[RunRecord]) -> None:
        """Store runs as Slurm has them. What a record does not know (None, 0 nodes) stays as stored, and so
        does how far the run's reports were read."""
        with self._write() as connection:
            jobs.record_runs(connection, self._cluster, records)

    def record_blocks(self, records: Iterable[BlockRecord]) -> None:
        """Store starts of blocks as Slurm has them."""
        with self._write() as connection:
            blocks.record_blocks(connection, self._cluster, records)

    def end_run(self, job_id: int, restart: int, end_time: float, reason: str = "") -> None:
        """Store when a run ended. The reason counts only where the run itself gave none."""
        with self._write() as connection:
            jobs.end_run(connection, self._cluster, job_id, restart, end_time, reason)

    def add_reports(self, looks: Sequence[RunReports]) -> None:
        """Store what runs reported, each run once, and with it how far their files were read.

        Reports that are stored already stay as they are: those whose number is not above the last one stored are left
        out, and the position never goes back. A run that no snapshot saw is made from its reports. One transaction
        for all of them: a tick costs one commit however many jobs reported.
        """
        with self._write() as connection:
            reports.add_reports(connection, self._cluster, looks)

    # What was decided and done

    def add_decision(self, record: DecisionRecord) -> int:
        """Store a decision with its jobs; returns its id. One of the same time and policy is the same
        decision."""
        with self._write() as connection:
            return decisions.add_decision(connection, self._cluster, record)

    def record_promises(self, records: Iterable[PromiseRecord]) -> None:
        """Store which deadlines were promised or refused, in place of what was said of those jobs before."""
        with self._write() as connection:
            promises.record_promises(connection, self._cluster, records)

    def set_outcome(self, decision_id: int, job_id: int, *, acted: bool, outcome: Reason) -> None:
        """Store what became of a decision for one job."""
        with self._write() as connection:
            decisions.set_outcome(connection, self._cluster, decision_id, job_id, acted, outcome)

    def begin_resize(self, record: ResizeRecord) -> ResizeRecord:
        """Write down a resize that is meant; returns it with its id. Raises `ResizeConflict` where the job has
        one open."""
        with self._write() as connection:
            return resizes.begin_resize(connection, self._cluster, record)

    def step_resize(
        self,
        resize_id: int,
        state: str,
        *,
        time: float,
        detail: Reason = NO_REASON,
        order_number: int | None = None,
        deadline: float | None = None,
    ) -> ResizeRecord:
        """Write down the state that a resize enters, before what it stands for is done; returns how it stands.

        The deadline is that of the new state, None for none; the order's number stays unless another is given.
        """
        with self._write() as connection:
            return resizes.step_resize(
                connection, self._cluster, resize_id, state, detail, time, order_number, deadline
            )

    def end_resize(
        self, resize_id: int, state: str, outcome: Reason, time: float, pause_s: float | None = None
    ) -> ResizeRecord:
        """Close a resize; returns how it ended. State `RESIZE_DONE` says that it took effect."""
        with self._write() as connection:
            return resizes.end_resize(connection, self._cluster, resize_id, state, outcome, time, pause_s)

    def note_held(self, resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
        """Store which tasks of a job of blocks stand in holds of the companion's for a resize, before they are held;
        returns how it stands."""
        with self._write() as connection:
            return resizes.note_held(connection, self._cluster, resize_id, tasks)

    def note_let_go(self, resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
        """Store which tasks of a job of blocks were seen out of the companion's hold since that resize; returns how it
        stands."""
        with self._write() as connection:
            return resizes.note_let_go(connection, self._cluster, resize_id, tasks)

    def set_deferral(self, job_id: int, until: float | None) -> None:
        """Store until when the companion keeps a waiting job from starting; None where it does not (any more)."""
        with self._write() as connection:
            jobs.set_deferral(connection, self._cluster, job_id, until)

    def set_pause(self, resize_id: int, pause_s: float) -> None:
        """Store the pause of a resize once the job's reports show it, also after it ended."""
        with self._write() as connection:
            resizes.set_pause(connection, self._cluster, resize_id, pause_s)

    # Reading

    def jobs(self, job_ids: Sequence[int] | None = None) -> dict[int, JobRecord]:
        """Jobs by id, in the order of their submission: those named, or all."""
        with self._read() as connection:
            return jobs.jobs(connection, self._cluster, job_ids)

    def live_jobs(self) -> set[int]:
        """The jobs that have not ended, by id."""
        with self._read() as connection:
            return jobs.live_jobs(connection, self._cluster)

    def runs(self, job_id: int) -> list[RunRecord]:
        """The runs of a job, first to last."""
        with self._read() as connection:
            return jobs.runs(connection, self._cluster, job_id)

    def report_positions(self, job_ids: Sequence[int], last: int = 2) -> dict[tuple[int, int], tuple[int, int]]:
        """Bytes read of report files, and the number of the last report, by (job id, restart).

        Of each job's `last` runs, by the restart that it was last seen with; runs never read are left out.
        """
        with self._read() as connection:
            return reports.report_positions(connection, self._cluster, job_ids, last)

    def reported(self, job_ids: Sequence[int]) -> dict[int, int]:
        """How many reports each job has written over all runs, by their numbers; none for jobs without a run."""
        with self._read() as connection:
            return reports.reported(connection, self._cluster, job_ids)

    def blocks(self, job_id: int) -> list[BlockRecord]:
        """The starts of a job's blocks, first to last."""
        with self._read() as connection:
            return blocks.blocks(connection, self._cluster, job_id)

    def open_blocks(self) -> list[BlockRecord]:
        """The blocks that have not ended."""
        with self._read() as connection:
            return blocks.open_blocks(connection, self._cluster)

    def held(self) -> list[HeldRecord]:
        """The GPUs that running jobs hold on each node, a record for each node of a job or block."""
        with self._read() as connection:
            return blocks.held(connection, self._cluster)

    def membership(self, job_id: int, order: int | None = None) -> MembershipRecord | None:
        """Which blocks of a job train together, by its newest report of that; with an order's number the newest that
        names it. None where there is none, as for every job that is not one of blocks."""
        with self._read() as connection:
            return next(iter(blocks.memberships(connection, self._cluster, job_id, 1, order)), None)

    def memberships(self, job_id: int, limit: int = 100) -> list[MembershipRecord]:
        """The newest memberships of a job, newest first."""
        with self._read() as connection:
            return blocks.memberships(connection, self._cluster, job_id, limit)

    def checkpoint_for_order(self, job_id: int, restart: int, order: int) -> tuple[int, float, Checkpoint] | None:
        """The number, the time and the report of the checkpoint that a run reported in answer to an order, None while
        there is none."""
        with self._read() as connection:
            return reports.checkpoint_for_order(connection, self._cluster, job_id, restart, order)

    def pause_after(self, job_id: int, restart: int) -> float | None:
        """Seconds from the last step of the run `restart` to the first report of the next run that spoke; None
        before that. By the clocks of the job's own nodes."""
        with self._read() as connection:
            return reports.pause_after(connection, self._cluster, job_id, restart)

    def promises(self, job_ids: Collection[int] | None = None) -> dict[int, PromiseRecord]:
        """What was said of the deadlines of these jobs, or of all that have not ended, by job id."""
        with self._read() as connection:
            return promises.promises(connection, self._cluster, job_ids)

    def open_resizes(self) -> list[ResizeRecord]:
        """Resizes that have not ended, oldest first: what a companion that starts has to finish or roll
        back."""
        with self._read() as connection:
            return resizes.open_resizes(connection, self._cluster)

    def deferrals(self) -> dict[int, float]:
        """For each job that the companion keeps from starting, until when."""
        with self._read() as connection:
            return jobs.deferrals(connection, self._cluster)

    def resizes(self, job_id: int | None = None) -> list[ResizeRecord]:
        """The resizes of a job, or of all, oldest first."""
        with self._read() as connection:
            return resizes.resizes(connection, self._cluster, job_id)

    def resize_steps(self, resize_id: int) -> list[ResizeStepRecord]:
        """The states a resize went through."""
        with self._read() as connection:
            return resizes.resize_steps(connection, self._cluster, resize_id)

    def resize_phases(self, ended: Iterable[ResizeRecord]) -> dict[int, dict[str, float]]:
        """Seconds that the phases of these resizes took, by the resize's id and the phase's column in the view
        `resize_cost`; what is not known is left out."""
        with self._read() as connection:
            return resizes.resize_phases(connection, self.cluster, ended)

    def decisions(self, job_id: int, limit: int = 20) -> list[DecisionRecord]:
        """The newest decisions on a job, newest first, each with what it gave that job alone."""
        with self._read() as connection:
            return decisions.decisions(connection, self._cluster, job_id, limit)

    def newest_decisions(self) -> dict[int, DecisionJobRecord]:
        """What the newest decision on each job that has not ended gave it, without what it weighed."""
        with self._read() as connection:
            return decisions.newest_decisions(connection, self._cluster)

    def recent_decisions(self, limit: int = 10, *, most: int | None = None, user: str = "") -> list[DecisionRecord]:
        """The newest decisions, newest first, each with all its jobs; or with `most` so many of them, those first that
        get another size; or with those of one `user` alone."""
        with self._read() as connection:
            return decisions.recent_decisions(connection, self._cluster, limit, most, user)

    def histories(self, job_ids: Sequence[int] | None = None) -> dict[int, JobHistory]:
        """What each job has shown so far.

        None stands for all elastic jobs that have not ended. The number of queries is constant up to hundreds of jobs,
        and only what was reported since the last call is read. A job that has shown nothing new gets the very same
        object again.
        """
        with self._read_with_cache() as connection:
            return history.histories(connection, self._cluster, self._cache, job_ids)

    def finished_histories(self, limit: int = 200) -> list[JobHistory]:
        """The elastic jobs that completed last and ended at least one epoch, newest first.

        The very same list again while there is nothing new.
        """
        with self._read_with_cache() as connection:
            return history.finished_histories(connection, self._cluster, self._cache, limit)

    def job_summaries(self, job_ids: Sequence[int] | None = None, *, ended: int | None = None) -> list[JobSummary]:
        """One line a job, in the order of their submission: those named, or all that a companion has seen; with
        `ended`, of those that have ended only so many, the last. That costs the same however many have ended."""
        with self._read() as connection:
            return summary.job_summaries(connection, self._cluster, job_ids, ended)

    def ended_of(self, user: str, count: int) -> list[JobSummary]:
        """One line for each of the `count` jobs of a user that ended last, in the order of their submission. To look
        for them costs the more, the more jobs of others have ended since."""
        with self._read() as connection:
            return summary.job_summaries(connection, self._cluster, None, count, user)

    def strategies(self) -> dict[str, int]:
        """How many jobs that have not ended train by each training strategy, the most frequent first."""
        with self._read() as connection:
            return summary.strategies(connection, self._cluster)

    def timeline(self, since: float | None = None, job_id: int | None = None) -> list[TimelineRow]:
        """Every run that started of jobs that a companion has seen, by its start, for plots; those alone that had not
        ended by `since`, and those of the newest job with that id, where these are given."""
        with self._read() as connection:
            return summary.timeline(connection, self._cluster, since, job_id)
