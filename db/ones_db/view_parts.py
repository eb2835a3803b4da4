"""What views are made of: columns that many of them have, and the SQL of what several of them tell."""

from __future__ import annotations

from ones_db.view import Column

END = """COALESCE(r.end_time, CASE WHEN j.restart > r.restart THEN COALESCE(r.report_time, r.start_time) END,
        j.end_time)"""
"""When a run r of a job j ended; null while it goes on. Of one that Slurm requeued, its newest report is the nearest
that is known."""

UNTIL = f"""COALESCE({END}, latest(r.start_time, COALESCE(r.report_time, r.start_time),
        COALESCE((SELECT MAX(look.time) FROM decisions look WHERE look.cluster_id = j.cluster_id), r.start_time)))"""
"""Up to when a run counts. One that goes on counts to its newest report or the companion's last decision, not to the
clock: of a database that was copied, or whose companion is stopped, nobody knows more."""

BEGAN = "latest(r.start_time, j.submit_time)"
"""From when a run counts. A run that no snapshot saw has its start from a job's own report, which may say anything."""

JOBS = "FROM clusters c CROSS JOIN jobs j"

GPUS = "CASE WHEN r.nodes < 1000000 AND r.gpus_per_node < 1000000 THEN r.nodes * r.gpus_per_node ELSE 0 END"
"""GPUs of a run; its shape too may be a job's own word."""

CLUSTER = Column("cluster", "text", "the cluster's name")
JOB = (
    CLUSTER,
    Column("job_id", "int", "Slurm's job id"),
    Column("submit_time", "time", "first submission, Unix seconds; tells jobs apart that had the same id"),
)
WHO = (Column("name", "text", "name of the job"), Column("user_name", "text", "its owner"))
WHOSE = "c.name AS cluster, j.job_id, j.submit_time, j.name, j.user_name"


def time_of(name: str, comment: str) -> Column:
    return Column(name, "time", f"{comment}, Unix seconds")


def said(name: str, of: str) -> Column:
    return Column(name, "said", f"{of} as text, UTC", of)


def of_runs(what: str) -> str:
    """Of the runs of the job j that began."""
    return f"(SELECT {what} FROM runs r WHERE r.job_id = j.id AND r.start_time IS NOT NULL)"


M_GPUS = "CASE WHEN m.world < 1000000 THEN m.world ELSE 0 END"
"""GPUs of a membership m."""

M_NODES = "CASE WHEN m.gpus_per_node > 0 THEN m.nodes ELSE 1 END"
"""Nodes of a membership m; one node with all GPUs stands for nodes that give unequally many."""

M_EACH = f"CASE WHEN m.gpus_per_node > 0 THEN m.gpus_per_node ELSE {M_GPUS} END"

M_AFTER = (
    "(SELECT n.time FROM memberships n WHERE n.run_id = m.run_id AND n.number > m.number ORDER BY n.number LIMIT 1)"
)
"""When the membership after m began; null for the last of a run."""

M_BEGAN = f"""CASE WHEN EXISTS (SELECT 1 FROM memberships n WHERE n.run_id = m.run_id AND n.number < m.number)
        THEN latest(m.time, {BEGAN}) ELSE {BEGAN} END"""
"""From when a membership m of a run r of a job j counts: the first of a run from the run's start."""

M_UNTIL = f"earliest(COALESCE({M_AFTER}, {UNTIL}), {UNTIL})"

TERM_HOURS = f"""(SELECT SUM(latest(0.0, {M_UNTIL} - {M_BEGAN}) * {M_GPUS}) / 3600.0
        FROM memberships m WHERE m.run_id = r.id)"""
"""GPU-hours of a run r whose blocks changed; null of any other."""

SAMPLES = """runs r CROSS JOIN throughput t LEFT JOIN memberships m ON m.run_id = t.run_id AND m.number =
        (SELECT MAX(n.number) FROM memberships n WHERE n.run_id = t.run_id AND n.number < t.number)"""
"""Throughput samples t of runs r, with the membership m that was in force, if there was one."""

T_NODES = f"CASE WHEN m.number IS NULL THEN r.nodes ELSE {M_NODES} END"
T_EACH = f"CASE WHEN m.number IS NULL THEN r.gpus_per_node ELSE {M_EACH} END"
T_GPUS = f"CASE WHEN m.number IS NULL THEN {GPUS} ELSE {M_GPUS} END"
"""The size at which such a sample was measured."""

MEASURED = """t.seconds > 1e-6 AND t.samples > 0
            AND (m.number IS NULL OR t.time - 0.9 * t.seconds >= m.time)"""
"""Of throughput samples: those that measure a throughput, whatever a job reports, and in which no blocks changed. Where
numbers overflow databases fail, and then for everybody: hence also sums of numbers with a point."""

SIZES = f"""SELECT r.restart, 0 AS number, r.nodes AS nodes, r.gpus_per_node AS each, {GPUS} AS gpus FROM runs r
            WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND r.nodes > 0
                AND NOT EXISTS (SELECT 1 FROM memberships m WHERE m.run_id = r.id)
            UNION ALL SELECT r.restart, m.number, {M_NODES}, {M_EACH}, {M_GPUS} FROM runs r CROSS JOIN memberships m
            WHERE r.job_id = j.id AND r.start_time IS NOT NULL AND m.run_id = r.id"""
"""The sizes of a job j: of its runs, and of its memberships where it has any."""

HAS_BLOCKS = "EXISTS (SELECT 1 FROM blocks b WHERE b.job_id = j.id)"

B_UNTIL = """COALESCE(b.end_time, j.end_time, latest(b.start_time,
        COALESCE((SELECT MAX(r.report_time) FROM runs r WHERE r.job_id = j.id), b.start_time),
        COALESCE((SELECT MAX(look.time) FROM decisions look WHERE look.cluster_id = j.cluster_id), b.start_time)))"""
"""Up to when a block b of a job j counts, as `UNTIL` for runs."""

BLOCK_HOURS = f"""(SELECT SUM(latest(0.0, {B_UNTIL} - b.start_time) * b.nodes * b.gpus_per_node) / 3600.0
        FROM blocks b WHERE b.job_id = j.id)"""
"""GPU-hours of the blocks of a job j; null of a job without any."""

OF_SIZES = {
    "replicas": "parts into which the samples of a step are split",
    "quantum": "global batches are multiples of this, samples",
    "together": "so many consecutive ranks share a node",
    "fixed_bytes": "memory of a GPU that no sample takes; 0 where it is not known",
    "sample_bytes": "memory of a GPU for each sample of a replica's local batch; 0 where it is not known",
    "replica_bytes": "sent by a rank in an optimizer step within its replica, for each sample of the local batch",
    "data_bytes": "sent by a rank in an optimizer step between replicas",
}
"""What a strategy says of each number of GPUs, as it is called in the column `limits` of a job."""
