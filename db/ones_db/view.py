"""Definition of a view, SQL that both databases take, and parts of SQL that several views share.

The SQL of `ones_db.views` has a few functions of its own, which are replaced here by each database's spelling:
``utc(x)`` (Unix seconds as text), ``whole(x)`` (rounded down, for x of at least 0), ``latest(a, b)`` and ``earliest(a,
b)``. ``listed(x, separator)`` is an aggregate that joins texts in the order of its input. ``sizes_of(x)`` is a table of
the members of the list `sizes` in a JSON text x. ``member(value, '$.name')`` is a whole number in such a member.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ones_db.records import RESIZE_DONE

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
"""Each database's spelling of the functions in this module's description; braces stand for the arguments."""

_WORD = re.compile(rf"\b({'|'.join(WORDS['sqlite'])})\(")


KINDS = {"int": "whole number", "float": "number", "text": "text", "bool": "0 or 1", "time": "Unix seconds"}
KINDS |= {"said": "text", "day": "text"}
"""Kinds of a view's column or a query's parameter, each in words for documents."""


@dataclass(frozen=True)
class Column:
    """A column of a view."""

    name: str
    kind: str
    """A key of `KINDS`; ``day`` is YYYY-MM-DD in UTC, and ``said`` is another column's time as text in UTC."""
    comment: str
    """Meaning and unit."""
    of: str = ""
    """Column whose time a column of kind ``said`` gives as text; else empty."""


@dataclass(frozen=True)
class View:
    """A view of the database, for documents, pandas frames and the databases themselves."""

    name: str
    title: str
    """Content of the view, in a sentence without a full stop."""
    columns: tuple[Column, ...]
    sql: str
    """SELECT of all columns except those of kind ``said``, with the functions of `WORDS`."""
    order: tuple[str, ...]
    """Columns by which readers sort the rows."""
    aggregate: bool = False
    """True if the rows are about no single job, so that everybody may see all rows."""

    def select(self, dialect: str) -> str:
        """Return the view's SELECT in a dialect: ``sqlite`` or ``postgresql``."""
        columns = ", ".join(f"utc(v.{c.of}) AS {c.name}" if c.of else f"v.{c.name}" for c in self.columns)
        return spelled(f"SELECT {columns} FROM ({self.sql}) v", dialect)


def spelled(sql: str, dialect: str) -> str:
    """Return the SQL with each function of `WORDS` in the dialect's spelling."""
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
    """Return SQL for the end of a run (an alias of runs) of a job (an alias of jobs); null while the run goes on. A
    requeued run without a known end ends at its newest report."""
    reported = f"COALESCE({run}.report_time, {run}.start_time)"
    return f"COALESCE({run}.end_time, CASE WHEN {job}.restart > {run}.restart THEN {reported} END, {job}.end_time)"


END = end_of("r", "j")

UNTIL = f"""COALESCE({END}, latest(r.start_time, COALESCE(r.report_time, r.start_time),
        COALESCE((SELECT MAX(look.time) FROM decisions look WHERE look.cluster_id = j.cluster_id), r.start_time)))"""
"""SQL for the time until which a run r of a job j counts. A run that goes on counts until its newest report or the
companion's last decision, not until now: a copied database, or one whose companion stopped, knows no later time."""

BEGAN = "latest(r.start_time, j.submit_time)"
"""SQL for the time from which run r of job j is counted: its start, and no earlier than the job's submission. A start
that no snapshot showed is the job's own claim, and is not trusted."""

JOBS = "FROM clusters c CROSS JOIN jobs j"

OBSERVED = "NOT EXISTS (SELECT 1 FROM accounting a WHERE a.job_id = j.id)"
"""SQL condition on a job j: a companion has seen the job, so that it is not only from accounting."""

GPUS = "CASE WHEN r.nodes < 1000000 AND r.gpus_per_node < 1000000 THEN r.nodes * r.gpus_per_node ELSE 0 END"
"""SQL for the GPUs of a run r; 0 for an absurd shape, since the job itself may have reported the shape."""

CLUSTER = Column("cluster", "text", "the cluster's name")
JOB = (
    CLUSTER,
    Column("job_id", "int", "Slurm's job id"),
    Column("submit_time", "time", "first submission, Unix seconds; tells jobs apart that had the same id"),
)
WHO = (Column("name", "text", "name of the job"), Column("user_name", "text", "its owner"))
WHOSE = "c.name AS cluster, j.job_id, j.submit_time, j.name, j.user_name"


def time_of(name: str, text: str, comment: str) -> tuple[Column, Column]:
    """Return the columns of a time, in Unix seconds and, under the name `text`, as text."""
    return Column(name, "time", f"{comment}, Unix seconds"), said(text, name)


def said(name: str, of: str) -> Column:
    return Column(name, "said", f"{of} as text, UTC", of)


def of_runs(what: str) -> str:
    """Return a subquery of this expression over the runs r of the job j that began."""
    return f"(SELECT {what} FROM runs r WHERE r.job_id = j.id AND r.start_time IS NOT NULL)"


M_GPUS = "CASE WHEN m.world < 1000000 THEN m.world ELSE 0 END"
"""SQL for the GPUs of a membership m; 0 for an absurd number."""

M_NODES = "CASE WHEN m.gpus_per_node > 0 THEN m.nodes ELSE 1 END"
"""SQL for the nodes of a membership m; one node with all GPUs stands for nodes that give unequally many."""

