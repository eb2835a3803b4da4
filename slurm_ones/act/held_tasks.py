"""Which waiting tasks of jobs of blocks stand in holds of ours.

A task that its owner holds looks the same to Slurm. So what we hold is written down with the resize that first needs
it (`ResizeRecord.held`), and nothing else is ever released. Once a task is seen out of its hold (`ResizeRecord.let_go`)
a later hold is not ours. A task that its owner lets go and holds again between two looks passes for ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from ones_db import ResizeRecord, UnknownRecord
from slurm_ones.act.transitions import State
from slurm_ones.rules.blocks import BLOCKS, ever_held_by_us, held_by_us
from slurm_ones.slurm.model import Job


class ResizesStore(Protocol):
    """What is needed of the database (`ones_db.Store` has it)."""

    def resizes(self, job_id: int | None = None) -> list[ResizeRecord]: ...

    def note_let_go(self, resize_id: int, tasks: Sequence[int]) -> ResizeRecord: ...


class HeldTasks:
    """Read from the database once a job, and kept up to date by what is noted since."""

    def __init__(self, store: ResizesStore) -> None:
        self._store = store
        self._resizes: dict[int, dict[int, ResizeRecord]] = {}
        self._held: dict[int, frozenset[int]] = {}

    def of(self, job_id: int) -> frozenset[int]:
        """Tasks of the job that wait in a hold of ours where they wait."""
        if job_id not in self._held:
            self._held[job_id] = held_by_us(self._in_order(job_id))
        return self._held[job_id]

    def ever(self, job_id: int) -> frozenset[int]:
        """The same with those that left it, or that their owner was seen to hold; empty for a job of which no change by
        blocks was begun."""
        return ever_held_by_us(self._in_order(job_id))

    def look(self, job_id: int, tasks: Iterable[Job]) -> None:
        """Note those of ours that are out of their hold, by what Slurm shows of the job's tasks now.

        Not those that a change under way holds, or has join and leave.
        """
        if not (ours := self.of(job_id)):
            return
        newest = self._in_order(job_id)[-1]
        if newest.ended is None:
            if newest.state == State.PREPARING.value:
                return
            ours -= {*newest.dropped, *(task for task, _ in newest.added)}
        # A record may stand for several tasks, and a task may have a second one of an earlier end.
        seen = [(task, job.completing or (job.pending and job.held)) for job in tasks for task in job.array_tasks]
        if gone := ours.intersection(task for task, _ in seen) - {task for task, held in seen if held}:
            try:
                self.note(self._store.note_let_go(newest.id, sorted({*newest.let_go} | gone)))
            except Exception:
                self.read_again(job_id)
                raise

    def note(self, resize: ResizeRecord) -> None:
        """A resize was begun, or taken further."""
        if resize.mechanism == BLOCKS:
            self._known(resize.job_id)[resize.id] = resize
            self._held.pop(resize.job_id, None)

    def read_again(self, job_id: int) -> None:
        """What was stored of its resizes is not known: a write failed, or was only said to have failed."""
        self._resizes.pop(job_id, None)
        self._held.pop(job_id, None)

    def forget(self, alive: Collection[int]) -> None:
        """Leave nothing behind of jobs that have ended."""
        for job_id in self._resizes.keys() - {*alive}:
            self.read_again(job_id)

    def _in_order(self, job_id: int) -> list[ResizeRecord]:
        """Its resizes by blocks, as they were begun: clocks may go back."""
        return [resize for _, resize in sorted(self._known(job_id).items())]

    def _known(self, job_id: int) -> dict[int, ResizeRecord]:
        """Its resizes by blocks, by id."""
        if job_id not in self._resizes:
            try:
                resizes = self._store.resizes(job_id)
            except UnknownRecord:
                resizes = []  # an array of somebody's who did not opt in
            self._resizes[job_id] = {resize.id: resize for resize in resizes if resize.mechanism == BLOCKS}
        return self._resizes[job_id]
