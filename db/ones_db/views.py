"""Definitions of the views, and SQL for both kinds of database.

The SQL uses a few functions that are replaced here by what each database has: ``utc(x)`` (Unix seconds as text),
``whole(x)`` (x of at least 0, rounded down), ``latest(a, b)`` and ``earliest(a, b)``. ``listed(x, separator)`` is an
aggregate that joins texts in order. ``sizes_of(x)`` is a table of the members of the list `sizes` in a JSON text x.
``member(value, '$.name')`` is a whole number in such a member.

Every view joins clusters, then jobs by their index on cluster and job id, then other tables by their indexes on the
job. ``CROSS JOIN`` makes SQLite use that order; PostgreSQL chooses one itself. So reading one job costs as much as that
job's rows, however many jobs there are. Conditions on cluster, job_id and submit_time reach the innermost tables of
every view with these columns.

Views hold no rows, so no migration changes views. Each upgrade drops all views first and creates them at its end,
because SQLite cannot rename a table under a view.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple, get_args, get_type_hints

from sqlalchemy import BigInteger, Double, Table

from ones_db.records import RESIZE_DONE
from ones_db.rows import COLUMNS, shape_names
from ones_db.shape import Shape
from ones_db.tables import BLOCKS, DECISION_JOBS, DECISIONS, MEMBERSHIPS, RESIZES, RUNS
from ones_db.tables import JOBS as ALL_JOBS
from ones_wrapper.protocol.limits import StrategyLimits

WORDS: dict[str, dict[str, str]] = {
    "sqlite": {
        "utc": "strftime('%Y-%m-%d %H:%M:%S', {}, 'unixepoch')",
        "whole": "CAST({} AS INTEGER)",
        "latest": "max({})",
        "earliest": "min({})",
        "listed": "group_concat({})",
        "sizes_of": "json_each({}, '$.sizes')",
        "member": "json_extract({})",
    },
    "postgresql": {
        "utc": "to_char(to_timestamp({}) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')",
        "whole": "CAST(floor({}) AS BIGINT)",
        "latest": "greatest({})",
        "earliest": "least({})",
        "listed": "string_agg({})",
        "sizes_of": "jsonb_array_elements(CAST({} AS jsonb) -> 'sizes')",
        "member": "CAST(jsonb_path_query_first({}) AS BIGINT)",
    },
}
"""SQL of each of these functions in each kind of database. Braces stand for the arguments."""

_WORD = re.compile(rf"\b({'|'.join(WORDS['sqlite'])})\(")


KINDS = {"int": "whole number", "float": "number", "text": "text", "bool": "0 or 1", "time": "Unix seconds"}
KINDS |= {"said": "text", "day": "text"}
"""Kinds of a view's column or a query's parameter, each in words for documents."""


@dataclass(frozen=True)
class Column:
    """A column of a view."""

    name: str
    kind: str
    """Key of `KINDS`. ``day`` is a date YYYY-MM-DD in UTC. ``said`` is another column's time as text in UTC."""
    comment: str
    """Meaning and unit."""
    of: str = ""
    """Column whose time this column gives as text, if it is of kind ``said``; else empty."""


@dataclass(frozen=True)
class View:
    """A view of the database. Documents, pandas frames and databases are made from this definition."""

    name: str
    title: str
    """Sentence on what is in the view, without a full stop."""
    columns: tuple[Column, ...]
    sql: str
    """SELECT of all columns, except those of kind ``said``. It uses the functions of `WORDS`."""
    order: tuple[str, ...]
    """Columns by which rows are sorted."""

    def select(self, dialect: str) -> str:
        """Return the view's SELECT for a kind of database: ``sqlite`` or ``postgresql``."""
        columns = ", ".join(f"utc(v.{c.of}) AS {c.name}" if c.of else f"v.{c.name}" for c in self.columns)
        return spelled(f"SELECT {columns} FROM ({self.sql}) v", dialect)


def spelled(sql: str, dialect: str) -> str:
    """Return the SQL with the functions of `WORDS` replaced for a kind of database."""
    found = _WORD.search(sql)
    if found is None:
        return sql
    end, depth = found.end(), 1
    while depth:
        depth += {"(": 1, ")": -1}.get(sql[end], 0)
        end += 1
    inner = spelled(sql[found.end() : end - 1], dialect)
    word = WORDS[dialect][found[1]].replace("{}", inner)
    return sql[: found.start()] + word + spelled(sql[end:], dialect)


# Columns that many views have, and the SQL of what several of them tell


def end_of(run: str, job: str) -> str:
    """Return SQL for the end of a run (an alias of runs) of a job (an alias of jobs); null while it runs.

    If the end of a requeued run is unknown, the time of its newest report takes its place.
    """
    reported = f"COALESCE({run}.report_time, {run}.start_time)"
    return f"COALESCE({run}.end_time, CASE WHEN {job}.restart > {run}.restart THEN {reported} END, {job}.end_time)"


END = end_of("r", "j")

UNTIL = f"""COALESCE({END}, latest(r.start_time, COALESCE(r.report_time, r.start_time),
        COALESCE((SELECT MAX(look.time) FROM decisions look WHERE look.cluster_id = j.cluster_id), r.start_time)))"""
"""SQL for the time until which a run r of a job j counts: its end; without an end, the later of its newest report and
the companion's last decision. Not the present time, since the database may be a copy, or its companion stopped."""

BEGAN = "latest(r.start_time, j.submit_time)"
"""SQL for the time from which a run r of a job j counts: its start, but not before the job's submission. A job may
report any start if no snapshot showed the real one."""

JOBS = "FROM clusters c CROSS JOIN jobs j"

OBSERVED = "NOT EXISTS (SELECT 1 FROM accounting a WHERE a.job_id = j.id)"
"""SQL condition on a job j: a companion has seen it, so it is not known only from an import of accounting."""

