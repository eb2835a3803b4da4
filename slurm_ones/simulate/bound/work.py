"""The work of a study as the bound sees it: which curve each job has, and when it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.schedule.policy import Floats, Ints
from slurm_ones.simulate.bound.curves import Curve, curves_of, key_of
from slurm_ones.simulate.workloads.workload import Workload


@dataclass(frozen=True)
class Work:
    """Jobs (J,): the curve of each, and when it is submitted, on so many GPUs."""

    curves: Sequence[Curve]
    curve: Ints
    submitted: Floats
    gpus: int

    @property
    def alone_s(self) -> Floats:
        """(J,) seconds of each job with every GPU that it can use."""
        each = np.array([curve.alone_s for curve in self.curves])
        result: Floats = each[self.curve]
        return result


def work_of(workload: Workload, nodes: int, per_node: int, parts: int) -> Work:
    """The work of a workload on equal nodes, trainings cut into so many parts."""
    curves = curves_of(workload, nodes, per_node, parts)
    rows = {key: row for row, key in enumerate(curves)}
    jobs = workload.submissions
    curve = np.array([rows[key_of(job, workload.applications[job.application])] for job in jobs])
    return Work(tuple(curves.values()), curve, np.array([job.time for job in jobs]), nodes * per_node)
