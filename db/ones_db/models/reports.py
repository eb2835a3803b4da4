"""What runs report."""

from __future__ import annotations

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from ones_db.models.base import Base, is_, of


class ThroughputSample(Base):
    __tablename__ = "throughput"
    __table_args__ = (
        # Rows come in the order of time, so that a few pages hold the index; SQLite has no such kind.
        Index("ix_throughput_time", "time", postgresql_using="brin").ddl_if(dialect="postgresql"),
        {
            "comment": "samples used over a stretch of steps, at the shape of the run",
            "sqlite_with_rowid": False,
            "postgresql_partition_by": "RANGE (run_id)",
        },
    )

    run_id: Mapped[int] = of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = is_("end of the stretch, Unix seconds")
    epoch: Mapped[int] = is_("epoch, from 0")
    step: Mapped[int] = is_("optimizer steps since the job's first run")
    cursor: Mapped[int] = is_("samples of the epoch already used")
    samples: Mapped[int] = is_("samples used in the stretch, over all ranks")
    seconds: Mapped[float] = is_("length of the stretch, seconds")
    batch: Mapped[int] = is_("global batch, samples")
    lr_factor: Mapped[float] = is_("learning rate over the one set for the base batch")
    loss: Mapped[float | None] = is_("mean training loss over the stretch")
    noise: Mapped[float | None] = is_("gradient noise scale, samples")
    progress: Mapped[float | None] = is_("progress since the job's first run, samples of the base batch")
    nonfinite: Mapped[int | None] = is_("steps with a loss that is not a finite number; they are not in the mean")


class EpochEnd(Base):
    __tablename__ = "epochs"
    __table_args__ = ({"comment": "epochs that ended", "sqlite_with_rowid": False},)

    run_id: Mapped[int] = of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = is_("end of the epoch, Unix seconds")
    epoch: Mapped[int] = is_("the epoch that ended, from 0")
    step: Mapped[int] = is_("optimizer steps since the job's first run")
    samples: Mapped[int] = is_("samples used in it")
    loss: Mapped[float | None] = is_("loss that the script reports for it")
    accuracy: Mapped[float | None] = is_("accuracy that the script reports for it, as a fraction")
    nonfinite: Mapped[int | None] = is_("steps with a loss that is not a finite number")


class Checkpoint(Base):
    __tablename__ = "checkpoints"
    __table_args__ = ({"comment": "checkpoints that became durable", "sqlite_with_rowid": False},)

    run_id: Mapped[int] = of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = is_("when it was durable, Unix seconds")
    name: Mapped[str] = is_("its name in the job's directory")
    epoch: Mapped[int] = is_("epoch, from 0")
    cursor: Mapped[int] = is_("samples of the epoch already used")
    step: Mapped[int] = is_("optimizer steps since the job's first run")
    bytes: Mapped[int] = is_("size, bytes")
    seconds: Mapped[float] = is_("to write it, seconds")
    order_number: Mapped[int | None] = is_("order that asked for it")
    stall_s: Mapped[float | None] = is_("how long training stood still for it, seconds")


class BatchChange(Base):
    __tablename__ = "batch_changes"
    __table_args__ = ({"comment": "changes of the global batch inside a run", "sqlite_with_rowid": False},)

    run_id: Mapped[int] = of("runs.id", "run", primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="number of the report")
    time: Mapped[float] = is_("when, Unix seconds")
    step: Mapped[int] = is_("optimizer steps since the job's first run")
    batch: Mapped[int] = is_("global batch from then on, samples")
    lr_factor: Mapped[float] = is_("learning rate over the one set for the base batch, where it goes")
    order_number: Mapped[int | None] = is_("order that asked for it")
    passes: Mapped[int | None] = is_("forward passes per step from then on")
    ramp: Mapped[int | None] = is_("steps over which the learning rate goes there")
