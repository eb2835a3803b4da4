"""When a job is left in peace: between two resizes, once it had too many, and near its end.

Whether a change pays is the policy's business. What is here is a guard against figures that waver: whatever a policy
makes of them, a job trains for a multiple of the time that resizes interrupt it. So how long follows from what a resize
costs, as far as the site does not say it: of a requeue as measured of the job's last ones, of blocks as their changes.
"""

from __future__ import annotations

import math

import numpy as np

from ones_db import JobHistory
from ones_db.reasons import Reason, reason
from slurm_ones.config import LimitSettings, ResizeSettings
from slurm_ones.learn.learner import RESIZE_S
from slurm_ones.policy.contract import JobView
from slurm_ones.policy.tables import predict
from slurm_ones.slurm.model import Job

HOUR_S = 3600.0
SURE = 0.9
"""Chance with which a job that is said to be near its end is."""

MOST_DOUBLINGS = 6
AGAIN_S = 5.0
"""What failures double is at least so long, where there is a dwell time at all."""
WORTH = 20.0
"""A job trains at least so many times as long as changes of its blocks interrupt it."""
PACK_S = 120.0
"""A job of blocks that moves to fewer nodes, and has as many GPUs as before, has had them for so long."""
REPAYS = 4.0
"""A job trains at least so many times as long as a requeue interrupts it: at most a fifth of its time is lost."""
ENDS = 2.0
"""A job that ends within so many times as long as a requeue would interrupt it is left as it is."""
LONGEST_S = 1800.0
"""No wait that follows from pauses is longer: jobs themselves say when they paused, and one that rests gives up no GPUs
to others."""


def requeue_s(history: JobHistory | None) -> float:
    """Seconds that a requeue interrupts the job: the mean of its last few."""
    return history.pause_s if history is not None and history.pause_s is not None else RESIZE_S


def requeue_dwell_s(history: JobHistory | None, settings: ResizeSettings) -> float:
    """Least time between two requeues of a job."""
    return settings.dwell_s if settings.dwell_s is not None else min(REPAYS * requeue_s(history), LONGEST_S)


def requeue_near_end_s(history: JobHistory | None, limits: LimitSettings) -> float:
    """How long before its end a job is no longer requeued."""
    return limits.near_end_s if limits.near_end_s is not None else min(ENDS * requeue_s(history), LONGEST_S)


def switch_dwell_s(switch_s: float, settings: ResizeSettings) -> float:
    """Least time between two changes of the blocks of a job, each of which is expected to interrupt it so long."""
    most = LONGEST_S if settings.dwell_s is None else settings.dwell_s
    return min(most, max(settings.blocks_dwell_s, WORTH * switch_s))


def pack_dwell_s(dwell_s: float) -> float:
    """How long a job of blocks keeps its GPUs before blocks on fewer nodes take their place for that alone: it holds
    both while these prepare, which must pay in the time that the next change leaves it."""
    return max(dwell_s, PACK_S)


def switch_near_end_s(view: JobView, settings: ResizeSettings, limits: LimitSettings) -> float:
    """How long before its end the blocks of a job are left as they are: as long as others would take to train with it.
    Whether a change before that pays is the policy's business."""
    most = math.inf if limits.near_end_s is None else limits.near_end_s
    return min(most, settings.blocks_wait_s, view.prepare_s + view.resize_s)


def rested_at(job: Job, history: JobHistory | None, dwell_s: float, *, by_blocks: bool = False) -> float:
    """When the job may be resized (again): the dwell time after its start and its last resize. Of a job that changes
    `by_blocks` its start is no reason to wait: it cost no training, as a requeue does.

    Resizes in a row that did not take effect double it, up to 64 times: what Slurm refused or kept waiting (a limit of
    the user's, say) it will mostly refuse again, and each try costs a running job a restart. A job that waits is
    otherwise free at once, since nothing of it is interrupted.
    """
    failures = history.failures if history is not None else 0
    last = (history.last_resize_end if history is not None else None) or 0.0
    wait_s = max(dwell_s, AGAIN_S) * 2.0 ** min(failures, MOST_DOUBLINGS) if failures and dwell_s else dwell_s
    again = last + wait_s
    if job.running and not by_blocks:
        return max(job.start_time + dwell_s, again)
    return again if failures or job.running else 0.0


def resized_enough(job: Job, history: JobHistory | None, limits: LimitSettings, now: float) -> Reason | None:
    """Why a job that runs may not be interrupted again, or not yet."""
    if history is None or not job.running:
        return None
    most, hourly = limits.resizes_per_job, limits.resizes_per_hour
    if most is not None and len(history.interrupted) >= most:
        return reason("resizes_per_job", times=most)
    if hourly is not None and sum(begun > now - HOUR_S for begun in history.interrupted) >= hourly:
        return reason("resizes_per_hour", times=hourly)
    return None


def near_limit(job: Job, limits: LimitSettings, now: float) -> Reason | None:
    """That the job reaches its time limit soon; None where it does not."""
    if job.running and job.time_limit_s and job.start_time + job.time_limit_s - now < limits.near_limit_s:
        return reason("near_time_limit", seconds=limits.near_limit_s)
    return None


def near_end(view: JobView, within_s: float) -> Reason | None:
    """That the job is as good as sure to end soon at what it has; None where it is not, or where it waits."""
    if view.shape is None or not view.dataset or not within_s:
        return None
    left = view.progress.to_come(SURE) * view.dataset
    nodes, gpus = np.array([view.shape.nodes]), np.array([view.shape.gpus])
    _, goodput = predict(view, nodes, gpus, np.array([[max(view.batch, 1)]]))
    seconds = left / float(goodput[0, 0])
    if math.isfinite(seconds) and seconds < within_s:
        return reason("near_end", seconds=within_s)
    return None
