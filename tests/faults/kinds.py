"""The kinds of faults, by where they happen."""

from __future__ import annotations

from enum import Enum


class FaultKind(str, Enum):
    """What can go wrong. The value is its name in results."""

    # The companion's process and its host.
    CRASH = "companion killed"
    ABSENCE = "companion killed, and not back for an hour"
    RELOAD = "settings reloaded"
    STOP_FILE = "stop file made"
    CLOCK_FORWARD = "companion's clock jumps forwards"
    CLOCK_BACK = "companion's clock jumps back"
    PAUSED = "leader stopped until another leads"

    # The controller.
    TIMEOUT = "no answer, nothing done"
    TIMEOUT_DONE = "no answer, and done"
    DOWN = "controller down for minutes"
    UPDATE_REFUSED = "update refused"
    UPDATE_IN_PART = "update taken in part"
    UPDATE_LATER_BAD = "update taken, shape never to be had"
    REQUEUE_REFUSED = "requeue refused"
    RELEASE_REFUSED = "release refused"
    HOLD_REFUSED = "hold refused"
    DEFER_REFUSED = "earliest start refused"

    # The job's owner, an operator, other people.
    CANCELLED = "owner cancels"
    RELEASED = "owner releases"
    HELD = "owner holds"
    REQUEUED = "owner requeues"
    RESHAPED = "owner changes the shape"
    OPTED_OUT = "owner takes the opt-in back"
    RESIZE_OFF = "owner says resize=off"
    BAD_COMMENT = "owner writes a bad comment"
    BEGIN = "owner sets an earliest start"
    ADMIN_HOLD = "operator holds"
    RIGID = "rigid job arrives"

    # The cluster and the job's own run.
    FAILED = "job fails"
    NODE_FAILED = "node fails"
    NODE_DRAINED = "node drained"
    PREEMPTED = "job preempted"
    TIME_LIMIT = "time limit reached"

    # The database.
    STORE_BUSY = "database busy"
    STORE_LOST = "database lost before the commit"
    STORE_LOST_DONE = "database lost after the commit"
    STORE_FULL = "database's disk full"

    # Files that the companion writes and reads.
    ORDER_FULL = "disk full for an order"
    READ_ERROR = "report cannot be read"

    # What the job writes and reads.
    CUT_SHORT = "report cut short"
    REPEATED = "reports repeated"
    REORDERED = "reports reordered"
    LATE = "reports late"
    MISSING = "report missing"
    GARBAGE = "garbage among the reports"
    WRONG_TYPES = "reports of wrong types"
    HUGE = "huge report line"
    LIES = "reports that lie"
    FALSE_CHECKPOINT = "checkpoint reported that was never made"
    JOB_CLOCK = "job's clock off"
    JOB_DISK_FULL = "checkpoint fails, disk full"
    NO_MANIFEST = "checkpoint without its manifest"
    ORDER_LOST = "order not seen"
    DRAIN_IGNORED = "drain ignored"

    # Jobs of blocks.
    NEWCOMER_DIED = "new block dies"
    LEADER_DIED = "leader dies"
    BLOCK_DIED = "block dies"
    LOST_IN_SWITCH = "block lost in the switch"
    STORE_OF_JOB_LOST = "job's hot store lost"
    BLOCK_REQUEUED = "block requeued by Slurm"
    BLOCK_CANCELLED = "owner cancels a block"
    BLOCK_HELD = "owner holds a block"
    BLOCK_RELEASED = "owner releases a block"
    SPLIT_VIEW = "memberships reported that contradict"
    PLAN_LATE = "order read late"
    ORDERS_REORDERED = "orders reordered"
    THROTTLE_REFUSED = "throttle refused"
    REUSE_REFUSED = "reuse refused"
    CANCEL_REFUSED = "cancelling what waits refused"

    # Blocks that Slurm takes back.
    PREEMPTED_BLOCK = "block preempted"
    PREEMPTED_KILLED = "block preempted, and killed in its step"
    PREEMPTED_TWO = "two blocks preempted at once"
    PREEMPTED_LEADER = "leader preempted"
    PREEMPTED_NEWCOMER = "block preempted while it joins"
    PREEMPTED_LEAVING = "block preempted in the switch"
    PREEMPTED_ALONE = "block preempted, the companion being dead"
    PREEMPTED_DOWN = "block preempted, and the controller killed in that second"
    PREEMPTED_AGAIN = "block requeued while it completes"
    PREEMPTED_OFTEN = "one block preempted ten times"
    PREEMPTED_ENDED = "block preempted that may not be requeued"
    PREEMPTED_EXIT = "block requeued for its exit code"
    OTHER_JOB = "job of another partition or need arrives"


