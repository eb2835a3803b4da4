"""Definitions of all tables, in SQLAlchemy Core without ORM classes.

Every column has a comment with its meaning and unit, from which docs/database.md is made. Types exist in all databases.
The key of a job is (cluster, job id, submission), because Slurm uses job ids again. The key of a run is (job, restart
count), and that of a report (run, number). So a report that is stored twice changes nothing. Add a new column at the
end of its table, and in a migration.
"""

from __future__ import annotations

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

SCHEMA_REVISION = "0018"
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
"""Integer of 64 bits. In SQLite it is INTEGER, which has 64 bits too, and is the only type for which SQLite generates
keys."""


def storable(value: str) -> str:
    """Return text from users, Slurm or jobs in a form that every database can store.

    Bytes that are no text (lone surrogates) become escapes. So do zeros, which PostgreSQL refuses. Otherwise one odd
    job name could keep a whole snapshot out of the database.
    """
    value = value.replace("\0", "\\x00")
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


class SafeText(TypeDecorator[str]):
    """Type of text columns. `storable` is applied to all values."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


def column(name: str, kind: Any, comment: str, *also: Any, nullable: bool = False, **options: Any) -> Column[Any]:
    return Column(name, kind, *also, nullable=nullable, comment=comment, **options)


def whole(name: str, comment: str, **options: Any) -> Column[Any]:
    return column(name, WHOLE, comment, **options)


def number(name: str, comment: str, **options: Any) -> Column[Any]:
    return column(name, Double(), comment, **options)


def text(name: str, comment: str, **options: Any) -> Column[Any]:
    return column(name, SafeText(), comment, **options)


def flag(name: str, comment: str) -> Column[Any]:
    return column(name, Boolean(), comment)


def key() -> Column[Any]:
    return column("id", WHOLE, "key of only this table", primary_key=True)


def of(name: str, target: str, comment: str, **options: Any) -> Column[Any]:
    """Return a column with a foreign key."""
    return column(name, WHOLE, comment, ForeignKey(target), autoincrement=False, **options)


def table(name: str, comment: str, *items: Any) -> Table:
    """Return a table of the schema. In SQLite, a table without a column `id` is stored in the order of its key."""
    own = any(isinstance(item, Column) and item.name == "id" for item in items)
    return Table(name, METADATA, *items, comment=comment, sqlite_with_rowid=own)


def reason(name: str) -> tuple[Column[Any], Column[Any]]:
    """Return the columns for a reason's code and arguments. The column with its sentence is separate."""
    return (
        text(f"{name}_code", f"code of {name}, by which causes are counted", server_default=""),
        text(f"{name}_arguments", f"what {name} names, as a JSON object", server_default="{}"),
    )


_OPEN = condition("ended IS NULL")

# Clusters, their jobs and runs

CLUSTERS = table(
    "clusters",
    "Slurm clusters that this database remembers",
    key(),
    text("name", "the cluster's name, as Slurm has it", unique=True),
)

