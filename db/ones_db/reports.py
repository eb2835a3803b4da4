"""Storage of what runs report. The report's number is part of a row's key, so storing a file twice changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from sqlalchemy import BigInteger, Connection, Table, cast, func, select, text

from ones_db.engine import Transactions, add_new, add_rows, change_rows, noting, reading
from ones_db.jobs import NEW_RUN, SPEC_COLUMNS, STARTS, WITH_IDS, among, key_of, known, newest, spec_columns
from ones_db.records import ReportLine, RunReports
from ones_db.rows import COLUMNS, record_of, row_of
from ones_db.tables import BATCHES, CHECKPOINTS, EPOCHS, JOBS, MEMBERSHIPS, RUNS, THROUGHPUT
from ones_wrapper.protocol import MAX_TEXT, Batch, Bye, Checkpoint, Epoch, First, Hello, Membership, Note, Throughput

Row = Mapping[Any, Any]


def _values(table: Table, report: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    field = {COLUMNS.get(one.name, one.name): one.name for one in fields(report)}
    return attrgetter(*(field[column.name] for column in list(table.columns)[3:]))


_sample, _epoch = _values(THROUGHPUT, Throughput), _values(EPOCHS, Epoch)

MOST = 2**53
"""Upper limit for sums of numbers that jobs report, since a job could report any number."""
LAST_RUNS = 19
"""Number of a job's newest runs that `report_positions` returns, more than the runs that a tick reads."""
MAX_NOTE = 4_000
"""Longest note of a run that is stored, in characters. Of a longer note the end is kept."""

_HELLO = (
    *("batch", "lr_factor", "checkpoint", "queue_s", "launch_s"),
    *("import_s", "group_s", "load_s", "resizes", "world"),
)
"""Columns of a run that each `Hello` report replaces."""

_SELDOM: Mapping[Table, type[Any]] = {CHECKPOINTS: Checkpoint, BATCHES: Batch, MEMBERSHIPS: Membership}
"""Class of report for each table into which a tick stores only a few rows."""

ByKind = Mapping[type[Any], list[Any]]
"""New report lines of one run, in order, by the class of the report."""


def _new(lines: Sequence[ReportLine], known: int) -> ByKind:
    """Return the lines with numbers above `known`, which are not stored yet, by the class of the report."""
    found: dict[type[Any], list[Any]] = defaultdict(list)
    for line in lines:
        if line.number > known:
            found[type(line.report)].append(line)
    return found


def _row(run: int, line: ReportLine) -> dict[str, Any]:
    return {"run_id": run, "number": line.number, "time": line.time, **row_of(line.report)}


def _set_specs(connection: Connection, jobs: Mapping[int, Row], looks: Sequence[RunReports]) -> None:
    told = {look.job_id: spec_columns(look.spec) for look in looks if look.spec is not None}
    rows = [
        {**columns, "key": jobs[job_id]["id"]}
        for job_id, columns in told.items()
        if any(jobs[job_id][name] != value for name, value in columns.items())
    ]
    change_rows(connection, JOBS, SPEC_COLUMNS, rows)


def _runs(connection: Connection, jobs: Mapping[int, Row], looks: Sequence[RunReports]) -> dict[tuple[int, int], Row]:
    """Return the rows of these runs by (jobs.id, restart count). Add a row for each run that no snapshot has shown."""
    asked = {(jobs[look.job_id]["id"], look.restart): look for look in looks}
    keys, restarts = {job for job, _ in asked}, {restart for _, restart in asked}

    def found() -> dict[tuple[int, int], Row]:
        rows = connection.execute(STARTS, {"keys": [*keys], "restarts": [*restarts]}).mappings()
        return {(row["job_id"], row["restart"]): row for row in rows}

    runs = found()
    missing = [
        {
            **NEW_RUN,
            "job_id": job,
            "restart": restart,
            "start_time": min((one.time for one in look.lines), default=None),
        }
        for (job, restart), look in asked.items()
        if (job, restart) not in runs
    ]
    if missing:
        connection.execute(RUNS.insert(), missing)
        runs = found()
    return runs


