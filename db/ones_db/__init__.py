"""Database with the history of a cluster's jobs, and the store that reads and writes this database.

The package works without the companion, for example in a notebook::

    from ones_db import Store

    with Store.open("sqlite:///ones.sqlite", "cluster-name", read_only=True) as store:
        for row in store.job_summaries():
            print(row.job_id, row.jct_s, row.accuracy)

or, with pandas, `ones_db.connect("sqlite:///ones.sqlite").job_summary()`; docs/database.md shows what can be asked.
`ones_db.migrate` creates and upgrades databases; `ones_db.tables` defines the tables.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036, since an installer sees to it, but a path set by hand does not
    sys.exit(f"ones_db needs Python 3.10 or newer; {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}")

from ones_db.backend import NotLeader, ResizeConflict, SchemaError, StoreBusy, StoreError, StoreLost, UnknownRecord
from ones_db.engine import LeaderRecord
from ones_db.query import Database, connect
from ones_db.records import (
    RESIZE_DONE,
    RESIZE_OVERTAKEN,
    RESIZE_PREEMPTED,
    AlternativeRecord,
    BlockRecord,
    DecisionJobRecord,
    DecisionRecord,
    EpochPoint,
    GuestRun,
    HeldRecord,
    JobHistory,
    JobRecord,
    MembershipRecord,
    NoisePoint,
    PlacedPoint,
    PromiseRecord,
    ReportLine,
    ResizeRecord,
    ResizeStepRecord,
    RunRecord,
    RunReports,
    ThroughputPoint,
)
from ones_db.site import AccountingJob, ActionRecord, HealthRecord, Imported, NodeRecord, PastJob
from ones_db.store import Store
from ones_db.summary import JobSummary, TimelineRow
from ones_db.tables import SCHEMA_REVISION

__version__ = "0.2.0"

__all__ = [
    "RESIZE_DONE",
    "RESIZE_OVERTAKEN",
    "RESIZE_PREEMPTED",
    "SCHEMA_REVISION",
    "AccountingJob",
    "ActionRecord",
    "AlternativeRecord",
    "BlockRecord",
    "Database",
    "DecisionJobRecord",
    "DecisionRecord",
    "EpochPoint",
    "GuestRun",
    "HealthRecord",
    "HeldRecord",
    "Imported",
    "JobHistory",
    "JobRecord",
    "JobSummary",
    "LeaderRecord",
    "MembershipRecord",
    "NodeRecord",
    "NoisePoint",
    "NotLeader",
    "PastJob",
    "PlacedPoint",
    "PromiseRecord",
    "ReportLine",
    "ResizeConflict",
    "ResizeRecord",
    "ResizeStepRecord",
    "RunRecord",
    "RunReports",
    "SchemaError",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreLost",
    "ThroughputPoint",
    "TimelineRow",
    "UnknownRecord",
    "connect",
]