JOBS = table(
    "jobs",
    "jobs; Slurm uses a job id again after it has run out of them",
    key(),
    of("cluster_id", "clusters.id", "cluster"),
    whole("job_id", "Slurm's job id"),
    number("submit_time", "first submission, Unix seconds (Slurm changes its own at each requeue)"),
    text("name", "name that the user gave it"),
    text("user_name", "login name of its owner (`user` means something else in SQL)"),
    text("account", "account it is charged to"),
    text("partition", "partition it was last seen in"),
    text("qos", "QOS it was last seen in, of a job of blocks that of its base blocks", server_default=""),
    text("licenses", "licenses of its base blocks, as sbatch takes them", server_default=""),
    text("comment", "its comment, which holds the opting in"),
    text("work_dir", "working directory, which holds the job's directory"),
    whole("requested_nodes", "nodes it asked for when first seen"),
    whole("requested_gpus_per_node", "GPUs per node it asked for when first seen"),
    whole("restart", "how often Slurm has restarted it"),
    flag("elastic", "opted in, and nothing speaks against resizing it"),
    text("refusal", "why it is not elastic, in words; empty if it is"),
    text("state", "base state, as Slurm names it"),
    number("end_time", "end, Unix seconds; null until then", nullable=True),
    whole("exit_code", "exit code of the batch script; null until the end", nullable=True),
    text("report_note", "what of its directory or reports could not be believed, in words"),
    whole("base_batch", "global batch its learning rate was chosen for, samples", nullable=True),
    whole("max_batch", "largest global batch it takes, samples", nullable=True),
    whole("max_local_batch", "most samples per GPU per forward pass", nullable=True),
    whole("dataset", "samples in an epoch; 0 if it does not know", nullable=True),
    whole("epochs", "epochs it means to train; 0 if it does not say", nullable=True),
    number(
        "deferred_until",
        "until when the companion keeps it from starting, Unix seconds; null if it does not",
        nullable=True,
    ),
    whole("max_passes", "most forward passes per optimizer step", nullable=True),
    *reason("refusal"),
    whole("term", "of a job of blocks: the term of its leader, by its own word", nullable=True),
    column(
        "hot",
        Boolean(),
        "of a job of blocks: its state moves from memory to memory when blocks join; "
        "where not, each change begins a term from a checkpoint",
        nullable=True,
    ),
    whole("multiple_of", "its global batches are multiples of this, samples", nullable=True),
    text("strategy", "training strategy, by its own word; null if it is plainly data parallel", nullable=True),
    text("limits", "what that strategy can do, as a JSON object (the view `size_limits`)", nullable=True),
    whole(
        "gradient_bytes",
        "bytes of the gradients that it averages in a step, by its own word; 0 or null if it did not say",
        nullable=True,
    ),
    text("rule", "how its steps follow the batch: sgd, adam, other, none; empty if it did not say", nullable=True),
    whole("grown", "largest global batch that costs it no samples, by its own word", nullable=True),
    Index("uq_jobs_cluster_id_job_id_submit_time", "cluster_id", "job_id", "submit_time", unique=True),
    Index("ix_jobs_cluster_id_end_time", "cluster_id", "end_time"),
)

RUNS = table(
    "runs",
    "one start of a job each",
    key(),
    of("job_id", "jobs.id", "job (jobs.id)"),
    whole("restart", "Slurm's restart count, 0 in the first run"),
    whole("nodes", "nodes; 0 if not known"),
    whole("gpus_per_node", "GPUs per node; 0 if not known"),
    text("node_list", "names of its nodes, separated by commas", nullable=True),
    number("start_time", "start, Unix seconds", nullable=True),
    number("end_time", "end, Unix seconds; null until then", nullable=True),
    whole("batch", "global batch in which it began, samples", nullable=True),
    number("lr_factor", "learning rate it began with, over the one set for the base batch", nullable=True),
    text("checkpoint", "name of the checkpoint it loaded; empty for none", nullable=True),
    number("launch_s", "from the batch script to the ranks' first line, seconds", nullable=True),
    number("group_s", "to build the process group, seconds", nullable=True),
    number("load_s", "to load the checkpoint, seconds", nullable=True),
    text("end_reason", "why it ended: the job's word, else Slurm's state", nullable=True),
    whole("exit_code", "exit code that it reported", nullable=True),
    text("note", "what people should know, in the job's words", nullable=True),
    whole("epoch", "epoch it has reached, from 0", nullable=True),
    whole("cursor", "samples of that epoch already used", nullable=True),
    whole("step", "optimizer steps since the job's first run", nullable=True),
    number("first_loss", "first training loss that it reported", nullable=True),
    number("hello_time", "when its first hello was written, Unix seconds", nullable=True),
    number("report_time", "when its newest report was written, Unix seconds", nullable=True),
    whole("report_offset", "bytes of its report file that were read"),
    whole("report_number", "number of the last report that was read"),
    number("noise", "gradient noise scale that it reported last, samples", nullable=True),
    number("progress", "progress it has reached since the job's first run, samples of the base batch", nullable=True),
    number("queue_s", "from the last report of the run before to the batch script, seconds", nullable=True),
    number("import_s", "what imports took of launch_s, seconds", nullable=True),
    number("first_step_s", "from the hello to the end of the first step, seconds", nullable=True),
    whole("resizes", "runs so far that began at another world size, by the job's own count", nullable=True),
    whole("attempts", "how often its ranks were started again within it", nullable=True),
    whole("hello_number", "number of the hello of its last start of the ranks", nullable=True),
    whole("nonfinite", "steps with a loss that is not a finite number", nullable=True),
    whole("nonfinite_step", "step of the last report that had such a loss; null for none", nullable=True),
    whole("world", "ranks, as its last hello said", nullable=True),
    text("kind", "kind of its GPUs, several with commas between; empty if it is unknown", nullable=True),
    Index("uq_runs_job_id_restart", "job_id", "restart", unique=True),
)

