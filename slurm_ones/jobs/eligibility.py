"""Which jobs may be resized, within what, and why the others may not."""

from __future__ import annotations

from dataclasses import dataclass, field

from ones_db.reasons import Reason, reason
from ones_db.shape import Shape
from slurm_ones.jobs.blocks import BlockJob
from slurm_ones.jobs.optin import ANY, BadComment, OptIn, near_miss, parse_comment
from slurm_ones.slurm.model import Job, Snapshot, partition_gpus


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
    """Of a job of blocks its tasks that Slurm knows, each a job of its own, ascending; `job` is then all of them
    (`jobs.blocks`)."""

    @property
    def shape(self) -> Shape:
        """Nodes × GPUs per node that it has or asks for. For blocks that hold unequally many GPUs of their nodes, one
        node with all GPUs stands."""
        if self.blocks and self.job.running:
            return self._shape_of_blocks()
        return self.shape_of(self.job)

    @property
    def holdings(self) -> dict[str, int]:
        """GPUs that it holds on each of its nodes; none unless it runs."""
        if not self.job.running:
            return {}
        held: dict[str, int] = {}
        for job in self.running_blocks or (self.job,):
            for node in job.node_list:
                held[node] = held.get(node, 0) + self.shape_of(job).gpus_per_node
        return held

    @property
    def running_blocks(self) -> tuple[Job, ...]:
        """Of a job of blocks: those that run."""
        return tuple(job for job in self.blocks if job.running)

    def shape_of(self, job: Job) -> Shape:
        """Nodes × GPUs per node of the job, or of one of its blocks."""
        return Shape(job.nodes, self.gpus_per_node if self.whole_nodes else job.gpus_per_node)

    def _shape_of_blocks(self) -> Shape:
        shapes, held = [self.shape_of(job) for job in self.running_blocks], self.holdings
        each = set(held.values())
        if len(each) == 1 and sum(held.values()) == sum(shape.gpus for shape in shapes):
            return Shape(len(held), each.pop())
        return Shape(1, sum(shape.gpus for shape in shapes))

    @property
    def partition(self) -> str:
        """The partition whose jobs it competes with: of several, which a pending job may name, the first."""
        return self.job.partition

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

    def allows(self, gpus: int) -> bool:
        """Whether its owner's range holds this number of GPUs, by its steps."""
        low, high = self.gpu_range
        return low <= gpus <= high and (gpus - low) % (self.optin.step if self.optin is not None else 1) == 0


@dataclass(frozen=True)
class Observation:
    """What a tick has observed: the whole queue, and of it the jobs that opted in and have not ended."""

    snapshot: Snapshot
    """With one job in place of the tasks of each job of blocks."""
    elastic: dict[int, Elastic]
    left: dict[int, Elastic] = field(default_factory=dict)
    """Jobs of blocks that have ended, while tasks of theirs still wait in a hold."""


def _refusal(
    job: Job,
    optin: OptIn,
    gpus_per_node: int,
    whole: bool,
    own_uid: int | None,
    blocks: BlockJob | None,
    snapshot: Snapshot,
) -> Reason | None:
    if own_uid is not None and job.uid != own_uid:
        return reason("other_user", user=job.user)
    if optin.blocks and not job.array:
        return reason("blocks_no_array")
    if job.array and blocks is None and (refused := _task_refusal(job, snapshot)) is not None:
        return refused
    if blocks is not None and blocks.refusal is not None:
        return blocks.refusal
    if not job.batch:
        return reason("interactive")
    if not job.requeue:
        return reason("not_requeueable")
    if job.task_counts:
        return reason("task_counts")
    if gpus_per_node == 0:
        return reason("gpus_unknown", partition=job.partition)
    live = [one for one in blocks.blocks if not one.ended] if blocks is not None else [job]
    if not whole and any(one.gpus_per_node == 0 for one in live):
        return reason("gpus_per_job")
    if not all(one.of_one_kind for one in live):
        return reason("several_gpu_types")
    if (there := _strange_kinds(job, optin, snapshot)) is not None:
        return reason("kinds_nowhere", kinds=", ".join(optin.kinds), partition=job.partition, there=there)
    if not optin.resize:
        return reason("resize_off")
    return None


def _strange_kinds(job: Job, optin: OptIn, snapshot: Snapshot) -> str | None:
    """The types of GPU of the job's partition, where its owner names some and none of these; else None."""
    there = {*snapshot.kinds(job.partition).values()}
    strange = there and optin.kinds and ANY not in optin.kinds and there.isdisjoint(optin.kinds)
    return ", ".join(sorted(there)) if strange else None


def _task_refusal(job: Job, snapshot: Snapshot) -> Reason | None:
    """Why a task of a job array, which is a job of its own, is left as it is; also a part of a heterogeneous job."""
    if not job.array_id:
        return reason("job_array")
    if len(job.array_tasks) > 1:
        return reason("task_waits")
    if job.job_id == job.array_id:
        return reason("task_named_as_array")
    waiting = snapshot.jobs.get(job.array_id)
    if waiting is not None and waiting.pending and waiting.throttle:
        return reason("task_throttled", most=waiting.throttle)
    return None


def elastic_job(
    job: Job,
    snapshot: Snapshot,
    whole_node_gpus: dict[str, int],
    own_uid: int | None,
    blocks: BlockJob | None = None,
) -> Elastic | None:
    """What the job's owner allows; None for a job that did not opt in, which is never touched. `blocks` is the job of
    blocks of which `job` is the whole."""
    try:
        optin, right = parse_comment(job.comment), near_miss(job.comment)
        misread = reason("near_comment", right=right) if right else None
    except BadComment as error:
        optin, misread = None, reason("bad_comment", problem=str(error))
    if optin is None and misread is None:
        return None
    # A pending job may name several partitions; the first counts.
    partition = snapshot.partitions.get(job.partition)
    gpus, whole = (0, False)
    if partition is not None:
        gpus, whole = partition_gpus(partition, snapshot, whole_node_gpus)
    tasks = blocks.blocks if blocks is not None else ()
    if optin is None:
        return Elastic(job, None, gpus, whole, misread, tasks)
    return Elastic(job, optin, gpus, whole, _refusal(job, optin, gpus, whole, own_uid, blocks, snapshot), tasks)
