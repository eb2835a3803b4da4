"""Which jobs may be resized, within what, and why the others may not."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.observe.optin import BadComment, OptIn, parse_comment
from slurm_ones.reasons import Reason, reason
from slurm_ones.slurm.model import Job, Shape, Snapshot, partition_gpus


@dataclass(frozen=True)
class Elastic:
    """A job that opted in. Where it has a `refusal`, it is measured and left alone."""

    job: Job
    optin: OptIn | None
    gpus_per_node: int
    """GPUs of a full node of its partition."""
    whole_nodes: bool
    refusal: Reason | None = None
    """Why it is not resized; None where it may be."""
    blocks: tuple[Job, ...] = ()
    """Of a job of blocks its tasks that Slurm knows, each a job of its own, ascending; `job` is then all of them."""

    @property
    def shape(self) -> Shape:
        """Nodes × GPUs per node that it has or asks for."""
        return Shape(self.job.nodes, self.gpus_per_node if self.whole_nodes else self.job.gpus_per_node)

    @property
    def holdings(self) -> dict[str, int]:
        """GPUs that it holds on each of its nodes; none unless it runs."""
        return dict.fromkeys(self.job.node_list, self.shape.gpus_per_node) if self.job.running else {}

    @property
    def partition(self) -> str:
        """The partition whose jobs it competes with: of several, which a pending job may name, the first."""
        return self.job.partition.split(",")[0]

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
    """What a tick has observed: the whole queue, and of it the jobs that opted in and have not ended."""

    snapshot: Snapshot
    elastic: dict[int, Elastic]


def _refusal(job: Job, optin: OptIn, gpus_per_node: int, whole: bool, own_uid: int | None) -> Reason | None:
    if own_uid is not None and job.uid != own_uid:
        return reason("other_user", user=job.user)
    if job.array:
        return reason("job_array")
    if not job.batch:
        return reason("interactive")
    if not job.requeue:
        return reason("not_requeueable")
    if job.task_counts:
        return reason("task_counts")
    if gpus_per_node == 0:
        return reason("gpus_unknown", partition=job.partition)
    if not whole and job.gpus_per_node == 0:
        return reason("gpus_per_job")
    if not optin.resize:
        return reason("resize_off")
    return None


def elastic_job(job: Job, snapshot: Snapshot, whole_node_gpus: dict[str, int], own_uid: int | None) -> Elastic | None:
    """What the job's owner allows; None for a job that did not opt in, which is never touched."""
    try:
        optin, misread = parse_comment(job.comment), None
    except BadComment as error:
        optin, misread = None, reason("bad_comment", problem=str(error))
    if optin is None and misread is None:
        return None
    # A pending job may name several partitions; the first counts.
    partition = snapshot.partitions.get(job.partition.split(",")[0])
    gpus, whole = (0, False)
    if partition is not None:
        gpus, whole = partition_gpus(partition, snapshot, whole_node_gpus)
    if optin is None:
        return Elastic(job, None, gpus, whole, misread)
    return Elastic(job, optin, gpus, whole, _refusal(job, optin, gpus, whole, own_uid))
