"""The work of a study as the bound sees it: which curve each job has, and when it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_ones.schedule.policy import Floats, Ints
from slurm_ones.simulate.bound.curves import Curve, KindCurve, Pool, curves_of, key_of
from slurm_ones.simulate.workloads.workload import Workload


@dataclass(frozen=True)
class Work:
    """Jobs (J,): the curve of each, and when it is submitted, on so many GPUs (`Curve.sizes`)."""

    curves: Sequence[Curve]
    curve: Ints
    submitted: Floats
    gpus: float

    @property
    def alone_s(self) -> Floats:
        """(J,) seconds of each job with every GPU that it can use."""
        each = np.array([curve.alone_s for curve in self.curves])
        result: Floats = each[self.curve]
        return result


@dataclass(frozen=True)
class KindWork:
    """The same on GPUs of several kinds: jobs (J,), and how many GPUs `there` are of each kind (K,)."""

    curves: Sequence[KindCurve]
    curve: Ints
    submitted: Floats
    there: Ints

    def counted(self, weights: Floats) -> Work:
        """The work where a GPU of kind k counts as `weights[k]`."""
        curves = [curve.counted(weights, self.there) for curve in self.curves]
        return Work(curves, self.curve, self.submitted, float(weights @ self.there))


def work_of(workload: Workload, pools: Sequence[Pool], parts: int) -> KindWork:
    """The work of a workload, trainings cut into so many parts."""
    curves = curves_of(workload, pools, parts)
    rows = {key: row for row, key in enumerate(curves)}
    jobs = workload.submissions
    curve = np.array([rows[key_of(job, workload.applications[job.application])] for job in jobs])
    there = np.array([pool.gpus for pool in pools])
    return KindWork(tuple(curves.values()), curve, np.array([job.time for job in jobs]), there)
