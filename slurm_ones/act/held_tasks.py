"""Which waiting tasks of jobs of blocks stand in holds of ours.

A task that its owner holds looks the same to Slurm. So what we hold is written down with the resize that first needs
it (`ResizeRecord.held`), and nothing else is ever released.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from ones_db import NO_REASON, ResizeRecord, UnknownRecord
from slurm_ones.rules.blocks import BLOCKS, held_by_us


class ResizesStore(Protocol):
    """What is needed of the database (`ones_db.Store` has it)."""

    def resizes(self, job_id: int | None = None) -> list[ResizeRecord]: ...


class HeldTasks:
    """Read from the database once a job, and kept up to date by what is noted since."""

    def __init__(self, store: ResizesStore) -> None:
        self._store = store
        self._resizes: dict[int, dict[int, ResizeRecord]] = {}
        self._held: dict[int, frozenset[int]] = {}

    def of(self, job_id: int) -> frozenset[int]:
        """Tasks of the job that wait in a hold of ours where they wait; empty for one that no blocks have joined or
        left."""
        if job_id not in self._held:
            self._held[job_id] = held_by_us(self._known(job_id).values())
        return self._held[job_id]

    def ever(self, job_id: int) -> frozenset[int]:
        """The same with those that their owner was seen to hold since."""
        return held_by_us(replace(resize, outcome=NO_REASON) for resize in self._known(job_id).values())

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

    def _known(self, job_id: int) -> dict[int, ResizeRecord]:
        """Its resizes by blocks, by id and in their order."""
        if job_id not in self._resizes:
            try:
                resizes = self._store.resizes(job_id)
            except UnknownRecord:
                resizes = []  # an array of somebody's who did not opt in
            self._resizes[job_id] = {resize.id: resize for resize in resizes if resize.mechanism == BLOCKS}
        return self._resizes[job_id]
