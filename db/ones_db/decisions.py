"""Decisions with a reason for each job, and resizes with all their states.

Each step of a resize is stored before the companion takes it (write-ahead logging).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Select, bindparam, case, exists, func, or_, select, text

from ones_db.backend import ResizeConflict, UnknownRecord
from ones_db.engine import Transactions, change_rows, noting, reading, remembering
from ones_db.jobs import ALIVE, CLUSTER, among, key_of, keys_of, latest, newest, with_job
from ones_db.reasons import NO_REASON, Reason
from ones_db.records import AlternativeRecord, DecisionJobRecord, DecisionRecord, ResizeRecord, ResizeStepRecord
from ones_db.rows import record_of, row_of, same_record
from ones_db.tables import ALTERNATIVES, DECISION_JOBS, DECISIONS, JOBS, RESIZES, STEPS
from ones_db.views import RESIZE_COST

_OTHER = DECISION_JOBS.alias("of_job")
_LAST = select(func.max(_OTHER.c.decision_id)).where(_OTHER.c.job_id == JOBS.c.id).correlate(JOBS).scalar_subquery()
_NEWEST_DECISIONS = (
    select(*(column for column in DECISION_JOBS.c if not column.primary_key), JOBS.c.job_id)
    .select_from(JOBS)
    .join(DECISION_JOBS, DECISION_JOBS.c.job_id == JOBS.c.id)
    .where(ALIVE, latest(CLUSTER), DECISION_JOBS.c.decision_id == _LAST)
)
_DECIDED_UNTIL = select(select(func.max(DECISIONS.c.id)).scalar_subquery(), func.max(JOBS.c.id), func.count()).where(
    JOBS.c.cluster_id == CLUSTER, JOBS.c.end_time.is_(None)
)
"""Query of (last decision's id, last open job's id, number of open jobs), on which `newest_decisions` depends."""


def _first(lines: Select[Any], most: int) -> Select[Any]:
    """Return the query `lines` with at most `most` jobs of each decision; jobs that change come first."""
    pairs = (("nodes", "from_nodes"), ("gpus_per_node", "from_gpus_per_node"), ("batch", "from_batch"))
    changes = or_(*(DECISION_JOBS.c[new].is_distinct_from(DECISION_JOBS.c[old]) for new, old in pairs))
    order = (case((changes, 0), else_=1), JOBS.c.job_id)
    place = func.row_number().over(partition_by=DECISION_JOBS.c.decision_id, order_by=order)
    ranked = lines.add_columns(place.label("place")).subquery()
    return select(ranked).where(ranked.c.place <= most)


def _alternatives(
    connection: Connection, decision_ids: Collection[int], jobs: Collection[int] | None = None
) -> dict[tuple[int, int], tuple[AlternativeRecord, ...]]:
    """Return the considered sizes, by (decision, jobs.id). `jobs` (jobs.id) limits them to these jobs."""
    query = select(ALTERNATIVES).where(among(ALTERNATIVES.c.decision_id, decision_ids)).order_by(ALTERNATIVES.c.rank)
    if jobs is not None:
        query = query.where(among(ALTERNATIVES.c.job_id, jobs))
    found: dict[tuple[int, int], tuple[AlternativeRecord, ...]] = {}
    for row in connection.execute(query).mappings():
        key = (row["decision_id"], row["job_id"])
        found[key] = (*found.get(key, ()), record_of(AlternativeRecord, row))
    return found


class DecisionStore(Transactions):
    """Part of a `Store`: decisions and resizes."""

    _newest_decided: tuple[tuple[Any, ...], dict[int, DecisionJobRecord]] = (), {}
    """Last row of the query `_DECIDED_UNTIL`, and the result of `newest_decisions` that belongs to it."""

    @noting
    def add_decision(self, connection: Connection, record: DecisionRecord) -> int:
        """Store a decision with its jobs, unless its time and policy are stored already. Return its id."""
        keys = keys_of(connection, self._cluster, {job.job_id for job in record.jobs})
        same = DECISIONS.c.time == record.time, DECISIONS.c.policy == record.policy
        known = connection.scalar(select(DECISIONS.c.id).where(DECISIONS.c.cluster_id == self._cluster, *same))
        if known is not None:
            return int(known)
        values = row_of(record)
        del values["id"]
        if record.score is not None and math.isnan(record.score):
            values["score"] = None
        result = connection.execute(DECISIONS.insert(), {"cluster_id": self._cluster, **values})
        key = int(result.inserted_primary_key[0])  # type: ignore[index]
        rows = [{**row_of(job), "decision_id": key, "job_id": keys[job.job_id]} for job in record.jobs]
        weighed = [
            {**row_of(one), "decision_id": key, "job_id": keys[job.job_id], "rank": rank}
            for job in record.jobs
            for rank, one in enumerate(job.alternatives)
        ]
        if rows:
            connection.execute(DECISION_JOBS.insert(), rows)
        if weighed:
            connection.execute(ALTERNATIVES.insert(), weighed)
        return key

    @reading
    def decisions(self, connection: Connection, job_id: int, limit: int = 20) -> list[DecisionRecord]:
        """Return the last `limit` decisions about a job, newest first. Each lists only this job."""
        job = key_of(connection, self._cluster, job_id)
        query = (
            select(DECISIONS, DECISION_JOBS)
            .join(DECISION_JOBS, DECISION_JOBS.c.decision_id == DECISIONS.c.id)
            .where(DECISION_JOBS.c.job_id == job)
            .order_by(DECISIONS.c.id.desc())
            .limit(limit)
        )
        rows = connection.execute(query).mappings().all()
        weighed = _alternatives(connection, [row["id"] for row in rows], [job])

        def given(row: Mapping[Any, Any]) -> DecisionJobRecord:
            return record_of(DecisionJobRecord, row, job_id=job_id, alternatives=weighed.get((row["id"], job), ()))

        return [record_of(DecisionRecord, row, jobs=(given(row),)) for row in rows]

    @reading
    def newest_decisions(self, connection: Connection) -> dict[int, DecisionJobRecord]:
        """Return the newest decision about each job that has not ended, by job id, without its alternatives.

        The result is cached until a decision, a submission or a job's end is stored.
        """
        newest = tuple(connection.execute(_DECIDED_UNTIL, {"cluster": self._cluster}).one())
        if self._newest_decided[0] != newest:
            found = connection.execute(_NEWEST_DECISIONS, {"cluster": self._cluster})
            names = tuple(found.keys())
            given = (same_record(DecisionJobRecord, names, tuple(row)) for row in found.all())
            self._newest_decided = newest, {one.job_id: one for one in given}
        return self._newest_decided[1]

    @reading
    def recent_decisions(
        self,
        connection: Connection,
        limit: int = 10,
        *,
        most: int | None = None,
        user: str = "",
        before: int | None = None,
        changes: bool = False,
    ) -> list[DecisionRecord]:
        """Return the last `limit` decisions, newest first, each with its jobs.

        `before` selects decisions with a lower id, `user` the jobs of one user, `changes` the jobs whose change the
        companion began to carry out. `most` limits a decision's jobs; jobs that change come first.
        """
        query = select(DECISIONS).where(DECISIONS.c.cluster_id == self._cluster)
        query = query.order_by(DECISIONS.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(DECISIONS.c.id < before)
        if changes:
            query = query.where(exists().where(DECISION_JOBS.c.decision_id == DECISIONS.c.id, DECISION_JOBS.c.acted))
        heads = connection.execute(query).mappings().all()
        lines = (
            select(DECISION_JOBS, JOBS.c.job_id.label("slurm_id"))
            .join(JOBS, JOBS.c.id == DECISION_JOBS.c.job_id)
            # What was decided of an earlier job with the same id is not the newest one's, nor its user's.
            .where(newest(self._cluster), among(DECISION_JOBS.c.decision_id, [row["id"] for row in heads]))
        )
        if user:
            lines = lines.where(JOBS.c.user_name == user)
        if changes:
            lines = lines.where(DECISION_JOBS.c.acted)
        if most is not None:
            lines = _first(lines, most)
        jobs: dict[int, list[DecisionJobRecord]] = {row["id"]: [] for row in heads}
        found = sorted(connection.execute(lines).mappings(), key=lambda row: int(row["slurm_id"]))
        weighed = _alternatives(connection, list(jobs), {row["job_id"] for row in found} if user or most else None)
        for row in found:
            mine = weighed.get((row["decision_id"], row["job_id"]), ())
            job = record_of(DecisionJobRecord, row, job_id=row["slurm_id"], alternatives=mine)
            jobs[row["decision_id"]].append(job)
        return [record_of(DecisionRecord, row, jobs=tuple(jobs[row["id"]])) for row in heads]

    @noting
    def begin_resize(self, connection: Connection, record: ResizeRecord) -> ResizeRecord:
        """Store a resize before it begins; return it with its id. Raises `ResizeConflict` if the job has one open."""
        job = key_of(connection, self._cluster, record.job_id)
        values = {**row_of(record), "job_id": job}
        del values["id"]
        query = select(RESIZES).where(RESIZES.c.job_id == job)
        again = connection.execute(query.where(RESIZES.c.started == record.started)).mappings().one_or_none()
        if again is not None:
            if all(again[name] == values[name] for name in _MEANT):
                return self._noted(_found(connection, self._cluster, again["id"]))
            raise ResizeConflict(f"job {record.job_id}: another resize began at the same moment")
        running = connection.execute(query.where(RESIZES.c.ended.is_(None))).mappings().one_or_none()
        if running is not None:
            other = f"resize {running['id']} is open (state {running['state']})"
            raise ResizeConflict(f"job {record.job_id}: {other}; end it first")
        result = connection.execute(RESIZES.insert(), values)
        key = int(result.inserted_primary_key[0])  # type: ignore[index]
        _step(connection, ResizeStepRecord(key, 0, record.state, record.started, NO_REASON, record.back))
        return self._noted(replace(record, id=key))

    @noting
    def step_resize(
        self,
        connection: Connection,
        resize_id: int,
        state: str,
        *,
        time: float,
        back: bool = False,
        detail: Reason = NO_REASON,
        order_number: int | None = None,
        deadline: float | None = None,
    ) -> ResizeRecord:
        """Store the state that a resize enters, before that state's action is taken. Return the resize.

        `deadline` is the new state's, in Unix seconds. Without an order number, the stored one stays.
        """
        before = self._resize(connection, resize_id)
        if before.ended is not None:
            raise _has_ended(before)
        number = before.order_number if order_number is None else order_number
        after = replace(before, state=state, back=back, deadline=deadline, order_number=number)
        return self._changed(connection, before, after, ResizeStepRecord(resize_id, 0, state, time, detail, back))

    @noting
    def end_resize(
        self,
        connection: Connection,
        resize_id: int,
        state: str,
        outcome: Reason,
        time: float,
        pause_s: float | None = None,
    ) -> ResizeRecord:
        """Store the end of a resize, and return the resize. Its end state is `RESIZE_DONE` if it took effect."""
        before = self._resize(connection, resize_id)
        if before.ended is not None:
            if (before.state, before.ended) == (state, time):
                return before
            raise _has_ended(before)
        self._forget("histories", of=before.job_id.__eq__)
        self._forget("finished")
        after = replace(before, state=state, back=False, deadline=None, ended=time, pause_s=pause_s, outcome=outcome)
        return self._changed(connection, before, after, ResizeStepRecord(resize_id, 0, state, time, outcome))

    @noting
    def note_held(self, connection: Connection, resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
        """Store which waiting tasks the companion is about to hold for a resize by blocks. Return the resize."""
        before = self._resize(connection, resize_id)
        return self._changed(connection, before, replace(before, held=tuple(tasks)))

    @noting
    def note_let_go(self, connection: Connection, resize_id: int, tasks: Sequence[int]) -> ResizeRecord:
        """Store which tasks are no longer held for a resize by blocks. Return the resize."""
        before = self._resize(connection, resize_id)
        return self._changed(connection, before, replace(before, let_go=tuple(tasks)))

    @noting
    def note_preempted(
        self, connection: Connection, resize_id: int, tasks: Sequence[int], let_go: Sequence[int]
    ) -> ResizeRecord:
        """Store which tasks are held after a resize by blocks, because Slurm preempted them or may do so.

        `let_go` lists the tasks that were held for the resize and are not held now. Return the resize.
        """
        before = self._resize(connection, resize_id)
        return self._changed(connection, before, replace(before, preempted=tuple(tasks), let_go=tuple(let_go)))

    def open_resizes(self) -> list[ResizeRecord]:
        """Return the open resizes, oldest first. A companion that starts must finish each or roll it back."""
        return sorted(self._open_resizes().values(), key=lambda one: one.id)

    @remembering("open resizes")
    def _open_resizes(self, connection: Connection) -> dict[int, ResizeRecord]:
        found = connection.execute(_OPENED, {"cluster": self._cluster}).mappings()
        return {row["id"]: _record(row) for row in found}

    def _resize(self, connection: Connection, resize_id: int) -> ResizeRecord:
        known = self._remembered("open resizes").get((), {})
        return known.get(resize_id) or _found(connection, self._cluster, resize_id)

    def _noted(self, record: ResizeRecord) -> ResizeRecord:
        """Put a stored resize into the cache, or drop it from the open ones if it has ended. Return it."""
        if (known := self._remembered("open resizes").get(())) is not None:
            known[record.id] = record
            if record.ended is not None:
                del known[record.id]
        if (known := self._remembered("resizes").get((record.job_id,))) is not None:
            known[record.id] = record
        return record

    def _changed(
        self, connection: Connection, before: ResizeRecord, after: ResizeRecord, step: ResizeStepRecord | None = None
    ) -> ResizeRecord:
        """Store the fields in which `after` differs from `before`, and the step if there is one. Return `after`."""
        was, now = row_of(before), row_of(after)
        values = {name: value for name, value in now.items() if value != was[name]}
        change_rows(connection, RESIZES, tuple(values), [{**values, "key": after.id}])
        if step is not None:
            _next_step(connection, step)
        return self._noted(after)

    @remembering("resizes")
    def resizes_of(self, connection: Connection, job_id: int) -> dict[int, ResizeRecord]:
        """Return a job's resizes by id, in order; none for an unknown job. Do not change the cached dictionary."""
        query = with_job(RESIZES, self._cluster).where(latest(self._cluster), JOBS.c.job_id == job_id)
        rows = connection.execute(query.order_by(RESIZES.c.id)).mappings()
        return {row["id"]: _record(row) for row in rows}

    @reading
    def resizes(
        self, connection: Connection, job_id: int | None = None, decisions: Sequence[int] | None = None
    ) -> list[ResizeRecord]:
        """Return the resizes of a job, of these decisions (ids), or all resizes, oldest first."""
        query = with_job(RESIZES, self._cluster).order_by(RESIZES.c.id)
        if decisions is not None:
            query = query.where(RESIZES.c.decision_id.in_(decisions))
        if job_id is not None:
            query = query.where(RESIZES.c.job_id == key_of(connection, self._cluster, job_id))
        return [_record(row) for row in connection.execute(query).mappings()]

    @reading
    def resize_steps(self, connection: Connection, resize_id: int) -> list[ResizeStepRecord]:
        """Return the states that a resize has entered, in order."""
        _found(connection, self._cluster, resize_id)
        query = select(STEPS).where(STEPS.c.resize_id == resize_id).order_by(STEPS.c.sequence)
        return [record_of(ResizeStepRecord, row) for row in connection.execute(query).mappings()]

    @reading
    def resize_phases(self, connection: Connection, ended: Iterable[ResizeRecord]) -> dict[int, dict[str, float]]:
        """Return the seconds of each known phase, by the resize's id and then the phase's name in `PHASES`."""
        one_resize = "cluster = :cluster AND job_id = :job_id AND start_time = :started"
        query = text(f"SELECT {', '.join(PHASES)} FROM resize_cost WHERE {one_resize}")
        found = {}
        for one in ended:
            asked = {"cluster": self.cluster, "job_id": one.job_id, "started": one.started}
            for row in connection.execute(query, asked).mappings():
                found[one.id] = {name: float(row[name]) for name in PHASES if row[name] is not None}
        return found


