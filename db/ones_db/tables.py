"""Definitions of all tables, in SQLAlchemy Core without ORM classes.

Every column has a comment with its meaning and unit, from which docs/tables.md is made. Types exist in all databases.
The key of a job is (cluster, job id, submission), because Slurm uses job ids again. A run's key is (job, restart
count), and a report's key is (run, number). So a report that is stored twice changes nothing. Add a new column at the
end of its table, and in a migration.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
)
from sqlalchemy import text as condition
from sqlalchemy.types import TypeDecorator

SCHEMA_REVISION = "0019"
"""Newest schema revision. It has four digits, so that comparing two revisions as text shows which is older."""

METADATA = MetaData(
    # Names of keys that migrations can rely on.
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# A word for each kind of column

WHOLE = BigInteger().with_variant(Integer(), "sqlite")
"""Integer of 64 bits. In SQLite it is INTEGER, which has 64 bits too and is the only type with generated keys."""


def storable(value: str) -> str:
    """Return text from users, Slurm or jobs in a form that every database can store.

    Bytes that are no text (lone surrogates) become escapes, and so do NUL characters, which PostgreSQL refuses.
    Otherwise one odd job name could keep a whole snapshot out of the database.
    """
    value = value.replace("\0", "\\x00")
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


class SafeText(TypeDecorator[str]):
    """Type of text columns. `storable` is applied to all values."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


def column(kind: Any, name: str, comment: str, *also: Any, nullable: bool = False, **options: Any) -> Column[Any]:
    return Column(name, kind, *also, nullable=nullable, comment=comment, **options)


whole, number, text, flag = (partial(column, kind) for kind in (WHOLE, Double, SafeText, Boolean))


def key() -> Column[Any]:
    return whole("id", "key of the row", primary_key=True)


def of(name: str, target: str, comment: str, **options: Any) -> Column[Any]:
    """Return a column with a foreign key."""
    return whole(name, comment, ForeignKey(target), autoincrement=False, **options)


def table(name: str, comment: str, *items: Any) -> Table:
    """Return a table of the schema. In SQLite, a table without a column `id` is stored in the order of its key."""
    own = any(isinstance(item, Column) and item.name == "id" for item in items)
    return Table(name, METADATA, *items, comment=comment, sqlite_with_rowid=own)


def reason(name: str) -> tuple[Column[Any], Column[Any]]:
    """Return the columns for a reason's code and arguments. Its sentence is in a column that is declared separately."""
    return (
        text(f"{name}_code", f"code of {name}, which does not change with its arguments", server_default=""),
        text(f"{name}_arguments", f"arguments of {name}'s sentence, as a JSON object", server_default="{}"),
    )


_OPEN = condition("ended IS NULL")

# Clusters, their jobs and runs

CLUSTERS = table(
    "clusters",
    "Slurm clusters in this database",
    key(),
    text("name", "the cluster's name, as Slurm has it", unique=True),
)

JOBS = table(
    "jobs",
    "jobs; Slurm uses a job id again once it has used all ids",
    key(),
    of("cluster_id", "clusters.id", "cluster"),
    whole("job_id", "Slurm's job id"),
    number("submit_time", "first submission, Unix seconds (Slurm's own submission time changes at each requeue)"),
    text("name", "name of the job"),
    text("user_name", "login name of the owner (`user` is a word of SQL)"),
    text("account", "account that is charged for the job"),
    text("partition", "partition when the job was last seen"),
    text("qos", "QOS when the job was last seen; for a job of blocks, that of its base blocks", server_default=""),
    text("licenses", "licenses of the base blocks, in sbatch's form", server_default=""),
    text("comment", "comment, in which the job opts in"),
    text("work_dir", "working directory, in which the job's directory is"),
    whole("requested_nodes", "nodes that the job requested when it was first seen"),
    whole("requested_gpus_per_node", "GPUs per node that the job requested when it was first seen"),
    whole("restart", "Slurm's restart count: how often the job was requeued"),
    flag("elastic", "true if the job opted in and may be resized"),
    text("refusal", "why the job is not elastic, as a sentence; empty if it is"),
    text("state", "base state, as Slurm names it"),
    number("end_time", "end, Unix seconds; null until then", nullable=True),
    whole("exit_code", "exit code of the batch script; null until the end", nullable=True),
    text("report_note", "what was wrong with the job's directory or reports, as a sentence"),
    whole("base_batch", "global batch for which the script's learning rate was chosen, samples", nullable=True),
    whole("max_batch", "largest global batch that the job accepts, samples", nullable=True),
    whole("max_local_batch", "most samples per GPU per forward pass", nullable=True),
    whole("dataset", "samples in an epoch; 0 if the job does not know", nullable=True),
    whole("epochs", "epochs that the job will train; 0 if it does not report that", nullable=True),
    number("deferred_until", "time until which the companion defers its start, Unix seconds; or null", nullable=True),
    whole("max_passes", "most forward passes per optimizer step", nullable=True),
    *reason("refusal"),
    whole("term", "for a job of blocks: number of the leader's term, as the job reports it", nullable=True),
    flag("hot", "for blocks: true if new ones load from memory, not from a checkpoint", nullable=True),
    whole("multiple_of", "global batches must be multiples of this, samples", nullable=True),
    text("strategy", "training strategy, as the job reports it; null for plain data parallel", nullable=True),
    text("limits", "limits of that strategy, as a JSON object (see the view `size_limits`)", nullable=True),
    whole("gradient_bytes", "bytes of gradients averaged in a step, as reported; 0 or null if unknown", nullable=True),
    text("rule", "how the learning rate follows the batch: sgd, adam, other or none; empty if unknown", nullable=True),
    whole("grown", "largest global batch with which training needs no more samples, as reported", nullable=True),
    Index("uq_jobs_cluster_id_job_id_submit_time", "cluster_id", "job_id", "submit_time", unique=True),
    Index("ix_jobs_cluster_id_end_time", "cluster_id", "end_time"),
)