# What runs report

THROUGHPUT = table(
    "throughput",
    "samples used over a stretch of steps, at the shape of the run",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "end of the stretch, Unix seconds"),
    whole("epoch", "epoch, from 0"),
    whole("step", "optimizer steps since the job's first run"),
    whole("cursor", "samples of the epoch already used"),
    whole("samples", "samples used in the stretch, over all ranks"),
    number("seconds", "length of the stretch, seconds"),
    whole("batch", "global batch, samples"),
    number("lr_factor", "learning rate over the one set for the base batch"),
    number("loss", "mean training loss over the stretch", nullable=True),
    number("noise", "gradient noise scale, samples", nullable=True),
    number("progress", "progress since the job's first run, samples of the base batch", nullable=True),
    whole("nonfinite", "steps with a loss that is not a finite number; they are not in the mean", nullable=True),
    number("gpu_use", "share of time in which its GPUs were in use, as Slurm says, else rank 0", nullable=True),
    whole("gpu_memory", "memory in use of each of them, bytes", nullable=True),
    # Rows come in the order of time, so that a few pages hold the index; SQLite has no such kind.
    Index("ix_throughput_time", "time", postgresql_using="brin").ddl_if(dialect="postgresql"),
)

EPOCHS = table(
    "epochs",
    "epochs that ended",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "end of the epoch, Unix seconds"),
    whole("epoch", "the epoch that ended, from 0"),
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
    number("time", "when it was durable, Unix seconds"),
    text("name", "its name in the job's directory"),
    whole("epoch", "epoch, from 0"),
    whole("cursor", "samples of the epoch already used"),
    whole("step", "optimizer steps since the job's first run"),
    whole("bytes", "size, bytes"),
    number("seconds", "to write it, seconds"),
    whole("order_number", "order that asked for it", nullable=True),
    number("stall_s", "pause of training for it, seconds", nullable=True),
)

BATCHES = table(
    "batch_changes",
    "changes of the global batch inside a run, and of the learning rate and momentum that belong to it",
    of("run_id", "runs.id", "run", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "when, Unix seconds"),
    whole("step", "optimizer steps since the job's first run"),
    whole("batch", "global batch from then on, samples"),
    number("lr_factor", "learning rate over the one set for the base batch"),
    whole("order_number", "order that asked for it", nullable=True),
    whole("passes", "forward passes per step from then on", nullable=True),
    number("momentum_power", "power of the script's momentum from then on", nullable=True),
)

# Jobs of blocks: job arrays whose tasks join and leave while they train. A run of theirs is a term.

BLOCKS = table(
    "blocks",
    "one start of a block each, of jobs of blocks",
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
    flag("guest", "it ran in a queue of guests, which Slurm preempts"),
)

