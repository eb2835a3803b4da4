"""Definitions of the views.

Every view joins clusters, their jobs by the index on cluster and job id, and then other tables by indexes on the job.
``CROSS JOIN`` holds SQLite to that order; PostgreSQL chooses an order itself. So to read one job costs as much as that
job's rows, however many jobs there are. Conditions on cluster, job_id and submit_time reach the innermost tables of
every view with these columns, also of a view that groups.

Views hold no rows, so no migration changes views. Each upgrade drops all views first, since SQLite renames no table
under a view, and creates all views at its end.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Connection, Double, Table, inspect

from ones_db.records import RESIZE_DONE
from ones_db.summary import JOB_SUMMARY
from ones_db.tables import BLOCKS, DECISIONS, MEMBERSHIPS, RESIZES, RUNS
from ones_db.view import (
    B_UNTIL,
    BEGAN,
    CLUSTER,
    END,
    GPUS,
    HAS_BLOCKS,
    IDLE_USE,
    JOB,
    JOBS,
    M_AFTER,
    M_BEGAN,
    M_UNTIL,
    MEASURED,
    OF_SIZES,
    RESIZED,
    SAMPLES,
    T_EACH,
    T_GPUS,
    T_NODES,
    TERM_HOURS,
    UNTIL,
    WHO,
    WHOSE,
    Column,
    View,
    time_of,
)


def stored(table: Table, names: str) -> tuple[Column, ...]:
    """Return columns of a table as columns of a view, with the meaning that the table gives them."""
    kinds = {BigInteger: "int", Double: "float"}
    columns = (table.c[name] for name in names.split())
    return tuple(Column(one.name, kinds.get(type(one.type), "text"), str(one.comment)) for one in columns)


RUN_TIMELINE = View(
    "run_timeline",
    "One row a run, for timelines: when, where and at which size each job ran",
    (
        *JOB,
        *WHO,
        Column("restart", "int", "Slurm's restart count, 0 in the first run; of a job of blocks the term"),
        Column("nodes", "int", "nodes, of a job of blocks at its end; 0 if not known"),
        Column("gpus_per_node", "int", "GPUs per node; 0 if not known"),
        Column("gpus", "int", "GPUs in all, of a job of blocks at its end"),
        *stored(RUNS, "node_list batch"),
        *time_of("start_time", "started", "start"),
        *time_of("end_time", "ended", "end; of a run that Slurm requeued, its newest report; null while it goes on"),
        Column("running_s", "float", "its length, seconds; of a run that goes on, as far as is known"),
        Column("gpu_hours", "float", "its length times its GPUs at each time, GPU-hours"),
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
    "One row a start of a block: when, where and at which size the blocks of a job ran",
    (
        *JOB,
        *WHO,
        *stored(BLOCKS, "task restart slurm_id nodes gpus_per_node"),
        Column("gpus", "int", "GPUs in all"),
        *stored(BLOCKS, "node_list"),
        *time_of("start_time", "started", "start"),
        *time_of("end_time", "ended", "end; null while it goes on"),
        Column("running_s", "float", "its length, seconds; of a block that goes on, as far as is known"),
        Column("gpu_hours", "float", "its length times its GPUs, GPU-hours"),
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
    "One row a membership: which blocks of a job trained together, from when to when, and what the change cost",
    (
        *JOB,
        *WHO,
        Column("term", "int", "term of the leader; the run's restart"),
        *stored(MEMBERSHIPS, "generation"),
        *time_of("start_time", "started", "from when"),
        *time_of("end_time", "ended", "to when: the next one, or the run's end; null while it is in force"),
        Column("lasted_s", "float", "its length, seconds; of one that is in force, as far as is known"),
        *stored(MEMBERSHIPS, "blocks nodes gpus_per_node"),
        Column("gpus", "int", "GPUs in all"),
        Column("batch", "int", "global batch, samples"),
        Column("step", "int", "optimizer steps since the job's first run, at its beginning"),
        Column("pause_s", "float", "last step before to the end of the first after it, less a usual step, seconds"),
        *stored(MEMBERSHIPS, "bytes transfer_s ready_s why"),
        Column("order_number", "int", "order that asked for it; null if the job changed by itself"),
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
    "How each job scales: throughput and efficiency at each shape and global batch, and the speed-up over its smallest",
    (
        *JOB,
        *WHO,
        Column("nodes", "int", "nodes; one node with all GPUs stands for blocks on nodes that give unequally many"),
        Column("gpus_per_node", "int", "GPUs per node"),
        Column("gpus", "int", "GPUs in all"),
        Column("batch", "int", "global batch, samples"),
        Column("reports", "int", "throughput samples that it is measured from, rolled-up ones counted once"),
        Column("measured_s", "float", "how long it was measured, seconds"),
        Column("samples_per_s", "float", "throughput, samples/s over all ranks"),
        Column("speed_up", "float", "throughput over that of the job's smallest shape and batch"),
        Column("gpu_efficiency", "float", "throughput per GPU over that of the job's smallest shape and batch"),
        Column("statistical_efficiency", "float", "progress per sample relative to the base batch; null without noise"),
        Column("goodput", "float", "throughput times statistical efficiency, samples of the base batch a second"),
    ),
    f"""
    SELECT m.*, m.samples_per_s / FIRST_VALUE(m.samples_per_s) OVER smallest AS speed_up,
        m.samples_per_s / m.gpus / FIRST_VALUE(m.samples_per_s / m.gpus) OVER smallest AS gpu_efficiency,
        m.samples_per_s * m.statistical_efficiency AS goodput
    FROM (
        SELECT {WHOSE}, {T_NODES} AS nodes, {T_EACH} AS gpus_per_node, {T_GPUS} AS gpus, t.batch, COUNT(*) AS reports,
            SUM(t.seconds) AS measured_s, SUM(1.0 * t.samples) / SUM(t.seconds) AS samples_per_s,
            SUM(CASE WHEN t.noise > 0 THEN t.seconds * (t.noise + j.base_batch)
                / (t.noise + CASE WHEN t.batch > j.base_batch AND t.batch > COALESCE(j.grown, 0)
                THEN t.batch ELSE j.base_batch END) END)
                / SUM(CASE WHEN t.noise > 0 AND j.base_batch > 0 THEN t.seconds END) AS statistical_efficiency
        {JOBS} CROSS JOIN {SAMPLES}
        WHERE j.cluster_id = c.id AND r.job_id = j.id AND t.run_id = r.id
            AND {T_GPUS} > 0 AND {MEASURED}
        GROUP BY c.name, j.job_id, j.submit_time, j.name, j.user_name, {T_NODES}, {T_EACH}, {T_GPUS}, t.batch
    ) m
    WINDOW smallest AS (PARTITION BY m.cluster, m.job_id, m.submit_time ORDER BY m.gpus, m.nodes, m.batch)""",
    ("submit_time", "job_id", "gpus", "nodes", "batch"),
)

MEMBER = """(SELECT m.{} FROM runs o CROSS JOIN memberships m WHERE o.job_id = z.job_id AND m.run_id = o.id
            AND m.order_number = z.order_number ORDER BY o.restart DESC, m.number DESC LIMIT 1)"""
"""SQL for a column of the membership that a resize z by blocks brought about; braces stand for the column."""

CHECKPOINT = """(SELECT SUM(k.{}) FROM runs o CROSS JOIN checkpoints k WHERE k.run_id = o.id
            AND o.job_id = z.job_id AND o.restart = z.restart AND k.order_number = z.order_number)"""
"""SQL for the sum of a column of the checkpoints that a resize z ordered; braces stand for the column."""

RESIZE_COST = View(
    "resize_cost",
    "What each finished resize cost, by phase of the start at the new size",
    (
        *JOB,
        *WHO,
        *time_of("start_time", "started", "when it was written down"),
        Column("restart", "int", "restart count of the run that it left; -1 if the job waited"),
        Column("old_gpus", "int", "GPUs before"),
        Column("new_gpus", "int", "GPUs after; 0 if the job was parked"),
        *stored(RESIZES, "old_batch new_batch"),
        Column("state", "text", f"state in which it ended; '{RESIZE_DONE}' when it took effect"),
        Column("pause_s", "float", "from the last step before to the first report after it, seconds"),
        Column("total_s", "float", "from its writing down to its end, seconds"),
        Column("checkpoint_s", "float", "to write the checkpoint that its order asked for, seconds"),
        Column("stall_s", "float", "pause of training for that checkpoint, seconds"),
        *stored(RUNS, "queue_s launch_s import_s group_s load_s first_step_s"),
        Column("attempts", "int", "restarts of the ranks within the new run; times are of the last start"),
        Column("mechanism", "text", "requeue, or blocks: blocks joined and left while it trained"),
        Column("added", "text", "of blocks: task:nodesxGPUs of those that were to join"),
        Column("dropped", "text", "of blocks: tasks of those that were to leave"),
        Column("ready_s", "float", "of blocks: until the last new one was ready, training going on, seconds"),
        Column("transfer_s", "float", "of blocks: what sending them the state took of the pause, seconds"),
        Column("bytes", "int", "of blocks: state that was sent, bytes"),
        Column("outcome", "text", "what came of it, in words"),
        Column("outcome_code", "text", "code of the outcome"),
        Column("outcome_arguments", "text", "what the outcome names, as a JSON object"),
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
"""SELECT of the time spans in which runs held GPUs; for a job of blocks, the spans of its blocks."""

OF_A_DAY = (
    CLUSTER,
    Column("user_name", "text", "owner of the jobs"),
    Column("account", "text", "account they are charged to"),
    Column("day", "day", "the day, as YYYY-MM-DD in UTC"),
    Column("day_time", "time", "when the day began, Unix seconds"),
)
"""First columns of a view by day: cluster, user, account and day."""

GPU_HOURS = View(
    "gpu_hours",
    "Who used the GPUs: GPU-hours by user, account and day (UTC)",
    (
        *OF_A_DAY,
        Column("jobs", "int", "jobs that ran on that day"),
        Column("runs", "int", "runs of theirs on that day; of jobs of blocks, starts of blocks"),
        Column("gpu_hours", "float", "GPU-hours that they held; of runs that go on, as far as is known"),
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
    aggregate=True,
)

IDLE_GPUS = View(
    "idle_gpus",
    "How much of their GPUs jobs used, as far as that was measured: by user, account and day (UTC)",
    (
        *OF_A_DAY,
        Column("jobs", "int", "jobs whose use was measured on that day"),
        Column("gpu_hours", "float", "GPU-hours of training for which it was measured"),
        Column("gpu_use", "float", "mean share of these in which the GPUs were in use"),
        Column("idle_gpu_hours", "float", "of these the GPU-hours of reports that used less than a tenth"),
        Column("gpu_memory", "int", "most memory in use of a GPU, bytes; null if it is unknown"),
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
    aggregate=True,
)

DECISIONS_EXPLAINED = View(
    "decisions_explained",
    "What each decision gave each job, and why",
    (
        *JOB,
        *WHO,
        Column("decision_id", "int", "the decision"),
        *time_of("time", "decided", "when it was made"),
        *stored(DECISIONS, "policy mode"),
        Column("action", "text", "waits, starts, keeps, grows, shrinks, moves, parks or batch (only that changes)"),
        Column("from_gpus", "int", "GPUs it held; null if it waited"),
        Column("gpus", "int", "GPUs it gets; null if it waits"),
        Column("from_batch", "int", "global batch it had, samples"),
        Column("batch", "int", "global batch it gets, samples"),
        Column("reason", "text", "why, in words for its user"),
        Column("reason_code", "text", "code of the reason"),
        Column("reason_arguments", "text", "what the reason names, as a JSON object"),
        Column("alternatives", "text", "what was weighed, best first, as nodes x GPUs per node / batch; 0x0/0 waits"),
        Column("acted", "bool", "the companion set out to carry it out"),
        Column("outcome", "text", "what came of it, in words"),
        Column("outcome_code", "text", "code of the outcome"),
        Column("outcome_arguments", "text", "what the outcome names, as a JSON object"),
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
    "JCT of each completed job, against what it would have been at the requested size by the job's own measurement",
    (
        *JOB,
        *WHO,
        Column("requested_nodes", "int", "nodes it asked for"),
        Column("requested_gpus_per_node", "int", "GPUs per node it asked for"),
        Column("batch", "int", "global batch in which its first run began, samples"),
        Column("samples", "float", "samples it used, those repeated after a lost checkpoint counted once"),
        Column("measured_s", "float", "how long it was measured at the requested shape in that batch, seconds"),
        Column("samples_per_s", "float", "throughput there, samples/s; null if it was never measured there"),
        Column("wait_s", "float", "submission to the first hello, as it was: first queueing and first start, seconds"),
        Column("jct_s", "float", "job completion time, seconds"),
        Column("other_s", "float", "jct_s without wait_s, training and resizes: first step, evaluation, end; seconds"),
        Column(
            "predicted_jct_s",
            "float",
            "wait_s + samples / samples_per_s + other_s, seconds; null if not known",
        ),
        Column("speed_up", "float", "predicted_jct_s / jct_s: above 1 the resizes repaid; null if there were none"),
        Column("resizes", "int", "resizes while it ran that took effect, by requeue or by blocks"),
        Column("by_blocks", "int", "those of them by blocks"),
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
            (SELECT COALESCE(SUM(z.pause_s), 0.0) FROM resizes z WHERE z.job_id = j.id) AS pause_s,
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
    "What the training strategy of each job can do at each number of GPUs, by its own word",
    (
        *JOB,
        *WHO,
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

VIEWS = {
    view.name: view
    for view in (
        JOB_SUMMARY,
        RUN_TIMELINE,
        BLOCK_TIMELINE,
        MEMBERSHIP_TIMELINE,
        SCALING,
        RESIZE_COST,
        GPU_HOURS,
        IDLE_GPUS,
        DECISIONS_EXPLAINED,
        WHAT_IF,
        SIZE_LIMITS,
    )
}
"""All views by name."""


def drop_views(connection: Connection) -> None:
    """Drop the views of `VIEWS` from the database, so that tables can be changed."""
    there = set(inspect(connection).get_view_names())
    for name in VIEWS:
        if name in there:
            connection.exec_driver_sql(f"DROP VIEW {name}")


def create_views(connection: Connection) -> None:
    """Create all views in a database of the newest schema without views."""
    dialect = connection.dialect.name
    for view in VIEWS.values():
        connection.exec_driver_sql(f"CREATE VIEW {view.name} AS {view.select(dialect)}")