RUNS = table(
    "runs",
    "runs: a row for each start of a job",
    key(),
    of("job_id", "jobs.id", "job (jobs.id)"),
    whole("restart", "Slurm's restart count, 0 in the first run"),
    whole("nodes", "nodes; 0 if not known"),
    whole("gpus_per_node", "GPUs per node; 0 if not known"),
    text("node_list", "names of its nodes, separated by commas", nullable=True),
    number("start_time", "start, Unix seconds", nullable=True),
    number("end_time", "end, Unix seconds; null until then", nullable=True),
    whole("batch", "global batch at the beginning, samples", nullable=True),
    number("lr_factor", "learning rate at the beginning, divided by that for the base batch", nullable=True),
    text("checkpoint", "name of the checkpoint that was loaded; empty if there was none", nullable=True),
    number("launch_s", "from the start of `ones-run` to the first line of the ranks, seconds", nullable=True),
    number("group_s", "to build the process group, seconds", nullable=True),
    number("load_s", "to load the checkpoint, seconds", nullable=True),
    text("end_reason", "why the run ended, as the job reports it, or else Slurm's state", nullable=True),
    whole("exit_code", "exit code that the job reported", nullable=True),
    text("note", "remarks for people that the job reported", nullable=True),
    whole("epoch", "epoch that the run has reached, counted from 0", nullable=True),
    whole("cursor", "samples of that epoch already used", nullable=True),
    whole("step", "optimizer steps since the job's first run", nullable=True),
    number("first_loss", "first training loss that was reported", nullable=True),
    number("hello_time", "when its first `Hello` report was written, Unix seconds", nullable=True),
    number("report_time", "when its newest report was written, Unix seconds", nullable=True),
    whole("report_offset", "bytes of its report file that were read"),
    whole("report_number", "number of the last report that was read"),
    number("noise", "gradient noise scale that was reported last, samples", nullable=True),
    number("progress", "progress since the job's first run, samples of the base batch", nullable=True),
    number("queue_s", "from the last report of the run before to this run's batch script, seconds", nullable=True),
    number("import_s", "time for imports, which is part of launch_s, seconds", nullable=True),
    number("first_step_s", "from the last `Hello` to the end of the first step, seconds", nullable=True),
    whole("resizes", "runs of the job so far that changed its world size, as the job counts them", nullable=True),
    whole("attempts", "how often the ranks were started again within the run", nullable=True),
    whole("hello_number", "number of the newest `Hello` report", nullable=True),
    whole("nonfinite", "steps with a loss that is not a finite number", nullable=True),
    whole("nonfinite_step", "step of the last report with such a loss; null if there was none", nullable=True),
    whole("world", "number of ranks in the newest `Hello` report", nullable=True),
    text("kind", "kind of its GPUs, several separated by commas; empty if unknown", nullable=True),
    Index("uq_runs_job_id_restart", "job_id", "restart", unique=True),
)

# What runs report