GPUS = "CASE WHEN r.nodes < 1000000 AND r.gpus_per_node < 1000000 THEN r.nodes * r.gpus_per_node ELSE 0 END"
"""SQL for the GPUs of a run r. An absurd number counts as 0: the job itself may have reported it."""

CLUSTER = Column("cluster", "text", "the cluster's name")
WHOSE = "c.name AS cluster, j.job_id, j.submit_time, j.name, j.user_name"
"""SQL for the columns `JOB`, with which most views begin."""


def time_of(name: str, text: str, comment: str) -> tuple[Column, Column]:
    """Return two columns for a time: in Unix seconds, and as text under the name `text`."""
    return Column(name, "time", f"{comment}, Unix seconds"), said(text, name)


def said(name: str, of: str) -> Column:
    return Column(name, "said", f"{of} as text, UTC", of)


def of_runs(what: str) -> str:
    """Return a subquery for an expression over the started runs r of a job j."""
    return f"(SELECT {what} FROM runs r WHERE r.job_id = j.id AND r.start_time IS NOT NULL)"


M_GPUS = "CASE WHEN m.world < 1000000 THEN m.world ELSE 0 END"
"""SQL for the GPUs of a membership m. An absurd number counts as 0."""

M_NODES = "CASE WHEN m.gpus_per_node > 0 THEN m.nodes ELSE 1 END"
"""SQL for the nodes of a membership m. If nodes have unequal numbers of GPUs, it is one node with all GPUs."""

M_EACH = f"CASE WHEN m.gpus_per_node > 0 THEN m.gpus_per_node ELSE {M_GPUS} END"

M_AFTER = (
    "(SELECT n.time FROM memberships n WHERE n.run_id = m.run_id AND n.number > m.number ORDER BY n.number LIMIT 1)"
)
"""SQL for the start of the membership after m; null if m is the last of its run."""

MOST_MEMBERSHIPS = 6
"""Number of memberships of each run in a user's file: the newest."""

M_BEGAN = f"""CASE WHEN
            (m.why <> 'first' AND (SELECT COUNT(*) FROM memberships n WHERE n.run_id = m.run_id) >= {MOST_MEMBERSHIPS})
            OR EXISTS (SELECT 1 FROM memberships n WHERE n.run_id = m.run_id AND n.number < m.number)
        THEN latest(m.time, {BEGAN}) ELSE {BEGAN} END"""
"""SQL for the time from which a membership m of a run r of a job j counts: its start. The run's first membership counts
from the start of the run. A user's file may lack the first membership."""

M_UNTIL = f"earliest(COALESCE({M_AFTER}, {UNTIL}), {UNTIL})"

TERM_HOURS = f"""(SELECT SUM(latest(0.0, {M_UNTIL} - {M_BEGAN}) * {M_GPUS}) / 3600.0
        FROM memberships m WHERE m.run_id = r.id)"""
"""SQL for the GPU-hours of a run r with memberships; null if it has none."""

SAMPLES = """runs r CROSS JOIN throughput t LEFT JOIN memberships m ON m.run_id = t.run_id AND m.number =
        (SELECT MAX(n.number) FROM memberships n WHERE n.run_id = t.run_id AND n.number < t.number)"""
"""FROM clause of throughput samples t of runs r. Each has the membership m in force at that time, or nulls."""

T_NODES = f"CASE WHEN m.number IS NULL THEN r.nodes ELSE {M_NODES} END"
T_EACH = f"CASE WHEN m.number IS NULL THEN r.gpus_per_node ELSE {M_EACH} END"
T_GPUS = f"CASE WHEN m.number IS NULL THEN {GPUS} ELSE {M_GPUS} END"
"""SQL for the GPUs at which a sample of `SAMPLES` was measured; `T_NODES` and `T_EACH` are its two factors."""

LEAST_S, WITHIN, IDLE_USE = 1e-6, 0.9, 0.1
"""Shortest sample that counts, in seconds. Least share of it after a change of blocks. Use below which GPUs are
idle."""

MEASURED = f"""t.seconds > {LEAST_S} AND t.samples > 0
            AND (m.number IS NULL OR t.time - {WITHIN} * t.seconds >= m.time)"""
"""SQL condition on samples of `SAMPLES`: seconds and samples are above zero, and no blocks joined or left meanwhile.
Views sum floats: one overflow in a sum of whole numbers would make the view fail for everybody."""

SIZES = f"""SELECT r.restart, 0 AS number, r.nodes AS nodes, r.gpus_per_node AS each, {GPUS} AS gpus FROM runs r
            WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND r.nodes > 0
                AND NOT EXISTS (SELECT 1 FROM memberships m WHERE m.run_id = r.id)
            UNION ALL SELECT r.restart, m.number, {M_NODES}, {M_EACH}, {M_GPUS} FROM runs r CROSS JOIN memberships m
            WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND m.run_id = r.id"""
"""SELECT of the sizes of a job j: one for each membership, and one for each run without memberships."""

RESIZED = f"""SELECT COUNT(*) FROM resizes z WHERE z.job_id = j.id AND z.state = '{RESIZE_DONE}'
            AND z.ended IS NOT NULL AND z.restart >= 0"""
"""SELECT of the number of resizes of a running job j that took effect. A condition on the resize z may be appended."""

PAUSED = "(SELECT COALESCE(SUM(z.pause_s), 0.0) FROM resizes z WHERE z.job_id = j.id)"
"""SQL for the sum of the pauses of all resizes of a job j."""

HAS_BLOCKS = "EXISTS (SELECT 1 FROM blocks b WHERE b.job_id = j.id)"

B_UNTIL = """COALESCE(b.end_time, j.end_time, latest(b.start_time,
        COALESCE((SELECT MAX(r.report_time) FROM runs r WHERE r.job_id = j.id), b.start_time),
        COALESCE((SELECT MAX(look.time) FROM decisions look WHERE look.cluster_id = j.cluster_id), b.start_time)))"""
