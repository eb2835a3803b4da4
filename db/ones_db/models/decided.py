"""What was decided and done."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from ones_db.models.base import Base, arguments_of, code_of, is_, key, of


class Decision(Base):
    __tablename__ = "decisions"
    __table_args__ = (
        CheckConstraint("mode IN ('advise', 'act')", name="mode"),
        Index("uq_decisions_cluster_id_time_policy", "cluster_id", "time", "policy", unique=True),
        {"comment": "schedules that a policy decided on"},
    )

    id: Mapped[int] = key()
    cluster_id: Mapped[int] = of("clusters.id", "cluster")
    time: Mapped[float] = is_("when, Unix seconds")
    policy: Mapped[str] = is_("name of the policy")
    mode: Mapped[str] = is_("advise (nothing was changed) or act")
    score: Mapped[float | None] = is_("score of the schedule, in the policy's own unit")
    seconds: Mapped[float] = is_("what it took to decide, seconds")
    generations: Mapped[int | None] = is_("generations of the search so far")


class DecisionJob(Base):
    __tablename__ = "decision_jobs"
    __table_args__ = ({"comment": "what a decision gives each job, and why", "sqlite_with_rowid": False},)

    decision_id: Mapped[int] = of("decisions.id", "decision", primary_key=True)
    job_id: Mapped[int] = of("jobs.id", "job (jobs.id)", primary_key=True, index=True)
    nodes: Mapped[int | None] = is_("nodes; null where it waits")
    gpus_per_node: Mapped[int | None] = is_("GPUs per node; null where it waits")
    batch: Mapped[int | None] = is_("global batch, samples; null where it waits")
    from_nodes: Mapped[int | None] = is_("nodes it held; null where it waited")
    from_gpus_per_node: Mapped[int | None] = is_("GPUs per node it held; null where it waited")
    from_batch: Mapped[int | None] = is_("global batch it had, samples")
    reason: Mapped[str] = is_("why, in words for its user")
    acted: Mapped[bool] = is_("the companion set out to carry it out")
    outcome: Mapped[str] = is_("what came of it, in words")
    reason_code: Mapped[str] = code_of("reason")
    reason_arguments: Mapped[str] = arguments_of("reason")
    outcome_code: Mapped[str] = code_of("outcome")
    outcome_arguments: Mapped[str] = arguments_of("outcome")


class Alternative(Base):
    __tablename__ = "decision_alternatives"
    __table_args__ = ({"comment": "the best few sizes that a decision weighed for a job", "sqlite_with_rowid": False},)

    decision_id: Mapped[int] = of("decisions.id", "decision", primary_key=True)
    job_id: Mapped[int] = of("jobs.id", "job (jobs.id)", primary_key=True, index=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="from 0, the best for the job")
    nodes: Mapped[int] = is_("nodes; 0 for waiting")
    gpus_per_node: Mapped[int] = is_("GPUs per node; 0 for waiting")
    batch: Mapped[int] = is_("global batch, samples; 0 for waiting")
    worth: Mapped[float] = is_("what it is worth by itself, in the policy's own unit; more is better")


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

    id: Mapped[int] = key()
    job_id: Mapped[int] = of("jobs.id", "job (jobs.id)")
    decision_id: Mapped[int | None] = of("decisions.id", "decision that asked for it")
    restart: Mapped[int] = is_("restart count of the run that it leaves")
    old_nodes: Mapped[int] = is_("nodes before")
    old_gpus_per_node: Mapped[int] = is_("GPUs per node before")
    old_batch: Mapped[int | None] = is_("global batch before, samples")
    new_nodes: Mapped[int] = is_("nodes after; 0 to stop the job")
    new_gpus_per_node: Mapped[int] = is_("GPUs per node after")
    new_batch: Mapped[int | None] = is_("global batch after, samples; null leaves the job's own")
    state: Mapped[str] = is_("state of the resize; 'done' when it took effect")
    order_number: Mapped[int | None] = is_("order that was given to the job for it")
    started: Mapped[float] = is_("when it was written down, Unix seconds")
    deadline: Mapped[float | None] = is_("when the present state is given up, Unix seconds")
    ended: Mapped[float | None] = is_("when it ended, Unix seconds; null while it is open")
    outcome: Mapped[str] = is_("what came of it, in words")
    pause_s: Mapped[float | None] = is_("from the last step before to the first after it, seconds")
    outcome_code: Mapped[str] = code_of("outcome")
    outcome_arguments: Mapped[str] = arguments_of("outcome")


class ResizeStep(Base):
    __tablename__ = "resize_steps"
    __table_args__ = ({"comment": "every state a resize went through", "sqlite_with_rowid": False},)

    resize_id: Mapped[int] = of("resizes.id", "resize", primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="from 0, in order")
    state: Mapped[str] = is_("state it entered")
    time: Mapped[float] = is_("when, Unix seconds")
    detail: Mapped[str] = is_("what was found or done, in words")
    detail_code: Mapped[str] = code_of("detail")
    detail_arguments: Mapped[str] = arguments_of("detail")
