"""What goes into the store and comes out of it: plain frozen data.

All times are Unix seconds. A batch is a global batch in samples. Text is stored as it came: whoever prints it
guards the terminal. Fields named like those of the reports that jobs write mean the same.
"""

from __future__ import annotations

from ones_db.records.decided import (
    RESIZE_DONE,
    RESIZE_ROLLED_BACK,
    AlternativeRecord,
    DecisionJobRecord,
    DecisionRecord,
    ResizeRecord,
    ResizeStepRecord,
)
from ones_db.records.history import EpochPoint, JobHistory, NoisePoint, ThroughputPoint
from ones_db.records.jobs import JobRecord, RunRecord, SpecRecord
from ones_db.records.reason import NO_REASON, ReasonRecord
from ones_db.records.reports import (
    AnyReport,
    BatchRecord,
    ByeRecord,
    CheckpointRecord,
    EpochRecord,
    FirstRecord,
    HelloRecord,
    RunReports,
    ThroughputRecord,
)
from ones_db.records.site import (
    AccountingJob,
    ActionRecord,
    HealthRecord,
    Imported,
    LeaderRecord,
    NodeChange,
    NodeRecord,
    PastJob,
    RolledUp,
)
from ones_db.records.tables import JobSummary, TimelineRow

__all__ = [
    "NO_REASON",
    "RESIZE_DONE",
    "RESIZE_ROLLED_BACK",
    "AccountingJob",
    "ActionRecord",
    "AlternativeRecord",
    "AnyReport",
    "BatchRecord",
    "ByeRecord",
    "CheckpointRecord",
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
    "PastJob",
    "ReasonRecord",
    "ResizeRecord",
    "ResizeStepRecord",
    "RolledUp",
    "RunRecord",
    "RunReports",
    "SpecRecord",
    "ThroughputPoint",
    "ThroughputRecord",
    "TimelineRow",
]
