"""What a demo says of its jobs: a line for each change while it runs, and at the end whether every sample was used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ones_db import JobSummary, Store
from slurm_ones.demo.jobs import SIMULATED
from slurm_ones.demo.local_slurm import Submitted
from slurm_ones.text import plain, seconds

SIMULATED_EVERY_S = 10.0
"""Between two lines about the simulated jobs."""


def size_of(job: JobSummary) -> int:
    """GPUs of its newest run."""
    return job.shape.gpus if job.shape else 0


class DemoProgress:
    """Looks into the job database, and says what is new there."""

    def __init__(self, say: Callable[[float, str], None], began: float) -> None:
        self._say, self._began = say, began
        self._sizes: dict[int, int] = {}
        """GPUs of each training, as last said."""
        self._told: dict[int, int] = {}
        """Memberships of each that were looked at."""
        self._ended: set[int] = set()
        self.states: dict[int, str] = {}
        """Of each job, as last seen."""
        self._next = SIMULATED_EVERY_S
        self.grown: Counter[int] = Counter()
        """How often each training changed to more GPUs while it trained …"""
        self.shrunk: Counter[int] = Counter()
        """… and to fewer."""

    def look(self, store: Store, submitted: Sequence[Submitted], now: float) -> list[JobSummary]:
        """One look at `now`, Unix seconds; all jobs that the companion knows."""
        jobs = store.job_summaries()
        by_id = {job.job_id: job for job in jobs}
        self.states = {job.job_id: job.state for job in jobs}
        for one in submitted:
            job = by_id.get(one.job_id)
            if job is not None:
                self._changes(store, job)
        simulated = [job for job in jobs if job.user == SIMULATED]
        if any(job.end_time is None for job in simulated) and now - self._began >= self._next:
            self._next = now - self._began + SIMULATED_EVERY_S
            self._say(now, f"simulated jobs: {_line(simulated)}")
        return jobs

    def _changes(self, store: Store, job: JobSummary) -> None:
        name = plain(job.name, 40)
        told = [record for record in reversed(store.memberships(job.job_id)) if record.report.world]
        for record in told[self._told.get(job.job_id, 0) :]:
            before, now = self._sizes.get(job.job_id, 0), record.report.world
            if not before:
                self._say(record.time, f"{name} trains on {now} GPU{'s' * (now > 1)}")
            elif now != before:
                (self.grown if now > before else self.shrunk)[job.job_id] += 1
                word = "grew" if now > before else "shrank"
                self._say(
                    record.time,
                    f"{name} {word} from {before} to {now} GPUs while it trained; "
                    f"it stood still for {record.report.pause_s:.2f} s",
                )
            self._sizes[job.job_id] = now
        self._told[job.job_id] = len(told)
        if job.end_time is not None and job.job_id not in self._ended:
            self._ended.add(job.job_id)
            accuracy = f", accuracy {job.accuracy:.3f}" if job.accuracy is not None else ""
            self._say(
                job.end_time, f"{name} has ended: {job.state} {seconds(job.jct_s)} after its submission{accuracy}"
            )


def _line(jobs: Sequence[JobSummary]) -> str:
    running = [f"{plain(job.name, 40)} on {size_of(job)}" for job in jobs if job.running and job.end_time is None]
    waiting = sum(not job.running and job.end_time is None for job in jobs)
    ended = sum(job.end_time is not None for job in jobs)
    return "; ".join([*running, f"{waiting} wait, {ended} have ended"])


def samples_line(one: Submitted, folder: Path) -> tuple[bool, str]:
    """Whether the training used each sample of each epoch exactly once, by what each of its ranks wrote down, and a
    sentence about it."""
    used: Counter[tuple[int, int]] = Counter()
    for path in sorted((folder / f"ones-{one.job_id}").glob("trace-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            used.update((line["epoch"], sample) for sample in line.get("samples", ()))
    wanted = one.job.epochs * one.job.samples
    known = {(epoch, sample) for epoch in range(one.job.epochs) for sample in range(one.job.samples)}
    missing, twice = len(known - used.keys()), sum(count > 1 for count in used.values())
    strange = len(used.keys() - known)
    if not (missing or twice or strange):
        return (
            True,
            f"{one.job.name}: each of {one.job.samples} samples was used once in each of {one.job.epochs} epochs",
        )
    return False, (
        f"{one.job.name}: of {wanted} samples over all epochs {missing} were not used, and {twice + strange} more than "
        "once; after a crash a training begins again at its last checkpoint"
    )
