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
        self._held: dict[int, frozenset[int]] = {}
        self._given_up: dict[int, frozenset[int]] = {}

    def of(self, job_id: int) -> frozenset[int]:
        """Tasks of the job that wait in a hold of ours where they wait; empty for one that no blocks have joined or
        left."""
        if job_id not in self._held:
            try:
                resizes = self._store.resizes(job_id)
            except UnknownRecord:
                resizes = []  # an array of somebody's who did not opt in
            self._held[job_id] = held_by_us(resizes)
            self._given_up[job_id] = held_by_us([replace(resize, outcome=NO_REASON) for resize in resizes])
        return self._held[job_id]

    def ever(self, job_id: int) -> frozenset[int]:
        """The same with those that their owner was seen to hold since."""
        return self.of(job_id) | self._given_up.get(job_id, frozenset())

    def note(self, resize: ResizeRecord) -> None:
        """A resize was begun, or taken further."""
        if resize.mechanism == BLOCKS:
            before = self.of(resize.job_id)
            self._held[resize.job_id] = held_by_us([resize], before)
            self._given_up[resize.job_id] |= before - self._held[resize.job_id]

    def forget(self, alive: Collection[int]) -> None:
        """Leave nothing behind of jobs that have ended."""
        for job_id in self._held.keys() - {*alive}:
            del self._held[job_id], self._given_up[job_id]
