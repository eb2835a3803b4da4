"""Database with the history of a cluster's jobs, and the store that reads and writes it.

The package works without the companion, for example in a notebook::

    from ones_db import Store

    with Store.open("sqlite:///ones.sqlite", "cluster-name", read_only=True) as store:
        for row in store.job_summaries():
            print(row.job_id, row.jct_s, row.accuracy)

With pandas there is also `ones_db.connect("sqlite:///ones.sqlite").job_summary()`. docs/database.md shows what else can
be asked. `ones_db.migrate` creates and upgrades databases; `ones_db.tables` defines the tables.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036, since an installer sees to it, but a path set by hand does not
    sys.exit(f"ones_db needs Python 3.10 or newer; {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}")

from ones_db.backend import NotLeader as NotLeader
from ones_db.backend import ResizeConflict as ResizeConflict
from ones_db.backend import SchemaError as SchemaError
from ones_db.backend import StoreBusy as StoreBusy
from ones_db.backend import StoreError as StoreError
from ones_db.backend import StoreLost as StoreLost
from ones_db.backend import UnknownRecord as UnknownRecord
from ones_db.engine import LeaderRecord as LeaderRecord
from ones_db.query import Database as Database
from ones_db.query import connect as connect
from ones_db.records import RESIZE_DONE as RESIZE_DONE
from ones_db.records import RESIZE_OVERTAKEN as RESIZE_OVERTAKEN
from ones_db.records import RESIZE_PREEMPTED as RESIZE_PREEMPTED
from ones_db.records import AlternativeRecord as AlternativeRecord
from ones_db.records import BlockRecord as BlockRecord
from ones_db.records import DecisionJobRecord as DecisionJobRecord
from ones_db.records import DecisionRecord as DecisionRecord
from ones_db.records import EpochPoint as EpochPoint
from ones_db.records import GuestRun as GuestRun
from ones_db.records import HeldRecord as HeldRecord
from ones_db.records import JobHistory as JobHistory
from ones_db.records import JobRecord as JobRecord
from ones_db.records import MembershipRecord as MembershipRecord
from ones_db.records import NoisePoint as NoisePoint
from ones_db.records import PlacedPoint as PlacedPoint
from ones_db.records import PromiseRecord as PromiseRecord
from ones_db.records import ReportLine as ReportLine
from ones_db.records import ResizeRecord as ResizeRecord
from ones_db.records import ResizeStepRecord as ResizeStepRecord
from ones_db.records import RunRecord as RunRecord
from ones_db.records import RunReports as RunReports
from ones_db.records import ThroughputPoint as ThroughputPoint
from ones_db.site import AccountingJob as AccountingJob
from ones_db.site import ActionRecord as ActionRecord
from ones_db.site import HealthRecord as HealthRecord
from ones_db.site import Imported as Imported
from ones_db.site import NodeRecord as NodeRecord
from ones_db.site import PastJob as PastJob
from ones_db.store import Store as Store
from ones_db.summary import TimelineRow as TimelineRow
from ones_db.tables import SCHEMA_REVISION as SCHEMA_REVISION
from ones_db.views import JobSummary as JobSummary

__version__ = "0.2.0"