THROUGHPUT = table(
    "throughput",
    "throughput samples: each covers a stretch of steps",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "end of the stretch, Unix seconds"),
    whole("epoch", "epoch, from 0"),
    whole("step", "optimizer steps since the job's first run"),
    whole("cursor", "samples of the epoch already used"),
    whole("samples", "samples used in the stretch, over all ranks"),
    number("seconds", "length of the stretch, seconds"),
    whole("batch", "global batch, samples"),
    number("lr_factor", "learning rate divided by that for the base batch"),
    number("loss", "mean training loss over the stretch", nullable=True),
    number("noise", "gradient noise scale, samples", nullable=True),
    number("progress", "progress since the job's first run, samples of the base batch", nullable=True),
    whole("nonfinite", "steps with a loss that is not a finite number; the mean leaves them out", nullable=True),
    number("gpu_use", "share of time in which the GPUs were in use, by Slurm's measurement or rank 0's", nullable=True),
    whole("gpu_memory", "memory in use on each GPU, bytes", nullable=True),
    # Rows come in the order of time, so that a few pages hold the index; SQLite has no such kind.
    Index("ix_throughput_time", "time", postgresql_using="brin").ddl_if(dialect="postgresql"),
)

EPOCHS = table(
    "epochs",
    "epochs that ended",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "end of the epoch, Unix seconds"),
    whole("epoch", "number of the epoch, from 0"),
    whole("step", "optimizer steps since the job's first run"),
    whole("samples", "samples used in it"),
    number("loss", "loss that the script reports for it", nullable=True),
    number("accuracy", "accuracy that the script reports for it, as a fraction", nullable=True),
    whole("nonfinite", "steps with a loss that is not a finite number", nullable=True),
)

CHECKPOINTS = table(
    "checkpoints",
    "checkpoints that became durable",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "when the checkpoint was durable, Unix seconds"),
    text("name", "its name in the job's directory"),
    whole("epoch", "epoch, from 0"),
    whole("cursor", "samples of the epoch already used"),
    whole("step", "optimizer steps since the job's first run"),
    whole("bytes", "size, bytes"),
    number("seconds", "time to write it, seconds"),
    whole("order_number", "number of the order that caused it", nullable=True),
    number("stall_s", "pause of training for it, seconds", nullable=True),
)

BATCHES = table(
    "batch_changes",
    "changes of the global batch within a run, with the learning rate and momentum that go with it",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "when, Unix seconds"),
    whole("step", "optimizer steps since the job's first run"),
    whole("batch", "global batch from then on, samples"),
    number("lr_factor", "learning rate divided by that for the base batch"),
    whole("order_number", "number of the order that caused it", nullable=True),
    whole("passes", "forward passes per step from then on", nullable=True),
    number("momentum_power", "exponent on the script's momentum from then on", nullable=True),
)

# Jobs of blocks: job arrays whose tasks join and leave while they train. A run of theirs is a term.

BLOCKS = table(
    "blocks",
    "blocks: a row for each start of a task of a job of blocks",
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True),
    whole("task", "task of the job array", primary_key=True, autoincrement=False),
    whole("restart", "Slurm's restart count of the task", primary_key=True, autoincrement=False),
    whole("slurm_id", "Slurm's job id of the task, as accounting has it"),
    whole("nodes", "nodes"),
    whole("gpus_per_node", "GPUs per node"),
    text("node_list", "names of its nodes, separated by commas"),
    text("state", "base state, as Slurm names it"),
    number("start_time", "start, Unix seconds"),
    number("end_time", "end, Unix seconds; null until then", nullable=True),
    flag("guest", "true if it ran as a guest, in a queue whose jobs Slurm preempts"),
)

MEMBERSHIPS = table(
    "memberships",
    "the blocks that train together, from a step boundary on",
    of("run_id", "runs.id", "run (its restart is the term)", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "start, Unix seconds"),
    whole("generation", "number that rises with each change, over all terms of the job"),
    text("blocks", "tasks of its blocks in rank order, separated by commas; the first leads"),
    text("restarts", "Slurm's restart counts of these blocks, separated by commas"),
    whole("nodes", "nodes"),
    whole("gpus_per_node", "GPUs per node; 0 if nodes have unequal numbers"),
    whole("world", "number of GPUs; each has one rank"),
    whole("step", "optimizer steps since the job's first run"),
    whole("batch", "global batch from then on, samples"),
    number("pause_s", "pause of training: last step before to end of first step after, less a usual step, seconds"),
    whole("bytes", "state that was sent to new blocks, bytes"),
    number("transfer_s", "time to send that state, which is part of pause_s, seconds"),
    number("ready_s", "from the order until the last new block was ready, seconds; training goes on meanwhile"),
    whole("order_number", "number of the order that caused it", nullable=True),
    text("why", "cause: order, lost (block), leaving (block) or first (membership)"),
)

