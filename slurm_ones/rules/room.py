"""GPUs for what begins in a round: those that are free, and those that others are about to give up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ones_db.shape import Shape
from slurm_ones.rules.gate import JobRules, PartitionRules, WaitingStart


class GpuPool:
    """The free GPUs of a partition's nodes as a plan hands them out. GPUs that blocks give up are free once they have
    left, after this round; until then they are set aside for jobs that wait for them."""

    def __init__(self, rules: PartitionRules) -> None:
        self.free = rules.free.trial()
        """By node, without what is set aside."""
        self._kinds, self._later, self._closed = rules.kinds, rules.later, rules.closed
        self._given: Counter[str] = Counter()
        self._known = True
        for job in rules.jobs.values():
            if job.target is not None and job.elastic.job.running:
                self.leave(job, job.moves.dropped if job.moves else None)

    def leave(self, job: JobRules, tasks: Collection[int] | None) -> None:
        """The job gives up these of its blocks; without `tasks`, what Slurm makes of its requeue."""
        self._known = self._known and tasks is not None
        for block in job.blocks:
            if tasks is not None and block.task in tasks:
                self._given.update(dict.fromkeys({*block.nodes} - self._closed, block.shape.gpus_per_node))

    def take(self, shape: Shape, kind: str) -> bool:
        """Take free GPUs of that kind, of any where it is empty; False, with nothing changed, where there are none."""
        return self.free.take(shape, only=self._kinds.nodes(kind))

    def set_aside(self, waiting: Sequence[WaitingStart]) -> set[int]:
        """Set GPUs aside where there will be some for these jobs, and before them for those that earlier rounds have
        reshaped: nobody else may have what is free of those already. Returns the jobs for which there will be none, as
        far as that is known."""
        after = self.free.trial()
        after.give(self._given)
        without = {
            start.job_id
            for start in (*self._later, *waiting)
            if not after.take(start.shape, only=self._kinds.nodes(start.kind))
        }
        self.free = self.free.at_most(after)
        return without if self._known else set()
