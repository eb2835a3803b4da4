"""What is remembered of a cluster's jobs: a database, and the store that reads and writes it.

Usable alone, from a notebook say::

    from ones_db import Store

    with Store.open("sqlite:///ones.sqlite", "cluster-name", read_only=True) as store:
        for row in store.job_summaries():
            print(row.job_id, row.jct_s, row.accuracy)

or, with pandas, `ones_db.connect("sqlite:///ones.sqlite").job_summary()`; docs/database.md shows what can be asked.
`ones_db.migrate` creates and upgrades databases; `ones_db.models` holds the tables.
"""

from ones_db.errors import NotLeader, ResizeConflict, SchemaError, StoreBusy, StoreError, StoreLost, UnknownRecord
from ones_db.frames import Database, connect
from ones_db.models import SCHEMA_REVISION
from ones_db.records import (
    NO_REASON,
    RESIZE_DONE,
    AccountingJob,
    ActionRecord,
    AlternativeRecord,
    BatchRecord,
    ByeRecord,
    CheckpointRecord,
    DecisionJobRecord,
    DecisionRecord,
    EpochPoint,
    EpochRecord,
    FirstRecord,
    HealthRecord,
    HelloRecord,
    Imported,
    JobHistory,
    JobRecord,
    JobSummary,
    LeaderRecord,
    NodeChange,
    NodeRecord,
    NoisePoint,
    PastJob,
    ReasonRecord,
    ResizeRecord,
    ResizeStepRecord,
    RunRecord,
    RunReports,
    SpecRecord,
    ThroughputPoint,
    ThroughputRecord,
    TimelineRow,
)
from ones_db.store import Store

__version__ = "0.2.0"

__all__ = [
    "NO_REASON",
    "RESIZE_DONE",
    "SCHEMA_REVISION",
    "AccountingJob",
    "ActionRecord",
    "AlternativeRecord",
    "BatchRecord",
    "ByeRecord",
    "CheckpointRecord",
    "Database",
    "DecisionJobRecord",
    "DecisionRecord",
    "EpochPoint",
    "EpochRecord",
    "FirstRecord",
    "HealthRecord",
    "HelloRecord",
    "Imported",
    "JobHistory",
    "JobRecord",
    "JobSummary",
    "LeaderRecord",
    "NodeChange",
    "NodeRecord",
    "NoisePoint",
    "NotLeader",
    "PastJob",
    "ReasonRecord",
    "ResizeConflict",
    "ResizeRecord",
    "ResizeStepRecord",
    "RunRecord",
    "RunReports",
    "SchemaError",
    "SpecRecord",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreLost",
    "ThroughputPoint",
    "ThroughputRecord",
    "TimelineRow",
    "UnknownRecord",
    "connect",
]