BY_OTHERS = (
    FaultKind.CANCELLED,
    FaultKind.RELEASED,
    FaultKind.HELD,
    FaultKind.REQUEUED,
    FaultKind.RESHAPED,
    FaultKind.OPTED_OUT,
    FaultKind.RESIZE_OFF,
    FaultKind.BAD_COMMENT,
    FaultKind.BEGIN,
    FaultKind.ADMIN_HOLD,
    FaultKind.RIGID,
    FaultKind.FAILED,
    FaultKind.NODE_FAILED,
    FaultKind.NODE_DRAINED,
    FaultKind.PREEMPTED,
    FaultKind.STOP_FILE,
)
"""What others do, at a time of their own or in the very middle of a resize."""

TO_BLOCKS = (
    FaultKind.NEWCOMER_DIED,
    FaultKind.LEADER_DIED,
    FaultKind.BLOCK_DIED,
    FaultKind.LOST_IN_SWITCH,
    FaultKind.STORE_OF_JOB_LOST,
    FaultKind.BLOCK_REQUEUED,
    FaultKind.BLOCK_CANCELLED,
    FaultKind.BLOCK_HELD,
    FaultKind.BLOCK_RELEASED,
)
"""What happens to blocks of a job, as what others do."""

BY_PREEMPTION = tuple(kind for kind in FaultKind if kind.name.startswith("PREEMPTED_"))
"""What preemption does to blocks."""

AT_STEPS_OF_BLOCKS = (
    FaultKind.ORDERS_REORDERED,
    FaultKind.THROTTLE_REFUSED,
    FaultKind.REUSE_REFUSED,
    FaultKind.CANCEL_REFUSED,
    FaultKind.RELEASE_REFUSED,
    FaultKind.HOLD_REFUSED,
)
"""What is injected at a step of the companion that changes blocks."""

OF_BLOCKS = (FaultKind.SPLIT_VIEW, FaultKind.PLAN_LATE, FaultKind.ORDER_LOST)
"""What is wrong with a job of blocks itself."""

IN_REPORTS = (
    FaultKind.CUT_SHORT,
    FaultKind.REPEATED,
    FaultKind.REORDERED,
    FaultKind.LATE,
    FaultKind.MISSING,
    FaultKind.GARBAGE,
    FaultKind.WRONG_TYPES,
    FaultKind.HUGE,
)
"""What becomes of lines between a job and its reader."""

AT_STEPS = (
    FaultKind.CRASH,
    FaultKind.TIMEOUT,
    FaultKind.TIMEOUT_DONE,
    FaultKind.DOWN,
    FaultKind.UPDATE_REFUSED,
    FaultKind.UPDATE_IN_PART,
    FaultKind.UPDATE_LATER_BAD,
    FaultKind.REQUEUE_REFUSED,
    FaultKind.RELEASE_REFUSED,
    FaultKind.HOLD_REFUSED,
    FaultKind.DEFER_REFUSED,
    FaultKind.STORE_BUSY,
    FaultKind.STORE_LOST,
    FaultKind.STORE_LOST_DONE,
    FaultKind.STORE_FULL,
    FaultKind.ORDER_FULL,
    FaultKind.READ_ERROR,
    FaultKind.PAUSED,
)
"""What is injected at a step of the companion: a call, a write, a read."""

ON_HOST = (FaultKind.CLOCK_FORWARD, FaultKind.CLOCK_BACK, FaultKind.RELOAD)
"""What is injected between steps, at a time of its own."""

OF_JOBS = (
    FaultKind.LIES,
    FaultKind.FALSE_CHECKPOINT,
    FaultKind.JOB_CLOCK,
    FaultKind.JOB_DISK_FULL,
    FaultKind.NO_MANIFEST,
    FaultKind.ORDER_LOST,
    FaultKind.DRAIN_IGNORED,
)
"""What is wrong with a job itself."""
