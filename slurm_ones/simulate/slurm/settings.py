"""What a simulated cluster and its jobs are like, beyond the policies' business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterSettings:
    """Times in seconds. Slurm's own are its defaults; faults are off, as shares of calls or mean times between."""

    requeue_delay_s: float = 121.0
    """A requeued job starts this much later, unless its start is set anew."""
    schedule_s: float = 1.0
    """From a change to Slurm's main scheduling, which starts jobs in their order up to the first that finds no room."""
    backfill_s: float = 30.0
    """Between two rounds of backfill, which starts those behind it that do not delay it."""
    ending_s: float = 1.0
    """A job that ended holds its GPUs until its last processes are gone."""
    min_job_age_s: float = 300.0
    """Slurm forgets a job this long after its end."""
    time_limit_s: float = 0.0
    """Limit of every job; 0 for none. Slurm plans with a year where there is none."""

    report_s: float = 30.0
    """Between two throughput reports of a job. The wrapper's are 2 s apart, of which the companion sees one a tick."""
    first_report_s: float = 30.0
    """From a run's first step to its first throughput report."""
    checkpoint_s: float = 600.0
    """Between two checkpoints that a job takes unasked: the wrapper's default."""
    stall_s: float = 0.0
    """For how long such a checkpoint stops the training; the published studies count nothing."""
    speed_noise: float = 0.05
    """Standard deviation of the logarithm of a reported throughput."""
    gradient_noise: float = 0.15
    """The same of a reported gradient noise scale."""
    save: float = 0.1
    """Share of a resize's cost that is spent on its checkpoint …"""
    stop: float = 0.1
    """… on ending the old run's processes …"""
    launch: float = 0.5
    """… on starting the new run's ranks, which a first start costs as well …"""
    load: float = 0.3
    """… and on loading the checkpoint."""

    refused: float = 0.0
    """Share of the updates of a shape that Slurm refuses."""
    partial: float = 0.0
    """Share of those that it takes in part, the nodes without the GPUs, and then refuses."""
    requeue_refused: float = 0.0
    """Share of the requeues that it refuses."""
    unreachable: float = 0.0
    """Share of the calls that get no answer; half of those have taken effect."""
    node_mtbf_s: float = 0.0
    """Mean time between two failures of a node, 0 for never. Slurm requeues its jobs."""
    node_repair_s: float = 1800.0
    """How long it is down."""
    preempt_mtbf_s: float = 0.0
    """Mean time until Slurm requeues a running job by itself, as preemption does; 0 for never."""