def _last(new: ByKind) -> list[ReportLine]:
    return [lines[-1] for lines in new.values() if lines]


def _after(run: Row, look: RunReports, new: ByKind) -> dict[str, Any]:
    """Return the columns of the run that these reports change, with their new values."""
    return {
        "report_offset": max(run["report_offset"], look.offset),
        "report_number": max([run["report_number"], look.number or 0, *(line.number for line in _last(new))]),
        **_reached(run, new),
        **_measured(run, new),
        **_starts_and_end(run, new),
    }


def _reached(run: Row, new: ByKind) -> dict[str, Any]:
    """Return the columns for how far the run has trained, after these reports.

    The last report of each class suffices, since a position only grows.
    """
    after: dict[str, Any] = {}
    begun = new[Hello][-1].number if new[Hello] else None
    last = [line for line in _last(new) if begun is None or line.number >= begun]
    places = []
    for line in last:
        if isinstance(line.report, Epoch):
            places.append((line.report.epoch + 1, 0))
        elif isinstance(line.report, (Hello, Throughput, Checkpoint)):
            places.append((line.report.epoch, line.report.cursor))
    if places:
        before = [] if begun is not None else [(run["epoch"] or 0, run["cursor"] or 0)]
        after["epoch"], after["cursor"] = max([*before, *places])
    if last:
        after["report_time"] = max([run["report_time"] or 0.0, *(line.time for line in last)])
        steps = (line.report.step for line in last)
        after["step"] = max([0 if begun is not None else run["step"] or 0, *steps])
    return after


def _measured(run: Row, new: ByKind) -> dict[str, Any]:
    """Return the columns for loss, noise, progress, and steps without a finite loss, after these reports."""
    after: dict[str, Any] = {}
    if run["first_loss"] is None:
        losses = (line.report.loss for line in (*new[Throughput], *new[Epoch]))
        after["first_loss"] = next((loss for loss in losses if loss is not None), None)
    measuring = new[Throughput]
    if new[Hello]:
        measuring = sorted([*measuring, new[Hello][-1]], key=lambda line: line.number)
    for name in ("noise", "progress"):
        values = (getattr(line.report, name) for line in reversed(measuring))
        newest = next((value for value in values if value is not None), None)
        if newest is not None:
            after[name] = newest
    odd = [line.report for line in new[Throughput] if line.report.nonfinite]
    if odd:
        after["nonfinite"] = min((run["nonfinite"] or 0) + sum(report.nonfinite for report in odd), MOST)
        after["nonfinite_step"] = odd[-1].step
    return after


def _starts_and_end(run: Row, new: ByKind) -> dict[str, Any]:
    """Return the columns for the last start of the ranks, for the run's end, and for all notes, after these reports."""
    after: dict[str, Any] = {}
    starts, firsts, notes, byes = new[Hello], new[First], new[Note], new[Bye]
    if not (starts or firsts or notes or byes):
        return after
    since = 0
    if starts:
        since, hello = starts[-1].number, starts[-1].report
        after |= {name: getattr(hello, name) for name in _HELLO}
        after |= {"hello_number": since, "first_step_s": None}
        if run["hello_time"] is None:
            after["hello_time"] = starts[0].time
        after["attempts"] = max(run["attempts"] or 0, hello.attempt)
        if run["start_time"] is None:
            # Of a term Slurm does not tell.
            after["start_time"] = starts[0].time
        # Slurm's word on the shape comes first.
        after |= {name: run[name] or getattr(hello, name) for name in ("nodes", "gpus_per_node")}
        if run["end_time"] is None:
            # The ranks ended before, and were started again.
            after |= {"end_reason": None, "exit_code": None}
    if firsts and firsts[-1].number > since:
        after["first_step_s"] = firsts[-1].report.seconds
    if byes and byes[-1].number > since:
        after |= {"end_reason": byes[-1].report.reason, "exit_code": byes[-1].report.exit_code}
    note = run["note"] or ""
    for lines in (starts, notes, byes):
        added = "; ".join(dict.fromkeys(line.report.note for line in lines if line.report.note))[-MAX_TEXT:]
        if added not in note:
            note = f"{note}; {added}"[-MAX_NOTE:] if note else added
    return after | {"note": note or None}


