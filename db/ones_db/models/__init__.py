"""The tables, as SQLAlchemy 2 typed models. Types are portable; every column says what it means and its unit.

Jobs are keyed (cluster, job id, submission), since Slurm starts its job ids anew; runs (job, restart); what a
run reported (run, number of the report), so that reading a report file twice changes nothing.
"""

from __future__ import annotations

from ones_db.models.base import SCHEMA_REVISION, Base
from ones_db.models.decided import Alternative, Decision, DecisionJob, Resize, ResizeStep
from ones_db.models.jobs import Cluster, Job, Run
from ones_db.models.reports import BatchChange, Checkpoint, EpochEnd, ThroughputSample
from ones_db.models.site import Accounting, Action, Health, Leader, Node, NodeChange, RollUp

__all__ = [
    "SCHEMA_REVISION",
    "Accounting",
    "Action",
    "Alternative",
    "Base",
    "BatchChange",
    "Checkpoint",
    "Cluster",
    "Decision",
    "DecisionJob",
    "EpochEnd",
    "Health",
    "Job",
    "Leader",
    "Node",
    "NodeChange",
    "Resize",
    "ResizeStep",
    "RollUp",
    "Run",
    "ThroughputSample",
]