# What was decided and done

PROMISES = table(
    "promises",
    "deadlines that were promised to jobs, or refused",
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True),
    number("deadline", "time at which the job should have ended, Unix seconds"),
    number("time", "when the deadline was promised or refused, Unix seconds"),
    flag("given", "true if promised, false if refused"),
    text("reason", "why, as a sentence"),
    *reason("reason"),
)

DECISIONS = table(
    "decisions",
    "schedules that a policy decided on",
    key(),
    of("cluster_id", "clusters.id", "cluster"),
    number("time", "when, Unix seconds"),
    text("policy", "name of the policy"),
    text("mode", "advise (nothing was changed) or act"),
    number("score", "score of the schedule, in the policy's own unit", nullable=True),
    number("seconds", "time that the decision took, seconds"),
    whole("generations", "generations of the evolutionary search so far", nullable=True),
    CheckConstraint("mode IN ('advise', 'act')", name="mode"),
    Index("uq_decisions_cluster_id_time_policy", "cluster_id", "time", "policy", unique=True),
)

DECISION_JOBS = table(
    "decision_jobs",
    "what a decision gives each job, and why",
    of("decision_id", "decisions.id", "decision", primary_key=True),
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True, index=True),
    whole("nodes", "nodes; null if it waits", nullable=True),
    whole("gpus_per_node", "GPUs per node; null if it waits", nullable=True),
    whole("batch", "global batch, samples; null if it waits", nullable=True),
    whole("from_nodes", "nodes it held; null if it waited", nullable=True),
    whole("from_gpus_per_node", "GPUs per node it held; null if it waited", nullable=True),
    whole("from_batch", "global batch it had, samples", nullable=True),
    text("reason", "why, as a sentence for the job's user"),
    flag("acted", "true if the companion began to carry it out"),
    text("outcome", "what came of it, as a sentence"),
    *reason("reason"),
    *reason("outcome"),
)

ALTERNATIVES = table(
    "decision_alternatives",
    "the best few sizes that a decision considered for a job",
    of("decision_id", "decisions.id", "decision", primary_key=True),
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True, index=True),
    whole("rank", "0 for the best size, 1 for the next, and so on", primary_key=True, autoincrement=False),
    whole("nodes", "nodes; 0 for waiting"),
    whole("gpus_per_node", "GPUs per node; 0 for waiting"),
    whole("batch", "global batch, samples; 0 for waiting"),
    number("worth", "worth of this size by itself, in the policy's unit; more is better"),
)

RESIZES = table(
    "resizes",
    "resizes, each stored before it begins",
    key(),
    of("job_id", "jobs.id", "job (jobs.id)"),
    of("decision_id", "decisions.id", "decision that asked for the resize", nullable=True),
    whole("restart", "restart count of the run that the resize ends; -1 if the job waits"),
    whole("old_nodes", "nodes before"),
    whole("old_gpus_per_node", "GPUs per node before"),
    whole("old_batch", "global batch before, samples", nullable=True),
    whole("new_nodes", "nodes after; 0 to stop the job"),
    whole("new_gpus_per_node", "GPUs per node after"),
    whole("new_batch", "global batch after, samples; null if the resize does not change it", nullable=True),
    text("state", "state of the resize; 'done' when it took effect"),
    flag("back", "true while the job gets its old shape again"),
    whole("order_number", "number of the order to the job", nullable=True),
    number("started", "when it was stored, Unix seconds"),
    number("deadline", "time at which the resize stops waiting in this state, Unix seconds", nullable=True),
    number("ended", "when it ended, Unix seconds; null while it is open", nullable=True),
    text("outcome", "what came of it, as a sentence"),
    number("pause_s", "pause of training: from the last step before to the first after, seconds", nullable=True),
    *reason("outcome"),
    text("mechanism", "requeue, or blocks: blocks join and leave while the job trains", server_default="requeue"),
    text("added", "for blocks: task:nodesxGPUs of those that join, separated by commas", server_default=""),
    text("dropped", "for blocks: tasks of those that leave, separated by commas", server_default=""),
    text("guests", "for blocks: tasks of those that join as guests, separated by commas", server_default=""),
    text("held", "for blocks: waiting tasks that the companion holds for it, separated by commas", server_default=""),
    text("old_kind", "kind of GPU that was requested before; empty for any", server_default=""),
    text("new_kind", "kind of GPU that is requested after; empty for any", server_default=""),
    text("let_go", "for blocks: tasks that are no longer held for it, separated by commas", server_default=""),
    text(
        "preempted",
        "for blocks: tasks held afterwards, since Slurm preempted them or may do so, separated by commas",
        server_default="",
    ),
    Index("uq_resizes_job_id_started", "job_id", "started", unique=True),
    # At most one open resize a job, whatever the number of writers.
    Index("uq_resizes_open", "job_id", unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN),
)

