"""The first schema: clusters, jobs, runs and what they report, decisions, resizes.

Revision 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "clusters",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("name", sa.Text(), nullable=False, comment="the cluster's name, as Slurm has it"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clusters")),
        sa.UniqueConstraint("name", name=op.f("uq_clusters_name")),
        comment="Slurm clusters that this database remembers",
    )
    op.create_table(
        "decisions",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("cluster_id", WHOLE, nullable=False, comment="cluster"),
        sa.Column("time", sa.Double(), nullable=False, comment="when, Unix seconds"),
        sa.Column("policy", sa.Text(), nullable=False, comment="name of the policy"),
        sa.Column("mode", sa.Text(), nullable=False, comment="advise (nothing was changed) or act"),
        sa.Column(
            "score", sa.Double(), nullable=True, comment="score of the schedule, in the policy's own unit"
        ),
        sa.Column("seconds", sa.Double(), nullable=False, comment="what it took to decide, seconds"),
        sa.Column("generations", WHOLE, nullable=True, comment="generations of the search so far"),
        sa.CheckConstraint("mode IN ('advise', 'act')", name=op.f("ck_decisions_mode")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_decisions_cluster_id_clusters")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decisions")),
        comment="schedules that a policy decided on",
    )
    op.create_index(
        "uq_decisions_cluster_id_time_policy", "decisions", ["cluster_id", "time", "policy"], unique=True
    )
    op.create_table(
        "jobs",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("cluster_id", WHOLE, nullable=False, comment="cluster"),
        sa.Column("job_id", WHOLE, nullable=False, comment="Slurm's job id"),
        sa.Column(
            "submit_time",
            sa.Double(),
            nullable=False,
            comment="first submission, Unix seconds (Slurm changes its own at each requeue)",
        ),
        sa.Column("name", sa.Text(), nullable=False, comment="name that the user gave it"),
        sa.Column(
            "user_name",
            sa.Text(),
            nullable=False,
            comment="login name of its owner (`user` means something else in SQL)",
        ),
        sa.Column("account", sa.Text(), nullable=False, comment="account it is charged to"),
        sa.Column("partition", sa.Text(), nullable=False, comment="partition it was last seen in"),
        sa.Column("comment", sa.Text(), nullable=False, comment="its comment, which holds the opting in"),
        sa.Column(
            "work_dir",
            sa.Text(),
            nullable=False,
            comment="working directory, which holds the job's directory",
        ),
        sa.Column("requested_nodes", WHOLE, nullable=False, comment="nodes it asked for when first seen"),
        sa.Column(
            "requested_gpus_per_node",
            WHOLE,
            nullable=False,
            comment="GPUs per node it asked for when first seen",
        ),
        sa.Column("restart", WHOLE, nullable=False, comment="how often Slurm has restarted it"),
        sa.Column(
            "elastic",
            sa.Boolean(),
            nullable=False,
            comment="opted in, and nothing speaks against resizing it",
        ),
        sa.Column(
            "refusal", sa.Text(), nullable=False, comment="why it is not elastic, in words; empty where it is"
        ),
        sa.Column("state", sa.Text(), nullable=False, comment="base state, as Slurm names it"),
        sa.Column("end_time", sa.Double(), nullable=True, comment="end, Unix seconds; null until then"),
        sa.Column(
            "exit_code", WHOLE, nullable=True, comment="exit code of the batch script; null until the end"
        ),
        sa.Column(
            "report_note",
            sa.Text(),
            nullable=False,
            comment="what of its directory or reports could not be believed, in words",
        ),
        sa.Column(
            "base_batch",
            WHOLE,
            nullable=True,
            comment="global batch its learning rate was chosen for, samples",
        ),
        sa.Column("max_batch", WHOLE, nullable=True, comment="largest global batch it takes, samples"),
        sa.Column("max_local_batch", WHOLE, nullable=True, comment="most samples per GPU per forward pass"),
        sa.Column("dataset", WHOLE, nullable=True, comment="samples in an epoch"),
        sa.Column(
            "epochs", WHOLE, nullable=True, comment="epochs it means to train; 0 where it does not say"
        ),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_jobs_cluster_id_clusters")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        comment="jobs; Slurm uses a job id again after it has run out of them",
    )
    op.create_index("ix_jobs_cluster_id_end_time", "jobs", ["cluster_id", "end_time"], unique=False)
    op.create_index(
        "uq_jobs_cluster_id_job_id_submit_time", "jobs", ["cluster_id", "job_id", "submit_time"], unique=True
    )
    op.create_table(
        "decision_jobs",
        sa.Column("decision_id", WHOLE, nullable=False, comment="decision"),
        sa.Column("job_id", WHOLE, nullable=False, comment="job (jobs.id)"),
        sa.Column("nodes", WHOLE, nullable=True, comment="nodes; null where it waits"),
        sa.Column("gpus_per_node", WHOLE, nullable=True, comment="GPUs per node; null where it waits"),
        sa.Column("batch", WHOLE, nullable=True, comment="global batch, samples; null where it waits"),
        sa.Column("from_nodes", WHOLE, nullable=True, comment="nodes it held; null where it waited"),
        sa.Column(
            "from_gpus_per_node", WHOLE, nullable=True, comment="GPUs per node it held; null where it waited"
        ),
        sa.Column("from_batch", WHOLE, nullable=True, comment="global batch it had, samples"),
        sa.Column("reason", sa.Text(), nullable=False, comment="why, in words for its user"),
        sa.Column("acted", sa.Boolean(), nullable=False, comment="the companion set out to carry it out"),
        sa.Column("outcome", sa.Text(), nullable=False, comment="what came of it, in words"),
        sa.ForeignKeyConstraint(
            ["decision_id"], ["decisions.id"], name=op.f("fk_decision_jobs_decision_id_decisions")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_decision_jobs_job_id_jobs")),
        sa.PrimaryKeyConstraint("decision_id", "job_id", name=op.f("pk_decision_jobs")),
        comment="what a decision gives each job, and why",
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_decision_jobs_job_id"), "decision_jobs", ["job_id"], unique=False)
    op.create_table(
        "resizes",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("job_id", WHOLE, nullable=False, comment="job (jobs.id)"),
        sa.Column("decision_id", WHOLE, nullable=True, comment="decision that asked for it"),
        sa.Column("restart", WHOLE, nullable=False, comment="restart count of the run that it leaves"),
        sa.Column("old_nodes", WHOLE, nullable=False, comment="nodes before"),
        sa.Column("old_gpus_per_node", WHOLE, nullable=False, comment="GPUs per node before"),
        sa.Column("old_batch", WHOLE, nullable=True, comment="global batch before, samples"),
        sa.Column("new_nodes", WHOLE, nullable=False, comment="nodes after; 0 to stop the job"),
        sa.Column("new_gpus_per_node", WHOLE, nullable=False, comment="GPUs per node after"),
        sa.Column(
            "new_batch",
            WHOLE,
            nullable=True,
            comment="global batch after, samples; null leaves the job's own",
        ),
        sa.Column(
            "state", sa.Text(), nullable=False, comment="state of the resize; 'done' when it took effect"
        ),
        sa.Column("order_number", WHOLE, nullable=True, comment="order that was given to the job for it"),
        sa.Column("started", sa.Double(), nullable=False, comment="when it was written down, Unix seconds"),
        sa.Column(
            "deadline", sa.Double(), nullable=True, comment="when the present state is given up, Unix seconds"
        ),
        sa.Column(
            "ended", sa.Double(), nullable=True, comment="when it ended, Unix seconds; null while it is open"
        ),
        sa.Column("outcome", sa.Text(), nullable=False, comment="what came of it, in words"),
        sa.Column(
            "pause_s",
            sa.Double(),
            nullable=True,
            comment="from the last step before to the first after it, seconds",
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_resizes_job_id_jobs")),
        sa.ForeignKeyConstraint(
            ["decision_id"], ["decisions.id"], name=op.f("fk_resizes_decision_id_decisions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_resizes")),
        comment="resizes, each written down before it begins",
    )
    op.create_index("uq_resizes_job_id_started", "resizes", ["job_id", "started"], unique=True)
    op.create_index(
        "uq_resizes_open",
        "resizes",
        ["job_id"],
        unique=True,
        sqlite_where=sa.text("ended IS NULL"),
        postgresql_where=sa.text("ended IS NULL"),
    )
    op.create_table(
        "runs",
        sa.Column("id", WHOLE, nullable=False, comment="key of this table alone"),
        sa.Column("job_id", WHOLE, nullable=False, comment="job (jobs.id)"),
        sa.Column("restart", WHOLE, nullable=False, comment="Slurm's restart count, 0 in the first run"),
        sa.Column("nodes", WHOLE, nullable=False, comment="nodes; 0 where not known"),
        sa.Column("gpus_per_node", WHOLE, nullable=False, comment="GPUs per node; 0 where not known"),
        sa.Column("node_list", sa.Text(), nullable=True, comment="names of its nodes, separated by commas"),
        sa.Column("start_time", sa.Double(), nullable=True, comment="start, Unix seconds"),
        sa.Column("end_time", sa.Double(), nullable=True, comment="end, Unix seconds; null until then"),
        sa.Column("batch", WHOLE, nullable=True, comment="global batch in which it began, samples"),
        sa.Column(
            "lr_factor",
            sa.Double(),
            nullable=True,
            comment="learning rate it began with, over the one set for the base batch",
        ),
        sa.Column(
            "checkpoint", sa.Text(), nullable=True, comment="name of the checkpoint it loaded; empty for none"
        ),
        sa.Column(
            "launch_s",
            sa.Double(),
            nullable=True,
            comment="from the batch script to the ranks' first line, seconds",
        ),
        sa.Column("group_s", sa.Double(), nullable=True, comment="to build the process group, seconds"),
        sa.Column("load_s", sa.Double(), nullable=True, comment="to load the checkpoint, seconds"),
        sa.Column(
            "end_reason", sa.Text(), nullable=True, comment="why it ended: the job's word, else Slurm's state"
        ),
        sa.Column("exit_code", WHOLE, nullable=True, comment="exit code that it reported"),
        sa.Column("note", sa.Text(), nullable=True, comment="what people should know, in the job's words"),
        sa.Column("epoch", WHOLE, nullable=True, comment="epoch it has reached, from 0"),
        sa.Column("cursor", WHOLE, nullable=True, comment="samples of that epoch already used"),
        sa.Column("step", WHOLE, nullable=True, comment="optimizer steps since the job's first run"),
        sa.Column("first_loss", sa.Double(), nullable=True, comment="first training loss that it reported"),
        sa.Column(
            "hello_time",
            sa.Double(),
            nullable=True,
            comment="when its first report was written, Unix seconds",
        ),
        sa.Column(
            "report_time",
            sa.Double(),
            nullable=True,
            comment="when its newest report was written, Unix seconds",
        ),
        sa.Column("report_offset", WHOLE, nullable=False, comment="bytes of its report file that were read"),
        sa.Column("report_number", WHOLE, nullable=False, comment="number of the last report that was read"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_runs_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        comment="one start of a job each",
    )
    op.create_index("uq_runs_job_id_restart", "runs", ["job_id", "restart"], unique=True)
    op.create_table(
        "batch_changes",
        sa.Column("run_id", WHOLE, nullable=False, comment="run"),
        sa.Column("number", WHOLE, nullable=False, comment="number of the report"),
        sa.Column("time", sa.Double(), nullable=False, comment="when, Unix seconds"),
        sa.Column("step", WHOLE, nullable=False, comment="optimizer steps since the job's first run"),
        sa.Column("batch", WHOLE, nullable=False, comment="global batch from then on, samples"),
        sa.Column(
            "lr_factor",
            sa.Double(),
            nullable=False,
            comment="learning rate over the one set for the base batch",
        ),
        sa.Column("order_number", WHOLE, nullable=True, comment="order that asked for it"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_batch_changes_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_batch_changes")),
        comment="changes of the global batch inside a run",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", WHOLE, nullable=False, comment="run"),
        sa.Column("number", WHOLE, nullable=False, comment="number of the report"),
        sa.Column("time", sa.Double(), nullable=False, comment="when it was durable, Unix seconds"),
        sa.Column("name", sa.Text(), nullable=False, comment="its name in the job's directory"),
        sa.Column("epoch", WHOLE, nullable=False, comment="epoch, from 0"),
        sa.Column("cursor", WHOLE, nullable=False, comment="samples of the epoch already used"),
        sa.Column("step", WHOLE, nullable=False, comment="optimizer steps since the job's first run"),
        sa.Column("bytes", WHOLE, nullable=False, comment="size, bytes"),
        sa.Column("seconds", sa.Double(), nullable=False, comment="to write it, seconds"),
        sa.Column("order_number", WHOLE, nullable=True, comment="order that asked for it"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_checkpoints")),
        comment="checkpoints that became durable",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "epochs",
        sa.Column("run_id", WHOLE, nullable=False, comment="run"),
        sa.Column("number", WHOLE, nullable=False, comment="number of the report"),
        sa.Column("time", sa.Double(), nullable=False, comment="end of the epoch, Unix seconds"),
        sa.Column("epoch", WHOLE, nullable=False, comment="the epoch that ended, from 0"),
        sa.Column("step", WHOLE, nullable=False, comment="optimizer steps since the job's first run"),
        sa.Column("samples", WHOLE, nullable=False, comment="samples used in it"),
        sa.Column("loss", sa.Double(), nullable=True, comment="loss that the script reports for it"),
        sa.Column(
            "accuracy",
            sa.Double(),
            nullable=True,
            comment="accuracy that the script reports for it, as a fraction",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_epochs_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_epochs")),
        comment="epochs that ended",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "resize_steps",
        sa.Column("resize_id", WHOLE, nullable=False, comment="resize"),
        sa.Column("sequence", WHOLE, nullable=False, comment="from 0, in order"),
        sa.Column("state", sa.Text(), nullable=False, comment="state it entered"),
        sa.Column("time", sa.Double(), nullable=False, comment="when, Unix seconds"),
        sa.Column("detail", sa.Text(), nullable=False, comment="what was found or done, in words"),
        sa.ForeignKeyConstraint(
            ["resize_id"], ["resizes.id"], name=op.f("fk_resize_steps_resize_id_resizes")
        ),
        sa.PrimaryKeyConstraint("resize_id", "sequence", name=op.f("pk_resize_steps")),
        comment="every state a resize went through",
        sqlite_with_rowid=False,
    )
    op.create_table(
        "throughput",
        sa.Column("run_id", WHOLE, nullable=False, comment="run"),
        sa.Column("number", WHOLE, nullable=False, comment="number of the report"),
        sa.Column("time", sa.Double(), nullable=False, comment="end of the stretch, Unix seconds"),
        sa.Column("epoch", WHOLE, nullable=False, comment="epoch, from 0"),
        sa.Column("step", WHOLE, nullable=False, comment="optimizer steps since the job's first run"),
        sa.Column("cursor", WHOLE, nullable=False, comment="samples of the epoch already used"),
        sa.Column("samples", WHOLE, nullable=False, comment="samples used in the stretch, over all ranks"),
        sa.Column("seconds", sa.Double(), nullable=False, comment="length of the stretch, seconds"),
        sa.Column("batch", WHOLE, nullable=False, comment="global batch, samples"),
        sa.Column(
            "lr_factor",
            sa.Double(),
            nullable=False,
            comment="learning rate over the one set for the base batch",
        ),
        sa.Column("loss", sa.Double(), nullable=True, comment="mean training loss over the stretch"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_throughput_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_throughput")),
        comment="samples used over a stretch of steps, at the shape of the run",
        sqlite_with_rowid=False,
        postgresql_partition_by="RANGE (run_id)",
    )
    if op.get_bind().dialect.name == "postgresql":
        # Keys of runs below 2^24 come from other databases; the store makes a partition for each month's own.
        op.execute("CREATE TABLE throughput_0 PARTITION OF throughput FOR VALUES FROM (MINVALUE) TO (16777216)")
        op.create_index("ix_throughput_time", "throughput", ["time"], postgresql_using="brin")


def downgrade() -> None:
    """Drop them."""
    op.drop_table("throughput")
    op.drop_table("resize_steps")
    op.drop_table("epochs")
    op.drop_table("checkpoints")
    op.drop_table("batch_changes")
    op.drop_table("runs")
    op.drop_table("resizes")
    op.drop_table("decision_jobs")
    op.drop_table("jobs")
    op.drop_table("decisions")
    op.drop_table("clusters")
