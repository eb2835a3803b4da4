"""What is known beside the jobs that the companion looks after: nodes, operators' actions, accounting, roll-ups."""

from __future__ import annotations

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from ones_db.models.base import Base, is_, key, of


class Node(Base):
    __tablename__ = "nodes"
    __table_args__ = (
        Index("uq_nodes_cluster_id_name", "cluster_id", "name", unique=True),
        {"comment": "nodes that the companion has seen"},
    )

    id: Mapped[int] = key()
    cluster_id: Mapped[int] = of("clusters.id", "cluster")
    name: Mapped[str] = is_("its name, as Slurm has it")


class NodeChange(Base):
    __tablename__ = "node_changes"
    __table_args__ = (
        {"comment": "what a node was from a moment on, until its next change", "sqlite_with_rowid": False},
    )

    node_id: Mapped[int] = of("nodes.id", "node", primary_key=True)
    time: Mapped[float] = mapped_column(primary_key=True, autoincrement=False, comment="when it was seen, Unix seconds")
    state: Mapped[str] = is_("UP while it takes jobs, has it any or not; RESERVED; else what Slurm says of it")
    usable: Mapped[bool] = is_("up, and neither drained, reserved, failing nor in maintenance")
    gpus: Mapped[int] = is_("GPUs it has; 0 where Slurm knows of none")
    partitions: Mapped[str] = is_("partitions it is in, separated by commas")


class Action(Base):
    __tablename__ = "actions"
    __table_args__ = (
        Index("uq_actions_cluster_id_time_user_name_action", "cluster_id", "time", "user_name", "action", unique=True),
        {"comment": "what people did to the companion, its database and its jobs"},
    )

    id: Mapped[int] = key()
    cluster_id: Mapped[int] = of("clusters.id", "cluster")
    time: Mapped[float] = is_("when, Unix seconds")
    user_name: Mapped[str] = is_("login name of who did it")
    action: Mapped[str] = is_("what was done: a command, or what was seen of a file")
    detail: Mapped[str] = is_("with what, in words")


class Leader(Base):
    __tablename__ = "leaders"
    __table_args__ = ({"comment": "which companion of each cluster acts, or did last", "sqlite_with_rowid": False},)

    cluster_id: Mapped[int] = of("clusters.id", "cluster", primary_key=True)
    term: Mapped[int] = is_("how often the lead was taken; whoever has an older term writes no more")
    holder: Mapped[str] = is_("who leads, as host:process id; empty once it gave the lead back")
    since: Mapped[float] = is_("when it took the lead, Unix seconds")
    beat: Mapped[float] = is_("when it was last heard of, Unix seconds")


class Accounting(Base):
    __tablename__ = "accounting"
    __table_args__ = ({"comment": "jobs that are known from Slurm's accounting alone", "sqlite_with_rowid": False},)

    job_id: Mapped[int] = of("jobs.id", "job (jobs.id)", primary_key=True)
    time_limit_s: Mapped[float | None] = is_("time limit, seconds; null where it had none")
    import_time: Mapped[float] = is_("when its rows were last read, Unix seconds")


class RollUp(Base):
    __tablename__ = "rollups"
    __table_args__ = (
        {"comment": "runs whose throughput samples were put together to longer ones", "sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = of("runs.id", "run", primary_key=True)
    stretch_s: Mapped[float] = is_("samples that ended in the same stretch of so many seconds are one")
    number: Mapped[int] = is_("number of the run's last report then")


class Health(Base):
    __tablename__ = "health"
    __table_args__ = (
        {"comment": "how the companion that acted last was at its last tick", "sqlite_with_rowid": False},
    )

    cluster_id: Mapped[int] = of("clusters.id", "cluster", primary_key=True)
    time: Mapped[float] = is_("when it wrote this, Unix seconds")
    mode: Mapped[str] = is_("act or advise")
    interval_s: Mapped[float] = is_("seconds from one tick to the next")
    tick_time: Mapped[float | None] = is_("end of its last tick that was not in vain, Unix seconds; null before one")
    tick_s: Mapped[float | None] = is_("what that tick took, seconds")
    running: Mapped[int | None] = is_("elastic jobs that ran then")
    waiting: Mapped[int | None] = is_("elastic jobs that waited then")
    gpus: Mapped[int | None] = is_("GPUs on which elastic jobs ran then")
    error: Mapped[str] = is_("its last complaint, in words; empty where it had none since it started")
    error_time: Mapped[float | None] = is_("when it complained, Unix seconds")