MEMBERSHIPS = table(
    "memberships",
    "the blocks that train together, from a step boundary on",
    of("run_id", "runs.id", "run (its restart is the term)", primary_key=True),
    whole("number", "number of the report", primary_key=True, autoincrement=False),
    number("time", "from when, Unix seconds"),
    whole("generation", "rises with each change, over all terms of the job"),
    text("blocks", "tasks of its blocks in rank order, separated by commas; the first leads"),
    text("restarts", "Slurm's restart count of each of them, separated by commas"),
    whole("nodes", "nodes"),
    whole("gpus_per_node", "GPUs per node; 0 if nodes give unequally many"),
    whole("world", "GPUs in all, one rank each"),
    whole("step", "optimizer steps since the job's first run"),
    whole("batch", "global batch from then on, samples"),
    number("pause_s", "from the last step before to the end of the first after it, less a usual step, seconds"),
    whole("bytes", "state that was sent to new blocks, bytes"),
    number("transfer_s", "what sending it took of pause_s, seconds"),
    number("ready_s", "from the order until the last new block was ready, training going on, seconds"),
    whole("order_number", "order that asked for it", nullable=True),
    text("why", "order, lost, leaving or first"),
)

# What was decided and done

PROMISES = table(
    "promises",
    "deadlines that were promised to jobs, or refused",
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True),
    number("deadline", "when the job is to have ended, Unix seconds"),
    number("time", "when that was promised or refused, Unix seconds"),
    flag("given", "it was promised"),
    text("reason", "why, in words"),
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
    number("seconds", "what it took to decide, seconds"),
    whole("generations", "generations of the search so far", nullable=True),
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
    text("reason", "why, in words for its user"),
    flag("acted", "the companion set out to carry it out"),
    text("outcome", "what came of it, in words"),
    *reason("reason"),
    *reason("outcome"),
)

ALTERNATIVES = table(
    "decision_alternatives",
    "the best few sizes that a decision weighed for a job",
    of("decision_id", "decisions.id", "decision", primary_key=True),
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True, index=True),
    whole("rank", "from 0, the best for the job", primary_key=True, autoincrement=False),
    whole("nodes", "nodes; 0 for waiting"),
    whole("gpus_per_node", "GPUs per node; 0 for waiting"),
    whole("batch", "global batch, samples; 0 for waiting"),
    number("worth", "what it is worth by itself, in the policy's own unit; more is better"),
)

RESIZES = table(
    "resizes",
    "resizes, each written down before it begins",
    key(),
    of("job_id", "jobs.id", "job (jobs.id)"),
    of("decision_id", "decisions.id", "decision that asked for it", nullable=True),
    whole("restart", "restart count of the run that it leaves"),
    whole("old_nodes", "nodes before"),
    whole("old_gpus_per_node", "GPUs per node before"),
    whole("old_batch", "global batch before, samples", nullable=True),
    whole("new_nodes", "nodes after; 0 to stop the job"),
    whole("new_gpus_per_node", "GPUs per node after"),
    whole("new_batch", "global batch after, samples; null leaves the job's own", nullable=True),
    text("state", "state of the resize; 'done' when it took effect"),
    flag("back", "it is on its way back to what the job had"),
    whole("order_number", "order that was given to the job for it", nullable=True),
    number("started", "when it was written down, Unix seconds"),
    number("deadline", "when the present state is given up, Unix seconds", nullable=True),
    number("ended", "when it ended, Unix seconds; null while it is open", nullable=True),
    text("outcome", "what came of it, in words"),
    number("pause_s", "from the last step before to the first after it, seconds", nullable=True),
    *reason("outcome"),
    text("mechanism", "requeue, or blocks: blocks join and leave while the job trains", server_default="requeue"),
    text("added", "of blocks: task:nodesxGPUs of those that are to join, separated by commas", server_default=""),
    text("dropped", "of blocks: tasks of those that are to leave, separated by commas", server_default=""),
    text("guests", "of blocks: tasks of those that join as guests, separated by commas", server_default=""),
    text("held", "of blocks: waiting tasks that are put into a hold, separated by commas", server_default=""),
    text("old_kind", "kind of GPU asked for before; empty for any", server_default=""),
    text("new_kind", "kind of GPU asked for after; empty for any", server_default=""),
    text("let_go", "of blocks: tasks that were seen out of that hold since, separated by commas", server_default=""),
    text(
        "preempted",
        "of blocks: tasks held after it, since they were preempted or may be, by commas",
        server_default="",
    ),
    Index("uq_resizes_job_id_started", "job_id", "started", unique=True),
    # At most one open resize a job, whatever the number of writers.
    Index("uq_resizes_open", "job_id", unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN),
)