"""SQL for the time until which a block b of a job j counts. It is like `UNTIL` for runs."""

BLOCK_HOURS = f"""(SELECT SUM(latest(0.0, {B_UNTIL} - b.start_time) * b.nodes * b.gpus_per_node) / 3600.0
        FROM blocks b WHERE b.job_id = j.id)"""
"""SQL for the GPU-hours of all blocks of a job j; null if it has no blocks."""

OF_SIZES = {
    "replicas": "parts into which the samples of a step are split",
    "quantum": "global batches are multiples of this, samples",
    "together": "number of consecutive ranks that share a node",
    "fixed_bytes": "memory of a GPU that does not depend on the batch, bytes; 0 if unknown",
    "sample_bytes": "memory of a GPU for each sample of a replica's local batch, bytes; 0 if unknown",
    "replica_bytes": "bytes that a rank sends in its replica in an optimizer step, for each sample of the local batch",
    "data_bytes": "bytes that a rank sends to other replicas in an optimizer step",
}
"""Meaning of each number in a strategy's limits, by its name in the column `limits` of jobs."""


def replicas(limits: StrategyLimits | None, gpus: int) -> int:
    """Return the number of replicas that share a step's samples on these GPUs; without a strategy each GPU is one."""
    row = limits.at(gpus) if limits is not None else None
    return row.replicas if row is not None else gpus


class Of(NamedTuple):
    """SQL and meaning of a column in a job's summary. The SQL uses the tables of `FROM_JOB`."""

    sql: str
    meaning: str


def _newest(table: str, value: str, run: str, condition: str = "") -> str:
    return f"(SELECT {value} FROM {table} t WHERE t.run_id = {run}.id{condition} ORDER BY t.number DESC LIMIT 1)"


def _since_hello(table: str, alias: str) -> str:
    last = _newest(table, "t.number", "n", " AND t.number > COALESCE(n.hello_number, 0)")
    return f"LEFT JOIN {table} {alias} ON {alias}.run_id = n.id AND {alias}.number = {last}"


def _newest_epoch(value: str) -> str:
    return f"""(SELECT e.{value} FROM runs r CROSS JOIN epochs e WHERE e.run_id = r.id AND r.job_id = j.id
            AND e.{value} IS NOT NULL ORDER BY r.restart DESC, e.number DESC LIMIT 1)"""


def _over_runs(count: str) -> str:
    return f"(SELECT CAST(COALESCE(SUM(r.{count}), 0) AS BIGINT) FROM runs r WHERE r.job_id = j.id)"


# A change of the blocks brings a batch too; in how many passes, it does not say.
_BY_BLOCKS = "COALESCE(m.number, 0) > COALESCE(b.number, 0)"
_BATCH = f"COALESCE(CASE WHEN {_BY_BLOCKS} THEN m.batch ELSE b.batch END, n.batch, p.batch)"
_PASSES = f"CASE WHEN {_BY_BLOCKS} THEN NULL ELSE b.passes END"
_STARTED = "(SELECT MIN(r.start_time) FROM runs r WHERE r.job_id = j.id)"
_SPEED = _newest("throughput", "1.0 * t.samples / t.seconds", "n", f" AND t.seconds > {LEAST_S}")
_RESIZING = """(SELECT z.state || CASE WHEN z.back THEN '_back' ELSE '' END FROM resizes z
            WHERE z.job_id = j.id AND z.ended IS NULL LIMIT 1)"""
_NONFINITE_STEP = """(SELECT r.nonfinite_step FROM runs r WHERE r.job_id = j.id AND r.nonfinite_step IS NOT NULL
            ORDER BY r.restart DESC LIMIT 1)"""


