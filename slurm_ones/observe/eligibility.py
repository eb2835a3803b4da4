"""Which jobs may be resized, within what, and why the others may not."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.observe.optin import BadComment, OptIn, parse_comment
from slurm_ones.slurm.gpus import partition_gpus
from slurm_ones.slurm.model import Job, Shape, Snapshot


@dataclass(frozen=True)
class Elastic:
    """A job that opted in. Where `refusal` says something, it is measured and left alone."""

    job: Job
    optin: OptIn | None
    gpus_per_node: int
    """GPUs of a full node of its partition."""
    whole_nodes: bool
    refusal: str = ""
    """Why it is not resized, in words for its owner; empty where it may be."""

    @property
    def shape(self) -> Shape:
        """Nodes × GPUs per node that it has or asks for."""
        return Shape(self.job.nodes, self.gpus_per_node if self.whole_nodes else self.job.gpus_per_node)

    @property
    def weighed(self) -> bool:
        """A policy is shown it, if only as one that keeps what it has; what others hold is not the policy's."""
        return self.optin is not None and self.shape.gpus > 0

    @property
    def gpu_range(self) -> tuple[int, int]:
        """Fewest and most GPUs its owner allows."""
        if self.optin is not None and self.optin.gpus is not None:
            return self.optin.gpus
        if self.optin is not None and self.optin.nodes is not None:
            low, high = self.optin.nodes
            return low * self.gpus_per_node, high * self.gpus_per_node
        return self.shape.gpus, self.shape.gpus


@dataclass(frozen=True)
class Observation:
    """What a tick has seen: the whole queue, and of it the jobs that opted in and have not ended."""

    snapshot: Snapshot
    elastic: dict[int, Elastic]


def _refusal(job: Job, optin: OptIn, gpus_per_node: int, whole: bool, own_uid: int | None) -> str:
    if own_uid is not None and job.uid != own_uid:
        return f"it belongs to {job.user}, and this companion looks after its own user's jobs alone"
    if job.array:
        return "job arrays and heterogeneous jobs are not resized: submit it as a job of its own"
    if not job.batch:
        return "it is interactive, and Slurm requeues batch jobs alone: submit it with sbatch"
    if not job.requeue:
        return "it was submitted without --requeue: submit with --requeue, or run scontrol update JobId=… Requeue=1"
    if job.task_counts:
        return "it was submitted with task counts, which Slurm does not let its user change: leave out --ntasks…"
    if gpus_per_node == 0:
        return (
            f"Slurm knows of no GPUs in partition {job.partition}: name the GPUs of a node in "
            f"whole_node_gpus.{job.partition} of the companion's settings"
        )
    if not whole and job.gpus_per_node == 0:
        return "it asks for GPUs per job, not per node: submit with --nodes and --gres=gpu:N"
    if not optin.resize:
        return "resize=off: it is measured, not resized"
    return ""


def elastic_job(job: Job, snapshot: Snapshot, whole_node_gpus: dict[str, int], own_uid: int | None) -> Elastic | None:
    """What the job's owner allows; None for a job that did not opt in, which is never touched."""
    try:
        optin, misread = parse_comment(job.comment), ""
    except BadComment as error:
        optin, misread = None, f"its comment is not understood: {error}"
    if optin is None and not misread:
        return None
    # A pending job may name several partitions; it is judged by the first.
    partition = snapshot.partitions.get(job.partition.split(",")[0])
    gpus, whole = (0, False)
    if partition is not None:
        gpus, whole = partition_gpus(partition, snapshot, whole_node_gpus)
    if optin is None:
        return Elastic(job, None, gpus, whole, misread)
    return Elastic(job, optin, gpus, whole, _refusal(job, optin, gpus, whole, own_uid))