STEPS = table(
    "resize_steps",
    "every state a resize went through",
    of("resize_id", "resizes.id", "resize", primary_key=True),
    whole("sequence", "from 0, in order", primary_key=True, autoincrement=False),
    text("state", "state it entered"),
    flag("back", "on the way back to what the job had"),
    number("time", "when, Unix seconds"),
    text("detail", "what was found or done, in words"),
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
    "what a node was from a moment on, until its next change",
    of("node_id", "nodes.id", "node", primary_key=True),
    number("time", "when it was seen, Unix seconds", primary_key=True, autoincrement=False),
    text("state", "UP while it takes jobs, has it any or not; RESERVED; else what Slurm says of it"),
    flag("usable", "up, and neither drained, reserved, failing nor in maintenance"),
    whole("gpus", "GPUs it has; 0 if Slurm knows of none"),
    text("partitions", "partitions it is in, separated by commas"),
)

ACTIONS = table(
    "actions",
    "what people did to the companion, its database and its jobs",
    key(),
    of("cluster_id", "clusters.id", "cluster"),
    number("time", "when, Unix seconds"),
    text("user_name", "login name of who did it"),
    text("action", "what was done: a command, or what was seen of a file"),
    text("detail", "with what, in words"),
    Index("uq_actions_cluster_id_time_user_name_action", "cluster_id", "time", "user_name", "action", unique=True),
)

LEADERS = table(
    "leaders",
    "which companion of each cluster acts, or did last",
    of("cluster_id", "clusters.id", "cluster", primary_key=True),
    whole("term", "how often the lead was taken; whoever has an older term writes no more"),
    text("holder", "who leads, as host:process id; empty once it gave the lead back"),
    number("since", "when it took the lead, Unix seconds"),
    number("beat", "time of its last heartbeat, Unix seconds"),
)

ACCOUNTING = table(
    "accounting",
    "jobs that are known only from Slurm's accounting",
    of("job_id", "jobs.id", "job (jobs.id)", primary_key=True),
    number("time_limit_s", "time limit, seconds; null if it had none", nullable=True),
    number("import_time", "when its rows were last read, Unix seconds"),
)

ROLLUPS = table(
    "rollups",
    "runs whose throughput samples were put together to longer ones",
    of("run_id", "runs.id", "run", primary_key=True),
    number("stretch_s", "length of a stretch, seconds: samples that ended in the same one are one"),
    whole("number", "number of the run's last report then"),
)

HEALTH = table(
    "health",
    "how the companion that acted last was at its last tick",
    of("cluster_id", "clusters.id", "cluster", primary_key=True),
    number("time", "when it wrote this, Unix seconds"),
    text("mode", "act or advise"),
    number("interval_s", "seconds from one tick to the next"),
    number("tick_time", "end of its last tick that succeeded, Unix seconds; null before one", nullable=True),
    number("tick_s", "what that tick took, seconds", nullable=True),
    whole("running", "elastic jobs that ran then", nullable=True),
    whole("waiting", "elastic jobs that waited then", nullable=True),
    whole("gpus", "GPUs on which elastic jobs ran then", nullable=True),
    text("error", "its last complaint, in words; empty if it had none since it started"),
    number("error_time", "when it complained, Unix seconds", nullable=True),
)