@dataclass(frozen=True)
class JobSummary:
    """Summary of a job: its line in lists of jobs."""

    job_id: Annotated[int, Of("j.job_id", "Slurm's job id")]
    submit_time: Annotated[float, Of("j.submit_time", "first submission, Unix seconds; jobs with one id differ in it")]
    name: Annotated[str, Of("j.name", "name of the job")]
    user: Annotated[str, Of("j.user_name", "its owner")]
    account: Annotated[str, Of("j.account", "account it is charged to")]
    partition: Annotated[str, Of("j.partition", "partition it was last seen in")]
    state: Annotated[str, Of("j.state", "base state, as Slurm names it")]
    elastic: Annotated[bool, Of("j.elastic", "true if it opted in and may be resized")]
    refusal: Annotated[str, Of("j.refusal", "sentence that says why the job is not elastic; empty if it is elastic")]
    refusal_code: Annotated[str, Of("j.refusal_code", "code of the reason in refusal")]
    report_note: Annotated[str, Of("j.report_note", "what was wrong with its directory or reports, as a sentence")]
    start_time: Annotated[float | None, Of(_STARTED, "first start, Unix seconds")]
    end_time: Annotated[float | None, Of("j.end_time", "end, Unix seconds; null until then")]
    jct_s: Annotated[float | None, Of("j.end_time - j.submit_time", "JCT: submission to end, seconds; null until then")]
    shape: Annotated[
        Shape | None,
        Of("n.nodes", "nodes of its newest run; null if it has not run"),
        Of("n.gpus_per_node", "GPUs per node of its newest run"),
    ]
    running: Annotated[
        bool, Of("n.restart >= j.restart AND n.end_time IS NULL AND j.end_time IS NULL", "its newest run has not ended")
    ]
    batch: Annotated[int | None, Of(_BATCH, "global batch last in force, samples")]
    passes: Annotated[int | None, Of(_PASSES, "forward passes per optimizer step; null if they are not reported")]
    samples_per_s: Annotated[float | None, Of(_SPEED, "newest throughput that its newest run reported, samples/s")]
    epoch: Annotated[int | None, Of("p.epoch", "epochs done")]
    epochs: Annotated[int | None, Of("j.epochs", "epochs that the job will train; 0 if unknown")]
    cursor: Annotated[int | None, Of("p.cursor", "samples of the current epoch already used")]
    dataset: Annotated[int | None, Of("j.dataset", "samples in an epoch; 0 if unknown")]
    loss: Annotated[float | None, Of(_newest_epoch("loss"), "newest loss that the job reported for an epoch")]
    accuracy: Annotated[float | None, Of(_newest_epoch("accuracy"), "newest accuracy reported for an epoch, 0 to 1")]
    resizes: Annotated[int, Of(f"({RESIZED})", "resizes of the running job that took effect, by requeue or by blocks")]
    resizing: Annotated[str | None, Of(_RESIZING, "state of the open resize; null if no resize is open")]
    pause_s: Annotated[float, Of(PAUSED, "sum of the pauses of all its resizes, seconds; 0 if none is known")]
    attempts: Annotated[int, Of(_over_runs("attempts"), "restarts of the ranks within runs, over all runs")]
    nonfinite: Annotated[int, Of(_over_runs("nonfinite"), "steps with a loss that is not finite, over all runs")]
    nonfinite_step: Annotated[int | None, Of(_NONFINITE_STEP, "step of the last report with a loss that is not finite")]
    strategy: Annotated[str | None, Of("j.strategy", "training strategy of the job; null for plain data parallel")]
    limits: Annotated[StrategyLimits | None, Of("j.limits", "limits of the strategy, a JSON object")]

    def __hash__(self) -> int:
        # Of those that tell most lines apart: a page looks thousands up at each tick.
        return hash((self.job_id, self.state, self.epoch, self.cursor))

    @property
    def local_batch(self) -> int | None:
        """Most samples in a forward pass of a replica (without a strategy, of a GPU); None if unknown."""
        if self.batch is None or not self.passes or not self.shape or not self.shape.gpus:
            return None
        return -(-self.batch // (replicas(self.limits, self.shape.gpus) * self.passes))


_TYPES = {int: "int", float: "float", str: "text", bool: "bool", StrategyLimits: "text", Shape: "int"}


def _columns() -> Iterator[tuple[Column, str]]:
    for field, hint in get_type_hints(JobSummary, include_extras=True).items():
        inner, *columns = get_args(hint)
        kind = _TYPES[(get_args(inner) or (inner,))[0]]
        names = shape_names(field) if len(columns) > 1 else (COLUMNS.get(field, field),)
        for name, of in zip(names, columns, strict=True):
            sql = f"CASE WHEN {of.sql} THEN 1 ELSE 0 END" if kind == "bool" else of.sql
            yield Column(name, "time" if name.endswith("_time") else kind, of.meaning), sql


_LINE = tuple(_columns())
JOB = (CLUSTER, *(column for column, _ in _LINE[:4]))
"""Columns of `WHOSE`: the cluster, and the first fields of `JobSummary`."""
FROM_JOB = f"""jobs j
        LEFT JOIN runs n ON n.job_id = j.id
            AND n.restart = (SELECT MAX(o.restart) FROM runs o WHERE o.job_id = j.id)
        LEFT JOIN runs p ON p.job_id = j.id
            AND p.restart = (SELECT MAX(o.restart) FROM runs o WHERE o.job_id = j.id AND o.epoch IS NOT NULL)
        {_since_hello("memberships", "m")}
        {_since_hello("batch_changes", "b")}"""
"""FROM clause: job j, its newest run n, and its newest run p with a known epoch. While n loads, p is an older run.

m and b are the newest membership and the newest change of batch in n since its ranks last started.
"""
SELECTED = ", ".join(f"{sql} AS {column.name}" for column, sql in _LINE)
_SAID = {"submit_time": "submitted", "start_time": "started", "end_time": "ended"}

JOB_SUMMARY = View(
    "job_summary",
    "One row per job: how long it took, waited and ran, at which sizes, and how it was resized",
    (
        CLUSTER,
        *(
            one
            for column, _ in _LINE
            for one in (column, *([said(_SAID[column.name], column.name)] if column.name in _SAID else []))
        ),
        Column("requested_gpus", "int", "GPUs that the job requested"),
        Column("queueing_s", "float", "submission to first start, seconds"),
        Column("running_s", "float", "length of all its runs, seconds; if it runs, to the newest report or decision"),
        Column("runs", "int", "number of its starts; for a job of blocks, number of its terms"),
        Column("sizes", "text", "shape of each run and membership in order, as in 1x4 > 2x4; unequal nodes as one"),
        Column("smallest_gpus", "int", "fewest GPUs that it trained on"),
        Column("largest_gpus", "int", "most GPUs that it trained on"),
        Column("gpu_hours", "float", "GPU-hours of all its runs; for a job of blocks, of all its blocks"),
    ),
    f"""
    SELECT c.name AS cluster, {SELECTED},
        j.requested_nodes * j.requested_gpus_per_node AS requested_gpus,
        {_STARTED} - j.submit_time AS queueing_s,
        {of_runs(f"SUM(latest(0.0, {UNTIL} - {BEGAN}))")} AS running_s,
        {of_runs("COUNT(*)")} AS runs,
        (SELECT listed(s.shape, ' > ') FROM (SELECT w.nodes || 'x' || w.each AS shape FROM ({SIZES}) w
            ORDER BY w.restart, w.number) s) AS sizes,
        (SELECT MIN(w.gpus) FROM ({SIZES}) w) AS smallest_gpus,
        (SELECT MAX(w.gpus) FROM ({SIZES}) w) AS largest_gpus,
        COALESCE({BLOCK_HOURS},
            {of_runs(f"SUM(COALESCE({TERM_HOURS}, latest(0.0, {UNTIL} - {BEGAN}) * {GPUS} / 3600.0))")}) AS gpu_hours
    FROM clusters c CROSS JOIN {FROM_JOB} WHERE j.cluster_id = c.id""",
    ("submit_time", "job_id"),
)


def stored(table: Table, names: str) -> tuple[Column, ...]:
    """Return columns of a table as columns of a view, with the same meaning."""
    kinds = {BigInteger: "int", Double: "float"}
    columns = (table.c[name] for name in names.split())
    return tuple(Column(one.name, kinds.get(type(one.type), "text"), str(one.comment)) for one in columns)


RUN_TIMELINE = View(
    "run_timeline",
    "One row per run, for timelines: when, where and at which size each job ran",
    (
        *JOB,
        Column("restart", "int", "Slurm's restart count, 0 in the first run; for a job of blocks, the term"),
        Column("nodes", "int", "nodes (for a job of blocks, at the end of the term); 0 if unknown"),
        Column("gpus_per_node", "int", "GPUs per node; 0 if unknown"),
        Column("gpus", "int", "GPUs in all (for a job of blocks, at the end of the term)"),
        *stored(RUNS, "node_list batch"),
        *time_of("start_time", "started", "start"),
        *time_of("end_time", "ended", "end (newest report if Slurm requeued the run; null while the run goes on)"),
        Column("running_s", "float", "length of the run, seconds; if it runs, to the newest report or decision"),
        Column("gpu_hours", "float", "GPU-hours that the run held"),
        *stored(RUNS, "end_reason"),
    ),
    f"""
    SELECT {WHOSE}, r.restart, r.nodes, r.gpus_per_node, {GPUS} AS gpus, r.node_list, r.batch,
        r.start_time, {END} AS end_time, latest(0.0, {UNTIL} - {BEGAN}) AS running_s,
        COALESCE({TERM_HOURS}, latest(0.0, {UNTIL} - {BEGAN}) * {GPUS} / 3600.0) AS gpu_hours, r.end_reason
    {JOBS} CROSS JOIN runs r
    WHERE j.cluster_id = c.id AND r.job_id = j.id AND r.start_time IS NOT NULL""",
    ("start_time", "job_id"),
)

BLOCK_TIMELINE = View(
    "block_timeline",
    "One row per block (a start of its task): when, where and at which size it ran",
    (
        *JOB,
        *stored(BLOCKS, "task restart slurm_id nodes gpus_per_node"),
        Column("gpus", "int", "GPUs in all"),
        *stored(BLOCKS, "node_list"),
        *time_of("start_time", "started", "start"),
        *time_of("end_time", "ended", "end; null while the block runs"),
        Column("running_s", "float", "its length, seconds; if it runs, to the newest report or decision"),
        Column("gpu_hours", "float", "GPU-hours that the block held"),
        *stored(BLOCKS, "state"),
    ),
    f"""
    SELECT {WHOSE}, b.task, b.restart, b.slurm_id, b.nodes, b.gpus_per_node, b.nodes * b.gpus_per_node AS gpus,
        b.node_list, b.start_time, COALESCE(b.end_time, j.end_time) AS end_time,
        latest(0.0, {B_UNTIL} - b.start_time) AS running_s,
        latest(0.0, {B_UNTIL} - b.start_time) * b.nodes * b.gpus_per_node / 3600.0 AS gpu_hours, b.state
    {JOBS} CROSS JOIN blocks b
    WHERE j.cluster_id = c.id AND b.job_id = j.id""",
    ("start_time", "job_id", "task"),
)

MEMBERSHIP_TIMELINE = View(
    "membership_timeline",
    "One row per membership: which blocks of a job trained together, from when to when, and what the change cost",
    (
        *JOB,
        Column("term", "int", "term of the leader: restart in run_timeline"),
        *stored(MEMBERSHIPS, "generation"),
        *time_of("start_time", "started", "start"),
        *time_of("end_time", "ended", "end: start of the next membership or end of the run; null while in force"),
        Column("lasted_s", "float", "time in force, seconds; if it is current, to the newest report or decision"),
        *stored(MEMBERSHIPS, "blocks nodes gpus_per_node"),
        Column("gpus", "int", "GPUs in all"),
        *stored(MEMBERSHIPS, "batch step pause_s bytes transfer_s ready_s why order_number"),
    ),
    f"""
    SELECT {WHOSE}, r.restart AS term, m.generation, m.time AS start_time, COALESCE({M_AFTER}, {END}) AS end_time,
        latest(0.0, {M_UNTIL} - {M_BEGAN}) AS lasted_s, m.blocks, m.nodes, m.gpus_per_node, m.world AS gpus, m.batch,
        m.step, m.pause_s, m.bytes, m.transfer_s, m.ready_s, m.why, m.order_number
    {JOBS} CROSS JOIN runs r CROSS JOIN memberships m
    WHERE j.cluster_id = c.id AND r.job_id = j.id AND m.run_id = r.id AND r.start_time IS NOT NULL""",
    ("start_time", "job_id", "generation"),
)

SCALING = View(
    "scaling",
    "How each job scales on each kind of GPU: throughput and efficiency at each shape and global batch",
    (
        *JOB,
        Column("kind", "text", "kind of the GPUs, several with commas between; empty if it is unknown"),
        Column("nodes", "int", "nodes; one node with all GPUs if the nodes gave unequal numbers"),
        Column("gpus_per_node", "int", "GPUs per node"),
        Column("gpus", "int", "GPUs in all"),
        Column("batch", "int", "global batch, samples"),
        Column("reports", "int", "number of throughput samples; a combined sample counts once"),
        Column("measured_s", "float", "how long it was measured, seconds"),
        Column("samples_per_s", "float", "throughput, samples/s over all ranks"),
        Column("speed_up", "float", "throughput divided by that at the job's smallest shape and batch on this kind"),
        Column("gpu_efficiency", "float", "speed_up for the throughput per GPU: 1 is ideal scaling"),
        Column("statistical_efficiency", "float", "progress per sample relative to the base batch; null without noise"),
        Column("goodput", "float", "throughput times statistical efficiency, samples of the base batch a second"),
    ),
    f"""
    SELECT m.*, m.samples_per_s / FIRST_VALUE(m.samples_per_s) OVER smallest AS speed_up,
        m.samples_per_s / m.gpus / FIRST_VALUE(m.samples_per_s / m.gpus) OVER smallest AS gpu_efficiency,
        m.samples_per_s * m.statistical_efficiency AS goodput
    FROM (
        SELECT {WHOSE}, COALESCE(r.kind, '') AS kind, {T_NODES} AS nodes, {T_EACH} AS gpus_per_node, {T_GPUS} AS gpus,
            t.batch, COUNT(*) AS reports, SUM(t.seconds) AS measured_s,
            SUM(1.0 * t.samples) / SUM(t.seconds) AS samples_per_s,
            SUM(CASE WHEN t.noise > 0 THEN t.seconds * (t.noise + j.base_batch)
                / (t.noise + CASE WHEN t.batch > j.base_batch AND t.batch > COALESCE(j.grown, 0)
                THEN t.batch ELSE j.base_batch END) END)
                / SUM(CASE WHEN t.noise > 0 AND j.base_batch > 0 THEN t.seconds END) AS statistical_efficiency
        {JOBS} CROSS JOIN {SAMPLES}
        WHERE j.cluster_id = c.id AND r.job_id = j.id AND t.run_id = r.id
            AND {T_GPUS} > 0 AND {MEASURED}
        GROUP BY c.name, j.job_id, j.submit_time, j.name, j.user_name, COALESCE(r.kind, ''), {T_NODES}, {T_EACH},
            {T_GPUS}, t.batch
    ) m
    WINDOW smallest AS (PARTITION BY m.cluster, m.job_id, m.submit_time, m.kind ORDER BY m.gpus, m.nodes, m.batch)""",
    ("submit_time", "job_id", "kind", "gpus", "nodes", "batch"),
)

MEMBER = """(SELECT m.{} FROM runs o CROSS JOIN memberships m WHERE o.job_id = z.job_id AND m.run_id = o.id
            AND m.order_number = z.order_number ORDER BY o.restart DESC, m.number DESC LIMIT 1)"""
"""SQL for a column of the membership that a resize z by blocks has caused. Braces stand for the column."""

CHECKPOINT = """(SELECT SUM(k.{}) FROM runs o CROSS JOIN checkpoints k WHERE k.run_id = o.id
            AND o.job_id = z.job_id AND o.restart = z.restart AND k.order_number = z.order_number)"""
"""SQL for the sum of a column over the checkpoints that a resize z ordered. Braces stand for the column."""

RESIZE_COST = View(
    "resize_cost",
    "What each finished resize cost, by phase of the start at the new size",
    (
        *JOB,
        *time_of("start_time", "started", "when the resize was stored"),
        Column("restart", "int", "restart count of the run that the resize ended; -1 if the job waited"),
        Column("old_gpus", "int", "GPUs before"),
        Column("new_gpus", "int", "GPUs after; 0 if the job was parked"),
        *stored(RESIZES, "old_batch new_batch"),
        Column("state", "text", f"state in which it ended; '{RESIZE_DONE}' when it took effect"),
        Column("pause_s", "float", "pause of training: last step before to first report after it, seconds"),
        Column("total_s", "float", "from when the resize was stored to its end, seconds"),
        Column("checkpoint_s", "float", "time to write the checkpoint that the resize ordered, seconds"),
        Column("stall_s", "float", "pause of training for that checkpoint, seconds"),
        *stored(RUNS, "queue_s launch_s import_s group_s load_s first_step_s"),
        Column("attempts", "int", "restarts of the ranks within the new run; times are of the last start"),
        *stored(RESIZES, "mechanism added dropped"),
        *stored(MEMBERSHIPS, "ready_s transfer_s bytes"),
        *stored(RESIZES, "outcome outcome_code outcome_arguments"),
    ),
    f"""
    SELECT {WHOSE}, z.started AS start_time, z.restart, z.old_nodes * z.old_gpus_per_node AS old_gpus,
        z.new_nodes * z.new_gpus_per_node AS new_gpus, z.old_batch, z.new_batch, z.state, z.pause_s,
        z.ended - z.started AS total_s,
        {CHECKPOINT.format("seconds")} AS checkpoint_s, {CHECKPOINT.format("stall_s")} AS stall_s,
        r.queue_s, r.launch_s, r.import_s, r.group_s, r.load_s, r.first_step_s, r.attempts,
        z.mechanism, z.added, z.dropped, {MEMBER.format("ready_s")} AS ready_s,
        {MEMBER.format("transfer_s")} AS transfer_s, {MEMBER.format("bytes")} AS bytes,
        z.outcome, z.outcome_code, z.outcome_arguments
    {JOBS} CROSS JOIN resizes z
    LEFT JOIN runs r ON r.job_id = z.job_id AND r.restart = z.restart + 1 AND z.restart >= 0
        AND z.mechanism = 'requeue' AND NOT EXISTS
        (SELECT 1 FROM resizes later WHERE later.job_id = z.job_id AND later.restart = z.restart AND later.id > z.id)
    WHERE j.cluster_id = c.id AND z.job_id = j.id AND z.ended IS NOT NULL""",
    ("start_time", "job_id"),
)

SPANS = f"""
    SELECT c.name AS cluster, j.user_name, j.account, j.id AS job, {GPUS} AS gpus,
        {BEGAN} AS began, {UNTIL} AS ended
    {JOBS} CROSS JOIN runs r
    WHERE j.cluster_id = c.id AND r.job_id = j.id AND r.start_time IS NOT NULL AND NOT {HAS_BLOCKS}
    UNION ALL SELECT c.name, j.user_name, j.account, j.id, b.nodes * b.gpus_per_node, b.start_time, {B_UNTIL}
    {JOBS} CROSS JOIN blocks b WHERE j.cluster_id = c.id AND b.job_id = j.id"""
"""SELECT of the times in which jobs held GPUs: a row for each run, or for each block of a job of blocks."""

OF_A_DAY = (
    CLUSTER,
    Column("user_name", "text", "owner of the jobs"),
    Column("account", "text", "account they are charged to"),
    Column("day", "day", "the day, as YYYY-MM-DD in UTC"),
    Column("day_time", "time", "when the day began, Unix seconds"),
)
"""First columns of the views with rows by day: cluster, user, account and day."""

GPU_HOURS = View(
    "gpu_hours",
    "Who used the GPUs: GPU-hours by user, account and day (UTC)",
    (
        *OF_A_DAY,
        Column("jobs", "int", "jobs that ran on that day"),
        Column("runs", "int", "runs of these jobs on that day; for jobs of blocks, starts of blocks"),
        Column("gpu_hours", "float", "GPU-hours that these jobs held on that day"),
    ),
    # A run is cut at midnights; of numbers of days there need be no more than the longest run has.
    f"""
    WITH RECURSIVE days(n) AS (
        SELECT CAST(0 AS BIGINT) UNION ALL SELECT n + 1 FROM days
        WHERE n <= (SELECT MAX(s.ended - s.began) FROM ({SPANS}) s) / 86400.0
    )
    SELECT p.cluster, p.user_name, p.account, substr(utc(p.day_time), 1, 10) AS day, p.day_time,
        COUNT(DISTINCT p.job) AS jobs, COUNT(*) AS runs,
        SUM(p.gpus * (earliest(p.ended, p.day_time + 86400.0) - latest(p.began, p.day_time))) / 3600.0 AS gpu_hours
    FROM (
        SELECT s.*, CAST((whole(s.began / 86400.0) + days.n) * 86400 AS DOUBLE PRECISION) AS day_time
        FROM ({SPANS}) s CROSS JOIN days
        WHERE s.ended > s.began AND (whole(s.began / 86400.0) + days.n) * 86400 < s.ended
    ) p
    GROUP BY p.cluster, p.user_name, p.account, p.day_time""",
    ("day_time", "user_name", "account"),
)

IDLE_GPUS = View(
    "idle_gpus",
    "Measured use of the GPUs by user, account and day (UTC)",
    (
        *OF_A_DAY,
        Column("jobs", "int", "jobs whose use was measured on that day"),
        Column("gpu_hours", "float", "GPU-hours of training for which the use was measured"),
        Column("gpu_use", "float", "mean use of the GPUs during gpu_hours, 0 to 1"),
        Column("idle_gpu_hours", "float", "part of gpu_hours in which the measured use was below 0.1"),
        Column("gpu_memory", "int", "highest memory use of a GPU, bytes; null if unknown"),
    ),
    f"""
    SELECT p.cluster, p.user_name, p.account, substr(utc(p.day_time), 1, 10) AS day, p.day_time,
        COUNT(DISTINCT p.job) AS jobs, SUM(p.hours) AS gpu_hours, SUM(p.hours * p.gpu_use) / SUM(p.hours) AS gpu_use,
        SUM(CASE WHEN p.gpu_use < {IDLE_USE} THEN p.hours ELSE 0.0 END) AS idle_gpu_hours,
        MAX(p.gpu_memory) AS gpu_memory
    FROM (
        SELECT c.name AS cluster, j.user_name, j.account, j.id AS job, t.gpu_use, t.gpu_memory,
            CAST(whole(t.time / 86400.0) * 86400 AS DOUBLE PRECISION) AS day_time,
            t.seconds * {T_GPUS} / 3600.0 AS hours
        {JOBS} CROSS JOIN {SAMPLES}
        WHERE j.cluster_id = c.id AND r.job_id = j.id AND t.run_id = r.id AND t.gpu_use IS NOT NULL
            AND {T_GPUS} > 0 AND {MEASURED}
    ) p
    GROUP BY p.cluster, p.user_name, p.account, p.day_time""",
    ("day_time", "user_name", "account"),
)

DECISIONS_EXPLAINED = View(
    "decisions_explained",
    "What each decision gave each job, and why",
    (
        *JOB,
        Column("decision_id", "int", "key of the decision (decisions.id)"),
        *time_of("time", "decided", "when the decision was made"),
        *stored(DECISIONS, "policy mode"),
        Column("action", "text", "waits, starts, keeps, grows, shrinks, moves, parks, or batch (only it changes)"),
        Column("from_gpus", "int", "GPUs it held; null if it waited"),
        Column("gpus", "int", "GPUs it gets; null if it waits"),
        Column("from_batch", "int", "global batch it had, samples"),
        Column("batch", "int", "global batch it gets, samples"),
        *stored(DECISION_JOBS, "reason reason_code reason_arguments"),
        Column("alternatives", "text", "choices, best first, as nodes x GPUs per node / batch; 0x0/0 means wait"),
        Column("acted", "bool", "true if the companion began to carry out the decision"),
        *stored(DECISION_JOBS, "outcome outcome_code outcome_arguments"),
    ),
    f"""
    SELECT {WHOSE}, d.id AS decision_id, d.time, d.policy, d.mode,
        CASE WHEN COALESCE(g.nodes, 0) = 0 THEN CASE WHEN COALESCE(g.from_nodes, 0) = 0 THEN 'waits' ELSE 'parks' END
            WHEN COALESCE(g.from_nodes, 0) = 0 THEN 'starts'
            WHEN g.nodes * g.gpus_per_node > g.from_nodes * g.from_gpus_per_node THEN 'grows'
            WHEN g.nodes * g.gpus_per_node < g.from_nodes * g.from_gpus_per_node THEN 'shrinks'
            WHEN g.nodes <> g.from_nodes THEN 'moves'
            WHEN g.batch <> g.from_batch THEN 'batch' ELSE 'keeps' END AS action,
        g.from_nodes * g.from_gpus_per_node AS from_gpus, g.nodes * g.gpus_per_node AS gpus, g.from_batch, g.batch,
        g.reason, g.reason_code, g.reason_arguments, (SELECT listed(s.size, ' > ') FROM (
            SELECT a.nodes || 'x' || a.gpus_per_node || '/' || a.batch AS size FROM decision_alternatives a
            WHERE a.decision_id = g.decision_id AND a.job_id = g.job_id ORDER BY a.rank) s) AS alternatives,
        CASE WHEN g.acted THEN 1 ELSE 0 END AS acted,
        g.outcome, g.outcome_code, g.outcome_arguments
    {JOBS} CROSS JOIN decision_jobs g CROSS JOIN decisions d
    WHERE j.cluster_id = c.id AND g.job_id = j.id AND d.id = g.decision_id""",
    ("time", "decision_id", "job_id"),
)

WHAT_IF = View(
    "what_if",
    "JCT of each completed job, and the JCT predicted for it at its requested size from its measured throughput",
    (
        *JOB,
        *stored(ALL_JOBS, "requested_nodes requested_gpus_per_node"),
        Column("batch", "int", "global batch in which its first run began, samples"),
        Column("samples", "float", "samples it trained on; samples repeated after a lost checkpoint count once"),
        Column("measured_s", "float", "how long it was measured at the requested shape with this batch, seconds"),
        Column("samples_per_s", "float", "throughput at that shape with this batch, samples/s; null if never measured"),
        Column("wait_s", "float", "submission to the first hello (first queueing and first start), seconds"),
        Column("jct_s", "float", "job completion time, seconds"),
        Column("other_s", "float", "rest of jct_s: all but wait_s, training and pauses of resizes, seconds"),
        Column("predicted_jct_s", "float", "wait_s + samples / samples_per_s + other_s, seconds; null if unknown"),
        Column("speed_up", "float", "predicted_jct_s / jct_s; above 1 if the resizes paid off; null without resizes"),
        Column("resizes", "int", "resizes of the running job that took effect, by requeue or by blocks"),
        Column("by_blocks", "int", "number of these resizes that were by blocks"),
    ),
    f"""
    SELECT p.*, CASE WHEN p.resizes > 0 THEN p.predicted_jct_s / p.jct_s END AS speed_up
    FROM (SELECT o.*, o.wait_s + o.samples / o.samples_per_s + o.other_s AS predicted_jct_s
    FROM (SELECT w.*, latest(0.0, w.jct_s - w.wait_s - w.pause_s
        - w.trained_s * latest(1.0, COALESCE(w.samples, 0.0) / latest(1.0, w.trained_samples))) AS other_s
    FROM (
        SELECT {WHOSE}, j.requested_nodes, j.requested_gpus_per_node, f.batch,
            (SELECT CAST(r.cursor + r.epoch * CASE WHEN j.dataset > 0 THEN 1.0 * j.dataset ELSE
                (SELECT AVG(e.samples) FROM runs o CROSS JOIN epochs e
                    WHERE o.job_id = j.id AND e.run_id = o.id) END AS DOUBLE PRECISION)
                FROM runs r WHERE r.job_id = j.id AND r.epoch IS NOT NULL ORDER BY r.restart DESC LIMIT 1) AS samples,
            (SELECT SUM(t.seconds) {{measured}}) AS measured_s,
            (SELECT SUM(1.0 * t.samples) / SUM(t.seconds) {{measured}}) AS samples_per_s,
            f.hello_time - j.submit_time AS wait_s, j.end_time - j.submit_time AS jct_s,
            {PAUSED} AS pause_s,
            (SELECT COALESCE(SUM(t.seconds), 0.0) {{trained}}) AS trained_s,
            (SELECT COALESCE(SUM(1.0 * t.samples), 0.0) {{trained}}) AS trained_samples,
            ({RESIZED}) AS resizes, ({RESIZED} AND z.mechanism = 'blocks') AS by_blocks
        {JOBS} CROSS JOIN runs f
        WHERE j.cluster_id = c.id AND f.job_id = j.id AND f.restart = 0
            AND j.state = 'COMPLETED' AND j.end_time > j.submit_time
    ) w) o) p""".format(
        trained="FROM runs r CROSS JOIN throughput t WHERE r.job_id = j.id AND t.run_id = r.id",
        measured=f"""FROM {SAMPLES} WHERE r.job_id = j.id AND t.run_id = r.id
                AND {T_NODES} = j.requested_nodes AND {T_EACH} = j.requested_gpus_per_node
                AND t.batch = f.batch AND {MEASURED}""",
    ),
    ("submit_time", "job_id"),
)

SIZE_LIMITS = View(
    "size_limits",
    "What the training strategy of each job can do at each number of GPUs, as the job reported it",
    (
        *JOB,
        Column("strategy", "text", "the strategy's name"),
        Column("gpus", "int", "GPUs"),
        *(Column(name, "int", comment) for name, comment in OF_SIZES.items()),
    ),
    f"""
    SELECT {WHOSE}, j.strategy, member(s.value, '$.gpus') AS gpus,
        {", ".join(f"member(s.value, '$.{name}') AS {name}" for name in OF_SIZES)}
    {JOBS} CROSS JOIN sizes_of(j.limits) s
    WHERE j.cluster_id = c.id AND j.limits IS NOT NULL""",
    ("submit_time", "job_id", "gpus"),
)

VIEWS: dict[str, View] = {view.name: view for view in [*globals().values()] if isinstance(view, View)}
"""All views above by name."""