_MEANT = ("restart", "new_nodes", "new_gpus_per_node", "new_batch", "mechanism", "added", "dropped", "new_kind")
"""Columns that describe the aim of a resize. Two calls that agree in them and in the start store the same resize."""

PHASES = tuple(one.name for one in RESIZE_COST.columns if one.name.endswith("_s") and one.name != "total_s")
"""Columns of the view `resize_cost` that are seconds of a phase."""


_OPENED = with_job(RESIZES, CLUSTER).where(RESIZES.c.ended.is_(None))
_BY_ID = with_job(RESIZES, CLUSTER).where(RESIZES.c.id == bindparam("key"))
_LAST_STEP = select(STEPS).where(STEPS.c.resize_id == bindparam("key")).order_by(STEPS.c.sequence.desc()).limit(1)


def _found(connection: Connection, cluster: int, resize_id: int) -> ResizeRecord:
    row = connection.execute(_BY_ID, {"cluster": cluster, "key": resize_id}).mappings().one_or_none()
    if row is None:
        raise UnknownRecord(f"resize {resize_id} is not in the database")
    return _record(row)


def _has_ended(resize: ResizeRecord) -> ResizeConflict:
    return ResizeConflict(f"resize {resize.id} of job {resize.job_id} has ended (state {resize.state})")


def _next_step(connection: Connection, step: ResizeStepRecord) -> None:
    """Store a step, unless it equals the last stored one: a call may be repeated after a crash."""
    last = record_of(ResizeStepRecord, connection.execute(_LAST_STEP, {"key": step.resize_id}).mappings().one())
    if replace(last, sequence=0) != step:
        _step(connection, replace(step, sequence=last.sequence + 1))


def _step(connection: Connection, step: ResizeStepRecord) -> None:
    connection.execute(STEPS.insert(), row_of(step))


def _record(row: Mapping[Any, Any]) -> ResizeRecord:
    return record_of(ResizeRecord, row, job_id=row["slurm_job"])
