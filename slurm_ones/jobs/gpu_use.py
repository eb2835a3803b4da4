"""GPU use of each job, measured by Slurm, or else reported by the job.

A job is idle if the mean use of its GPUs over `limits.idle_s` is below `limits.idle_use`. Reports count only for times
of training, and the mean starts again when the job's ranks change. So a block that loads data, joins or waits does not
look idle.

A false report of low use costs a job only its growth. A false report of high use has the effect of no report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ones_db import ReportLine
from ones_wrapper.protocol import Hello, Membership, Report, Throughput
from slurm_ones.config import LimitSettings
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.slurm.client import SlurmClient, SlurmError
from slurm_ones.slurm.model import GpuUse

LOOK_S = 300.0
"""Seconds between two readings of Slurm's measurements. A reading queries every node."""
MEASURED = 0.5
"""Fraction of `limits.idle_s` that measurements must cover before a job can count as idle."""
HOLDS = 3
"""Multiple of `limits.idle_s` for which a job counts as idle after it was last found idle."""


@dataclass
class _Window:
    began: float
    used_s: float = 0.0
    seconds: float = 0.0


class GpuUses:
    """GPU use of each job, in memory only: after a start of the companion no job is idle."""

    def __init__(self, client: SlurmClient, limits: LimitSettings) -> None:
        self._client, self._limits = client, limits
        self._looked = -math.inf
        self._by_slurm: dict[int, GpuUse] = {}
        """Mean use per GPU in Slurm's last measurement, by job id."""
        self._windows: dict[int, _Window] = {}
        self._found: dict[int, tuple[float, float]] = {}
        """Mean GPU use of each idle job, and the time at which it was last found idle, by job id."""

    @property
    def idle(self) -> dict[int, float]:
        """Mean GPU use, in [0, 1], of each idle job, by job id."""
        return {job_id: use for job_id, (use, _) in self._found.items()}

    def look(self, jobs: Mapping[int, Elastic], now: float) -> None:
        """Read Slurm's measurements if `LOOK_S` have passed, and forget jobs that are gone."""
        self._windows = {id_: one for id_, one in self._windows.items() if id_ in jobs}
        until = now - HOLDS * self._limits.idle_s
        self._found = {id_: one for id_, one in self._found.items() if id_ in jobs and one[1] > until}
        if not self._limits.idle_use or abs(now - self._looked) < LOOK_S:
            return
        self._looked = now
        running = {id_: one.job.running_blocks or (one.job.first,) for id_, one in jobs.items() if one.job.running}
        try:
            found = self._client.gpu_use([part.job_id for parts in running.values() for part in parts])
        except SlurmError:
            found = {}
        self._by_slurm = {}
        for job_id, parts in running.items():
            seen, gpus = [found[part.job_id] for part in parts if part.job_id in found], jobs[job_id].shape.gpus
            if len(seen) == len(parts) and gpus:
                each = GpuUse(min(sum(u.gpus for u in seen) / gpus, 1.0), sum(u.memory_bytes for u in seen) // gpus)
                self._by_slurm[job_id] = each
                self._add(job_id, each.gpus, LOOK_S, now)

    def read(self, job_id: int, lines: Iterable[ReportLine], now: float) -> list[ReportLine]:
        """Return the report lines to store, with Slurm's measured GPU use in place of the reported one."""
        reports = ((line, self._read(job_id, line.report, now)) for line in lines)
        return [line if report is line.report else replace(line, report=report) for line, report in reports]

    def _read(self, job_id: int, report: Report, now: float) -> Report:
        if isinstance(report, (Hello, Membership)):
            self._windows.pop(job_id, None)
        if not isinstance(report, Throughput):
            return report
        if (by_slurm := self._by_slurm.get(job_id)) is not None:
            return replace(report, gpu_use=by_slurm.gpus, gpu_memory=by_slurm.memory_bytes)
        if report.gpu_use is None:
            return report
        use = min(max(report.gpu_use, 0.0), 1.0)
        self._add(job_id, use, min(report.seconds, self._limits.idle_s), now)
        return replace(report, gpu_use=use)

    def _add(self, job_id: int, use: float, seconds: float, now: float) -> None:
        wanted, over_s = self._limits.idle_use, self._limits.idle_s
        window = self._windows.setdefault(job_id, _Window(now))
        window.used_s, window.seconds = window.used_s + use * seconds, window.seconds + seconds
        if 0.0 <= now - window.began < over_s:
            return
        del self._windows[job_id]
        self._found.pop(job_id, None)
        mean = window.used_s / max(window.seconds, 1.0)
        if wanted and window.seconds >= MEASURED * over_s and mean < wanted:
            self._found[job_id] = mean, now
