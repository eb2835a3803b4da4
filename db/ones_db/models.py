"""The tables, as SQLAlchemy 2 typed models. Types are portable; every column says what it means and its unit.

Jobs are keyed (cluster, job id, submission), since Slurm starts its job ids anew; runs (job, restart); what a
run reported (run, number of the report), so that reading a report file twice changes nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

SCHEMA_REVISION = "0004"
"""The newest migration. Revisions are numbers of four digits, so that older and newer can be told from the
name."""

Whole = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits everywhere; SQLite's own integer is that, and only under this name may it be a key that counts
itself."""


class Words(TypeDecorator[str]):
    """Text from users, Slurm and jobs, as it is. Bytes that were no text (lone surrogates) are shown as
    escapes, so that one odd job name cannot keep a whole snapshot out of the database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or value.isascii():
            return value
        return value.encode("utf-8", "backslashreplace").decode()


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {int: Whole, float: Double(), str: Words()}


def _key(comment: str = "key of this table alone") -> Mapped[int]:
    return mapped_column(primary_key=True, comment=comment)


def _of(target: str, comment: str, *, primary_key: bool = False, index: bool = False) -> Mapped[Any]:
    return mapped_column(ForeignKey(target), primary_key=primary_key, autoincrement=False, index=index, comment=comment)


def _is(comment: str) -> Mapped[Any]:
    return mapped_column(comment=comment)


class Cluster(Base):
    __tablename__ = "clusters"
    __table_args__ = ({"comment": "Slurm clusters that this database remembers"},)

    id: Mapped[int] = _key()
    name: Mapped[str] = mapped_column(unique=True, comment="the cluster's name, as Slurm has it")


class Job(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("uq_jobs_cluster_id_job_id_submit_time", "cluster_id", "job_id", "submit_time", unique=True),
        Index("ix_jobs_cluster_id_end_time", "cluster_id", "end_time"),
        {"comment": "jobs; Slurm uses a job id again after it has run out of them"},
    )

    id: Mapped[int] = _key()
    cluster_id: Mapped[int] = _of("clusters.id", "cluster")
    job_id: Mapped[int] = _is("Slurm's job id")
    submit_time: Mapped[float] = _is("first submission, Unix seconds (Slurm changes its own at each requeue)")
    name: Mapped[str] = _is("name that the user gave it")
    user_name: Mapped[str] = _is("login name of its owner (`user` means something else in SQL)")
    account: Mapped[str] = _is("account it is charged to")
    partition: Mapped[str] = _is("partition it was last seen in")
    comment: Mapped[str] = _is("its comment, which holds the opting in")
    work_dir: Mapped[str] = _is("working directory, which holds the job's directory")
    requested_nodes: Mapped[int] = _is("nodes it asked for when first seen")
    requested_gpus_per_node: Mapped[int] = _is("GPUs per node it asked for when first seen")
    restart: Mapped[int] = _is("how often Slurm has restarted it")
    elastic: Mapped[bool] = _is("opted in, and nothing speaks against resizing it")
    refusal: Mapped[str] = _is("why it is not elastic, in words; empty where it is")
    state: Mapped[str] = _is("base state, as Slurm names it")
    end_time: Mapped[float | None] = _is("end, Unix seconds; null until then")
    exit_code: Mapped[int | None] = _is("exit code of the batch script; null until the end")
    report_note: Mapped[str] = _is("what of its directory or reports could not be believed, in words")
    base_batch: Mapped[int | None] = _is("global batch its learning rate was chosen for, samples")
    max_batch: Mapped[int | None] = _is("largest global batch it takes, samples")
    max_local_batch: Mapped[int | None] = _is("most samples per GPU per forward pass")
    dataset: Mapped[int | None] = _is("samples in an epoch; 0 where it does not know")
    epochs: Mapped[int | None] = _is("epochs it means to train; 0 where it does not say")
    deferred_until: Mapped[float | None] = _is(
        "until when the companion keeps it from starting, Unix seconds; null where it does not"
    )
    max_passes: Mapped[int | None] = _is("most forward passes per optimizer step")


class Run(Base):
    __tablename__ = "runs"
    __table_args__ = (
        Index("uq_runs_job_id_restart", "job_id", "restart", unique=True),
        {"comment": "one start of a job each"},
    )

    id: Mapped[int] = _key()
    job_id: Mapped[int] = _of("jobs.id", "job (jobs.id)")
    restart: Mapped[int] = _is("Slurm's restart count, 0 in the first run")
    nodes: Mapped[int] = _is("nodes; 0 where not known")
    gpus_per_node: Mapped[int] = _is("GPUs per node; 0 where not known")
    node_list: Mapped[str | None] = _is("names of its nodes, separated by commas")
    start_time: Mapped[float | None] = _is("start, Unix seconds")
    end_time: Mapped[float | None] = _is("end, Unix seconds; null until then")
    batch: Mapped[int | None] = _is("global batch in which it began, samples")
    lr_factor: Mapped[float | None] = _is("learning rate it began with, over the one set for the base batch")
    checkpoint: Mapped[str | None] = _is("name of the checkpoint it loaded; empty for none")
    launch_s: Mapped[float | None] = _is("from the batch script to the ranks' first line, seconds")
    group_s: Mapped[float | None] = _is("to build the process group, seconds")
    load_s: Mapped[float | None] = _is("to load the checkpoint, seconds")
    end_reason: Mapped[str | None] = _is("why it ended: the job's word, else Slurm's state")
    exit_code: Mapped[int | None] = _is("exit code that it reported")
    note: Mapped[str | None] = _is("what people should know, in the job's words")
    epoch: Mapped[int | None] = _is("epoch it has reached, from 0")
    cursor: Mapped[int | None] = _is("samples of that epoch already used")
    step: Mapped[int | None] = _is("optimizer steps since the job's first run")
    first_loss: Mapped[float | None] = _is("first training loss that it reported")
    hello_time: Mapped[float | None] = _is("when its first hello was written, Unix seconds")
    report_time: Mapped[float | None] = _is("when its newest report was written, Unix seconds")
    report_offset: Mapped[int] = _is("bytes of its report file that were read")
    report_number: Mapped[int] = _is("number of the last report that was read")
    noise: Mapped[float | None] = _is("gradient noise scale that it reported last, samples")
    progress: Mapped[float | None] = _is("progress it has reached since the job's first run, samples of the base batch")
    queue_s: Mapped[float | None] = _is("from the last report of the run before to the batch script, seconds")
    import_s: Mapped[float | None] = _is("what imports took of launch_s, seconds")
    first_step_s: Mapped[float | None] = _is("from the hello to the end of the first step, seconds")
    resizes: Mapped[int | None] = _is("runs so far that began at another world size, by the job's own count")
    attempts: Mapped[int | None] = _is("how often its ranks were started again within it")
    hello_number: Mapped[int | None] = _is("number of the hello of its last start of the ranks")
    nonfinite: Mapped[int | None] = _is("steps with a loss that is not a finite number")
    nonfinite_step: Mapped[int | None] = _is("step of the last report that had such a loss; null for none")


class ThroughputSample(Base):
    __tablename__ = "throughput"
    __table_args__ = (
        {
            "comment": "samples used over a stretch of steps, at the shape of the run",
            "sqlite_with_rowid": False,
        },
    )

    run_id: Mapped[int] = _of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = _is("end of the stretch, Unix seconds")
    epoch: Mapped[int] = _is("epoch, from 0")
    step: Mapped[int] = _is("optimizer steps since the job's first run")
    cursor: Mapped[int] = _is("samples of the epoch already used")
    samples: Mapped[int] = _is("samples used in the stretch, over all ranks")
    seconds: Mapped[float] = _is("length of the stretch, seconds")
    batch: Mapped[int] = _is("global batch, samples")
    lr_factor: Mapped[float] = _is("learning rate over the one set for the base batch")
    loss: Mapped[float | None] = _is("mean training loss over the stretch")
    noise: Mapped[float | None] = _is("gradient noise scale, samples")
    progress: Mapped[float | None] = _is("progress since the job's first run, samples of the base batch")
    nonfinite: Mapped[int | None] = _is("steps with a loss that is not a finite number; they are not in the mean")


class EpochEnd(Base):
    __tablename__ = "epochs"
    __table_args__ = ({"comment": "epochs that ended", "sqlite_with_rowid": False},)

    run_id: Mapped[int] = _of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = _is("end of the epoch, Unix seconds")
    epoch: Mapped[int] = _is("the epoch that ended, from 0")
    step: Mapped[int] = _is("optimizer steps since the job's first run")
    samples: Mapped[int] = _is("samples used in it")
    loss: Mapped[float | None] = _is("loss that the script reports for it")
    accuracy: Mapped[float | None] = _is("accuracy that the script reports for it, as a fraction")
    nonfinite: Mapped[int | None] = _is("steps with a loss that is not a finite number")


class Checkpoint(Base):
    __tablename__ = "checkpoints"
    __table_args__ = ({"comment": "checkpoints that became durable", "sqlite_with_rowid": False},)

    run_id: Mapped[int] = _of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = _is("when it was durable, Unix seconds")
    name: Mapped[str] = _is("its name in the job's directory")
    epoch: Mapped[int] = _is("epoch, from 0")
    cursor: Mapped[int] = _is("samples of the epoch already used")
    step: Mapped[int] = _is("optimizer steps since the job's first run")
    bytes: Mapped[int] = _is("size, bytes")
    seconds: Mapped[float] = _is("to write it, seconds")
    order_number: Mapped[int | None] = _is("order that asked for it")
    stall_s: Mapped[float | None] = _is("how long training stood still for it, seconds")


class BatchChange(Base):
    __tablename__ = "batch_changes"
    __table_args__ = ({"comment": "changes of the global batch inside a run", "sqlite_with_rowid": False},)

    run_id: Mapped[int] = _of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = _is("when, Unix seconds")
    step: Mapped[int] = _is("optimizer steps since the job's first run")
    batch: Mapped[int] = _is("global batch from then on, samples")
    lr_factor: Mapped[float] = _is("learning rate over the one set for the base batch, where it goes")
    order_number: Mapped[int | None] = _is("order that asked for it")
    passes: Mapped[int | None] = _is("forward passes per step from then on")
    ramp: Mapped[int | None] = _is("steps over which the learning rate goes there")


class Decision(Base):
    __tablename__ = "decisions"
    __table_args__ = (
        CheckConstraint("mode IN ('advise', 'act')", name="mode"),
        Index("uq_decisions_cluster_id_time_policy", "cluster_id", "time", "policy", unique=True),
        {"comment": "schedules that a policy decided on"},
    )

    id: Mapped[int] = _key()
    cluster_id: Mapped[int] = _of("clusters.id", "cluster")
    time: Mapped[float] = _is("when, Unix seconds")
    policy: Mapped[str] = _is("name of the policy")
    mode: Mapped[str] = _is("advise (nothing was changed) or act")
    score: Mapped[float | None] = _is("score of the schedule, in the policy's own unit")
    seconds: Mapped[float] = _is("what it took to decide, seconds")
    generations: Mapped[int | None] = _is("generations of the search so far")


class DecisionJob(Base):
    __tablename__ = "decision_jobs"
    __table_args__ = ({"comment": "what a decision gives each job, and why", "sqlite_with_rowid": False},)

    decision_id: Mapped[int] = _of("decisions.id", "decision", primary_key=True)
    job_id: Mapped[int] = _of("jobs.id", "job (jobs.id)", primary_key=True, index=True)
    nodes: Mapped[int | None] = _is("nodes; null where it waits")
    gpus_per_node: Mapped[int | None] = _is("GPUs per node; null where it waits")
    batch: Mapped[int | None] = _is("global batch, samples; null where it waits")
    from_nodes: Mapped[int | None] = _is("nodes it held; null where it waited")
    from_gpus_per_node: Mapped[int | None] = _is("GPUs per node it held; null where it waited")
    from_batch: Mapped[int | None] = _is("global batch it had, samples")
    reason: Mapped[str] = _is("why, in words for its user")
    acted: Mapped[bool] = _is("the companion set out to carry it out")
    outcome: Mapped[str] = _is("what came of it, in words")


class Resize(Base):
    __tablename__ = "resizes"
    __table_args__ = (
        Index("uq_resizes_job_id_started", "job_id", "started", unique=True),
        # At most one open resize a job, whatever the number of writers.
        Index(
            "uq_resizes_open",
            "job_id",
            unique=True,
            sqlite_where=text("ended IS NULL"),
            postgresql_where=text("ended IS NULL"),
        ),
        {"comment": "resizes, each written down before it begins"},
    )

    id: Mapped[int] = _key()
    job_id: Mapped[int] = _of("jobs.id", "job (jobs.id)")
    decision_id: Mapped[int | None] = _of("decisions.id", "decision that asked for it")
    restart: Mapped[int] = _is("restart count of the run that it leaves")
    old_nodes: Mapped[int] = _is("nodes before")
    old_gpus_per_node: Mapped[int] = _is("GPUs per node before")
    old_batch: Mapped[int | None] = _is("global batch before, samples")
    new_nodes: Mapped[int] = _is("nodes after; 0 to stop the job")
    new_gpus_per_node: Mapped[int] = _is("GPUs per node after")
    new_batch: Mapped[int | None] = _is("global batch after, samples; null leaves the job's own")
    state: Mapped[str] = _is("state of the resize; 'done' when it took effect")
    order_number: Mapped[int | None] = _is("order that was given to the job for it")
    started: Mapped[float] = _is("when it was written down, Unix seconds")
    deadline: Mapped[float | None] = _is("when the present state is given up, Unix seconds")
    ended: Mapped[float | None] = _is("when it ended, Unix seconds; null while it is open")
    outcome: Mapped[str] = _is("what came of it, in words")
    pause_s: Mapped[float | None] = _is("from the last step before to the first after it, seconds")


class ResizeStep(Base):
    __tablename__ = "resize_steps"
    __table_args__ = ({"comment": "every state a resize went through", "sqlite_with_rowid": False},)

    resize_id: Mapped[int] = _of("resizes.id", "resize", primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="from 0, in order")
    state: Mapped[str] = _is("state it entered")
    time: Mapped[float] = _is("when, Unix seconds")
    detail: Mapped[str] = _is("what was found or done, in words")