_PAUSE = """
    SELECT n.hello_time - COALESCE((SELECT MAX(x.time) FROM (
        SELECT MAX(t.time) AS time FROM throughput t WHERE t.run_id = o.id
        UNION ALL SELECT MAX(e.time) FROM epochs e WHERE e.run_id = o.id
        UNION ALL SELECT MAX(k.time - k.seconds) FROM checkpoints k WHERE k.run_id = o.id
    ) x), o.hello_time, n.start_time)
    FROM runs n LEFT JOIN runs o ON o.job_id = n.job_id AND o.restart = (
        SELECT MAX(p.restart) FROM runs p
        WHERE p.job_id = n.job_id AND p.restart <= :restart AND p.hello_time IS NOT NULL)
    WHERE n.job_id = :job AND n.restart > :restart AND n.hello_time IS NOT NULL ORDER BY n.restart LIMIT 1"""
"""Query of the seconds from the last known step of a run o to the first `Hello` of a later run n. The start of a
checkpoint counts as the end of a step."""


class ReportStore(Transactions):
    """Part of a `Store`: reports of runs."""

    @noting
    def add_reports(self, connection: Connection, looks: Sequence[RunReports]) -> None:
        """Store new reports of runs, and how far their files are read. `looks` has each run at most once.

        Reports whose numbers are stored already are left out. A position in a file never goes back. A row is added for
        a run that no snapshot has shown. All is one transaction, so a tick needs one commit for any number of jobs.
        """
        asked = {look.job_id for look in looks}
        found = connection.execute(WITH_IDS, {"cluster": self._cluster, "keys": [*asked]}).mappings()
        jobs = known({row["job_id"]: row for row in found}, asked)
        _set_specs(connection, jobs, looks)
        # A spec by itself does not make a run: the job may be waiting.
        looks = [look for look in looks if look.offset > 0 or look.lines]
        runs = _runs(connection, jobs, looks)
        places, reported = self._remembered("positions"), self._remembered("reported")
        changed_members = {look.job_id for look in looks if any(type(one.report) is Membership for one in look.lines)}
        self._forget("members", of=changed_members.__contains__)
        self._forget("histories", of=jobs.__contains__)
        if any(row["end_time"] is not None for row in jobs.values()):
            self._forget("finished")
        samples: list[tuple[Any, ...]] = []
        epochs: list[tuple[Any, ...]] = []
        others: dict[Table, list[dict[str, Any]]] = {table: [] for table in _SELDOM}
        changed: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
        for look in looks:
            run = runs[jobs[look.job_id]["id"], look.restart]
            new, key = _new(look.lines, run["report_number"]), run["id"]
            samples += [(key, line.number, line.time, *_sample(line.report)) for line in new[Throughput]]
            epochs += [(key, line.number, line.time, *_epoch(line.report)) for line in new[Epoch]]
            for table, kind in _SELDOM.items():
                others[table] += [_row(key, line) for line in new[kind]]
            after = _after(run, look, new)
            if look.job_id in places:
                places[look.job_id][look.restart] = after["report_offset"], after["report_number"]
            if look.job_id in reported:
                reported[look.job_id] += after["report_number"] - run["report_number"]
            after = {name: value for name, value in after.items() if run[name] != value}
            changed[tuple(after)].append({**after, "key": key})
        add_rows(connection, THROUGHPUT, samples)
        add_rows(connection, EPOCHS, epochs)
        for table, rows in others.items():
            add_new(connection, table, rows)
        for names, rows in changed.items():
            change_rows(connection, RUNS, names, rows)

    def report_positions(self, job_ids: Collection[int]) -> dict[int, Mapping[int, tuple[int, int]]]:
        """Return (bytes read, last report's number) of each run's report file, by job id and then restart count.

        Only the newest `LAST_RUNS` runs of a job are returned, and only those whose file has been read.
        """

        def ask(connection: Connection, asked: Collection[int]) -> dict[int, Mapping[int, tuple[int, int]]]:
            query = (
                select(JOBS.c.job_id, RUNS.c.restart, RUNS.c.report_offset, RUNS.c.report_number)
                .join(JOBS, JOBS.c.id == RUNS.c.job_id)
                .where(newest(self._cluster), among(JOBS.c.job_id, asked))
                .where(RUNS.c.report_offset > 0, RUNS.c.restart > JOBS.c.restart - LAST_RUNS)
            )
            found: dict[int, dict[int, tuple[int, int]]] = {job_id: {} for job_id in asked}
            for job_id, restart, offset, number in connection.execute(query):
                found[job_id][restart] = offset, number
            return {**found}

        return self._recall("positions", job_ids, ask)

    def reported(self, job_ids: Collection[int]) -> dict[int, int]:
        """Return the number of reports of each job, in all its runs."""

        def ask(connection: Connection, asked: Collection[int]) -> dict[int, int]:
            query = (
                select(JOBS.c.job_id, cast(func.sum(RUNS.c.report_number), BigInteger))
                .join(JOBS, JOBS.c.id == RUNS.c.job_id)
                .where(newest(self._cluster), among(JOBS.c.job_id, asked))
                .group_by(JOBS.c.job_id)
            )
            return dict.fromkeys(asked, 0) | {job_id: int(count) for job_id, count in connection.execute(query)}

        return self._recall("reported", job_ids, ask)

    @reading
    def checkpoint_for_order(
        self, connection: Connection, job_id: int, restart: int, order: int
    ) -> tuple[int, float, Checkpoint] | None:
        """Return (number, time, report) of the newest checkpoint that the run wrote for this order, or None."""
        query = (
            select(CHECKPOINTS)
            .join(RUNS, RUNS.c.id == CHECKPOINTS.c.run_id)
            .where(
                RUNS.c.job_id == key_of(connection, self._cluster, job_id),
                RUNS.c.restart == restart,
                CHECKPOINTS.c.order_number == order,
            )
            .order_by(CHECKPOINTS.c.number.desc())
            .limit(1)
        )
        row = connection.execute(query).mappings().one_or_none()
        if row is None:
            return None
        return row["number"], row["time"], record_of(Checkpoint, row)

    @reading
    def slowest_checkpoint(self, connection: Connection, since: float) -> tuple[int, float] | None:
        """Return (job id, seconds) of the slowest checkpoint written since a time; None if there is none.

        It considers only jobs of blocks that load a checkpoint at each change of their blocks.
        """
        query = (
            select(JOBS.c.job_id, CHECKPOINTS.c.seconds)
            .join(RUNS, RUNS.c.id == CHECKPOINTS.c.run_id)
            .join(JOBS, JOBS.c.id == RUNS.c.job_id)
            .where(JOBS.c.cluster_id == self._cluster, CHECKPOINTS.c.time >= since)
            .where(JOBS.c.hot.is_(False), JOBS.c.comment.contains("array=blocks"))
            .order_by(CHECKPOINTS.c.seconds.desc())
            .limit(1)
        )
        row = connection.execute(query).one_or_none()
        return (int(row[0]), float(row[1])) if row is not None else None

    @reading
    def pause_after(self, connection: Connection, job_id: int, restart: int) -> float | None:
        """Return the seconds from the last step of run `restart` to the first `Hello` of a later run; None if no later
        run has one.

        If run `restart` has no reports, use the newest earlier run that has some. Both times are from the clocks of the
        job's nodes.
        """
        asked = {"job": key_of(connection, self._cluster, job_id), "restart": restart}
        pause = connection.scalar(text(_PAUSE), asked)
        return None if pause is None else max(0.0, float(pause))