M_EACH = f"CASE WHEN m.gpus_per_node > 0 THEN m.gpus_per_node ELSE {M_GPUS} END"

M_AFTER = (
    "(SELECT n.time FROM memberships n WHERE n.run_id = m.run_id AND n.number > m.number ORDER BY n.number LIMIT 1)"
)
"""SQL for the start of the membership after m; null for the last membership of a run."""

MOST_MEMBERSHIPS = 6
"""Newest memberships of a run in the file that a user sees."""

M_BEGAN = f"""CASE WHEN
            (m.why <> 'first' AND (SELECT COUNT(*) FROM memberships n WHERE n.run_id = m.run_id) >= {MOST_MEMBERSHIPS})
            OR EXISTS (SELECT 1 FROM memberships n WHERE n.run_id = m.run_id AND n.number < m.number)
        THEN latest(m.time, {BEGAN}) ELSE {BEGAN} END"""
"""SQL for the time from which a membership m of run r of job j counts. The first counts from the run's start; in a
user's file the earliest may not be the first."""

M_UNTIL = f"earliest(COALESCE({M_AFTER}, {UNTIL}), {UNTIL})"

TERM_HOURS = f"""(SELECT SUM(latest(0.0, {M_UNTIL} - {M_BEGAN}) * {M_GPUS}) / 3600.0
        FROM memberships m WHERE m.run_id = r.id)"""
"""SQL for the GPU-hours of a run r that has memberships; null for any other run."""

SAMPLES = """runs r CROSS JOIN throughput t LEFT JOIN memberships m ON m.run_id = t.run_id AND m.number =
        (SELECT MAX(n.number) FROM memberships n WHERE n.run_id = t.run_id AND n.number < t.number)"""
"""FROM clause of throughput samples t of runs r, each with the membership m in force, or nulls without any."""

T_NODES = f"CASE WHEN m.number IS NULL THEN r.nodes ELSE {M_NODES} END"
T_EACH = f"CASE WHEN m.number IS NULL THEN r.gpus_per_node ELSE {M_EACH} END"
T_GPUS = f"CASE WHEN m.number IS NULL THEN {GPUS} ELSE {M_GPUS} END"
"""SQL for nodes, GPUs per node and GPUs at which a sample of `SAMPLES` was measured."""

LEAST_S, WITHIN, IDLE_USE = 1e-6, 0.9, 0.1
"""Shortest sample, seconds; share of a sample after a change of blocks; use of GPUs below which they idle."""

MEASURED = f"""t.seconds > {LEAST_S} AND t.samples > 0
            AND (m.number IS NULL OR t.time - {WITHIN} * t.seconds >= m.time)"""
"""SQL condition on samples of `SAMPLES`: time and samples are above zero, and no blocks changed during the sample. An
overflow would fail the view for everybody; hence views also sum floats in place of whole numbers."""

SIZES = f"""SELECT r.restart, 0 AS number, r.nodes AS nodes, r.gpus_per_node AS each, {GPUS} AS gpus FROM runs r
            WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND r.nodes > 0
                AND NOT EXISTS (SELECT 1 FROM memberships m WHERE m.run_id = r.id)
            UNION ALL SELECT r.restart, m.number, {M_NODES}, {M_EACH}, {M_GPUS} FROM runs r CROSS JOIN memberships m
            WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND m.run_id = r.id"""
"""SELECT of the sizes of a job j: of each membership, and of each run without memberships."""

RESIZED = f"""SELECT COUNT(*) FROM resizes z WHERE z.job_id = j.id AND z.state = '{RESIZE_DONE}'
            AND z.ended IS NOT NULL AND z.restart >= 0"""
"""SELECT of the number of resizes that took effect while a job j ran; a condition on the resize z may follow."""

HAS_BLOCKS = "EXISTS (SELECT 1 FROM blocks b WHERE b.job_id = j.id)"

B_UNTIL = """COALESCE(b.end_time, j.end_time, latest(b.start_time,
        COALESCE((SELECT MAX(r.report_time) FROM runs r WHERE r.job_id = j.id), b.start_time),
        COALESCE((SELECT MAX(look.time) FROM decisions look WHERE look.cluster_id = j.cluster_id), b.start_time)))"""
"""SQL for the time until which a block b of a job j counts, like `UNTIL` for runs."""

BLOCK_HOURS = f"""(SELECT SUM(latest(0.0, {B_UNTIL} - b.start_time) * b.nodes * b.gpus_per_node) / 3600.0
        FROM blocks b WHERE b.job_id = j.id)"""
"""SQL for the GPU-hours of all blocks of a job j; null for a job without blocks."""

OF_SIZES = {
    "replicas": "parts into which the samples of a step are split",
    "quantum": "global batches are multiples of this, samples",
    "together": "number of consecutive ranks that share a node",
    "fixed_bytes": "memory of a GPU that no sample takes; 0 if it is not known",
    "sample_bytes": "memory of a GPU for each sample of a replica's local batch; 0 if it is not known",
    "replica_bytes": "sent by a rank in an optimizer step within its replica, for each sample of the local batch",
    "data_bytes": "sent by a rank in an optimizer step between replicas",
}
"""Meaning of each figure of a strategy at a number of GPUs, by its name in the column `limits` of a job."""
