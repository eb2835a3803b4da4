"""Clusters, and their jobs and runs."""

from __future__ import annotations

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from ones_db.models.base import Base, arguments_of, code_of, is_, key, of


class Cluster(Base):
    __tablename__ = "clusters"
    __table_args__ = ({"comment": "Slurm clusters that this database remembers"},)

    id: Mapped[int] = key()
    name: Mapped[str] = mapped_column(unique=True, comment="the cluster's name, as Slurm has it")


class Job(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("uq_jobs_cluster_id_job_id_submit_time", "cluster_id", "job_id", "submit_time", unique=True),
        Index("ix_jobs_cluster_id_end_time", "cluster_id", "end_time"),
        {"comment": "jobs; Slurm uses a job id again after it has run out of them"},
    )

    id: Mapped[int] = key()
    cluster_id: Mapped[int] = of("clusters.id", "cluster")
    job_id: Mapped[int] = is_("Slurm's job id")
    submit_time: Mapped[float] = is_("first submission, Unix seconds (Slurm changes its own at each requeue)")
    name: Mapped[str] = is_("name that the user gave it")
    user_name: Mapped[str] = is_("login name of its owner (`user` means something else in SQL)")
    account: Mapped[str] = is_("account it is charged to")
    partition: Mapped[str] = is_("partition it was last seen in")
    comment: Mapped[str] = is_("its comment, which holds the opting in")
    work_dir: Mapped[str] = is_("working directory, which holds the job's directory")
    requested_nodes: Mapped[int] = is_("nodes it asked for when first seen")
    requested_gpus_per_node: Mapped[int] = is_("GPUs per node it asked for when first seen")
    restart: Mapped[int] = is_("how often Slurm has restarted it")
    elastic: Mapped[bool] = is_("opted in, and nothing speaks against resizing it")
    refusal: Mapped[str] = is_("why it is not elastic, in words; empty where it is")
    state: Mapped[str] = is_("base state, as Slurm names it")
    end_time: Mapped[float | None] = is_("end, Unix seconds; null until then")
    exit_code: Mapped[int | None] = is_("exit code of the batch script; null until the end")
    report_note: Mapped[str] = is_("what of its directory or reports could not be believed, in words")
    base_batch: Mapped[int | None] = is_("global batch its learning rate was chosen for, samples")
    max_batch: Mapped[int | None] = is_("largest global batch it takes, samples")
    max_local_batch: Mapped[int | None] = is_("most samples per GPU per forward pass")
    dataset: Mapped[int | None] = is_("samples in an epoch; 0 where it does not know")
    epochs: Mapped[int | None] = is_("epochs it means to train; 0 where it does not say")
    deferred_until: Mapped[float | None] = is_(
        "until when the companion keeps it from starting, Unix seconds; null where it does not"
    )
    max_passes: Mapped[int | None] = is_("most forward passes per optimizer step")
    refusal_code: Mapped[str] = code_of("refusal")
    refusal_arguments: Mapped[str] = arguments_of("refusal")


class Run(Base):
    __tablename__ = "runs"
    __table_args__ = (
        Index("uq_runs_job_id_restart", "job_id", "restart", unique=True),
        {"comment": "one start of a job each"},
    )

    id: Mapped[int] = key()
    job_id: Mapped[int] = of("jobs.id", "job (jobs.id)")
    restart: Mapped[int] = is_("Slurm's restart count, 0 in the first run")
    nodes: Mapped[int] = is_("nodes; 0 where not known")
    gpus_per_node: Mapped[int] = is_("GPUs per node; 0 where not known")
    node_list: Mapped[str | None] = is_("names of its nodes, separated by commas")
    start_time: Mapped[float | None] = is_("start, Unix seconds")
    end_time: Mapped[float | None] = is_("end, Unix seconds; null until then")
    batch: Mapped[int | None] = is_("global batch in which it began, samples")
    lr_factor: Mapped[float | None] = is_("learning rate it began with, over the one set for the base batch")
    checkpoint: Mapped[str | None] = is_("name of the checkpoint it loaded; empty for none")
    launch_s: Mapped[float | None] = is_("from the batch script to the ranks' first line, seconds")
    group_s: Mapped[float | None] = is_("to build the process group, seconds")
    load_s: Mapped[float | None] = is_("to load the checkpoint, seconds")
    end_reason: Mapped[str | None] = is_("why it ended: the job's word, else Slurm's state")
    exit_code: Mapped[int | None] = is_("exit code that it reported")
    note: Mapped[str | None] = is_("what people should know, in the job's words")
    epoch: Mapped[int | None] = is_("epoch it has reached, from 0")
    cursor: Mapped[int | None] = is_("samples of that epoch already used")
    step: Mapped[int | None] = is_("optimizer steps since the job's first run")
    first_loss: Mapped[float | None] = is_("first training loss that it reported")
    hello_time: Mapped[float | None] = is_("when its first hello was written, Unix seconds")
    report_time: Mapped[float | None] = is_("when its newest report was written, Unix seconds")
    report_offset: Mapped[int] = is_("bytes of its report file that were read")
    report_number: Mapped[int] = is_("number of the last report that was read")
    noise: Mapped[float | None] = is_("gradient noise scale that it reported last, samples")
    progress: Mapped[float | None] = is_("progress it has reached since the job's first run, samples of the base batch")
    queue_s: Mapped[float | None] = is_("from the last report of the run before to the batch script, seconds")
    import_s: Mapped[float | None] = is_("what imports took of launch_s, seconds")
    first_step_s: Mapped[float | None] = is_("from the hello to the end of the first step, seconds")
    resizes: Mapped[int | None] = is_("runs so far that began at another world size, by the job's own count")
    attempts: Mapped[int | None] = is_("how often its ranks were started again within it")
    hello_number: Mapped[int | None] = is_("number of the hello of its last start of the ranks")
    nonfinite: Mapped[int | None] = is_("steps with a loss that is not a finite number")
    nonfinite_step: Mapped[int | None] = is_("step of the last report that had such a loss; null for none")