STEPS = table(
    "resize_steps",
    "states of resizes, in order",
    of("resize_id", "resizes.id", "resize", primary_key=True),
    whole("sequence", "from 0, in order", primary_key=True, autoincrement=False),
    text("state", "state that the resize entered"),
    flag("back", "true while the job gets its old shape again"),
    number("time", "when, Unix seconds"),
    text("detail", "what was found or done, as a sentence"),
    *reason("detail"),
)

# Records besides the jobs that the companion looks after

NODES = table(
    "nodes",
    "nodes that the companion has seen",
    key(),
    of("cluster_id", "clusters.id", "cluster"),
    text("name", "its name, as Slurm has it"),
    Index("uq_nodes_cluster_id_name", "cluster_id", "name", unique=True),
)

CHANGES = table(
    "node_changes",
    "states of nodes, each until the node's next change",
    of("node_id", "nodes.id", "node", primary_key=True),
    number("time", "when it was seen, Unix seconds", primary_key=True, autoincrement=False),
    text("state", "UP if the node accepts jobs, RESERVED, or else Slurm's state"),
    flag("usable", "true if it is up, and neither drained, reserved, failing nor in maintenance"),
    whole("gpus", "number of GPUs; 0 if Slurm counts none"),
    text("partitions", "partitions of the node, separated by commas"),
)

OTHER_GPUS = table(
    "other_gpus",
    "GPUs held by jobs that did not opt in; each number holds until the next",
    of("cluster_id", "clusters.id", "cluster", primary_key=True),
    number("time", "when it was seen, Unix seconds", primary_key=True, autoincrement=False),
    whole("gpus", "number of these GPUs"),
)

ACTIONS = table(
    "actions",
    "actions of people on the companion, its database and its jobs",
    key(),
    of("cluster_id", "clusters.id", "cluster"),
    number("time", "when, Unix seconds"),
    text("user_name", "login name of who did it"),
    text("action", "action: a command, or a change of a file"),
    text("detail", "details, such as a command's arguments"),
    Index("uq_actions_cluster_id_time_user_name_action", "cluster_id", "time", "user_name", "action", unique=True),
)

LEADERS = table(
    "leaders",
    "companion that leads each cluster, or led it last",
    of("cluster_id", "clusters.id", "cluster", primary_key=True),
    whole("term", "number of the term; a companion with an older term can write nothing"),
    text("holder", "process that leads, as host:process id; empty once it has given up the lead"),
    number("since", "when it took the lead, Unix seconds"),
    number("beat", "time of its last heartbeat, Unix seconds"),
)

ACCOUNTING = table(
    "accounting",
    "jobs that are known only from Slurm's accounting",
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True),
    number("time_limit_s", "time limit, seconds; null if there was none", nullable=True),
    number("import_time", "when the job was last imported, Unix seconds"),
)

ROLLUPS = table(
    "rollups",
    "runs whose throughput samples were combined into longer ones",
    of("run_id", "runs.id", "run", primary_key=True),
    number("stretch_s", "length of the combined samples, seconds"),
    whole("number", "number of the run's last report when they were combined"),
)

HEALTH = table(
    "health",
    "health of the companion that led last, at its last tick",
    of("cluster_id", "clusters.id", "cluster", primary_key=True),
    number("time", "when this was stored, Unix seconds"),
    text("mode", "act or advise"),
    number("interval_s", "seconds from one tick to the next"),
    number("tick_time", "end of the last tick that succeeded, Unix seconds; null before the first", nullable=True),
    number("tick_s", "time that this tick took, seconds", nullable=True),
    whole("running", "elastic jobs that ran at that tick", nullable=True),
    whole("waiting", "elastic jobs that waited at that tick", nullable=True),
    whole("gpus", "GPUs on which elastic jobs ran at that tick", nullable=True),
    text("error", "last error; empty if there was none since the companion started"),
    number("error_time", "time of that error, Unix seconds", nullable=True),
)
