"""Asking Slurm to leave slow nodes out for a job that is about to start, and taking that back.

A wish and no more: a job that has not started by the next tick or the one after may have any node again. Slurm lets a
list change only while its job waits, so that of a job that runs stays, and is taken back once the job waits again.
What is asked for is in the database first, in the step of the resize, so that a later companion knows it from a list of
the owner's. A job that names nodes itself, to have or to leave out, is never asked about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ones_db import ReasonRecord
from ones_db.shape import Shape
from slurm_ones.slurm.client import Refused, SlurmClient
from slurm_ones.slurm.model import Job

log = logging.getLogger(__name__)

SAID = "avoids_slow_nodes"
"""Code of the step's reason; its argument `nodes` has the names."""


class NodeListStore(Protocol):
    """What this needs of the database (`ones_db.Store` has it)."""

    def said_in_steps(self, code: str) -> Mapping[int, ReasonRecord]: ...


class _Asked(NamedTuple):
    names: frozenset[str]
    since: float
    """When Slurm was asked, by the companion's clock; long ago of what another companion asked for."""


@dataclass
class NodeLists:
    """The lists that this companion, or one before it, gave to jobs."""

    client: SlurmClient
    store: NodeListStore
    wait_s: float
    """For which a job may wait for other nodes."""
    clock: Callable[[], float]
    choose: Callable[[Job, Shape], tuple[str, ...]] = lambda job, shape: ()
    """Nodes that a job of a shape should be kept off, and can be: there is room for it elsewhere."""
    _asked: dict[int, _Asked] | None = field(default=None, repr=False)

    @property
    def asked(self) -> dict[int, _Asked]:
        """What was asked for, by job; read from the database once."""
        if self._asked is None:
            said = self.store.said_in_steps(SAID)
            lists = {job_id: str(reason.arguments.get("nodes", "")) for job_id, reason in said.items()}
            self._asked = {id_: _Asked(frozenset(names.split(",")), 0.0) for id_, names in lists.items() if names}
        return self._asked

    def wanted(self, job: Job, shape: Shape) -> tuple[str, ...]:
        """What `choose` says of a job that names no nodes itself. Looked up before anything is written down: a list of
        the owner's that is the same as ours could not be told from it later."""
        names = self.choose(job, shape)
        if not names:
            return ()
        try:
            now = self.client.details([job.job_id]).get(job.job_id)
        except Refused as error:
            log.warning("job %d: whether it names nodes itself is not known: %s", job.job_id, error)
            return ()
        return names if now is not None and not (now.excluded or now.required) else ()

    def note(self, job: Job, names: Iterable[str]) -> None:
        """These nodes are to be left out, as was written down."""
        if names := frozenset(names):
            self.asked[job.job_id] = _Asked(names, self.clock())

    def ask(self, job: Job) -> None:
        """Have Slurm leave out what was noted, of a job that waits; a job that names nodes itself keeps to those."""
        if (asked := self.asked.get(job.job_id)) is None:
            return
        try:
            now = self.client.details([job.job_id]).get(job.job_id)
            if now is None:
                return
            if now.excluded or now.required:
                # By now they are its owner's, or ours, of a moment ago.
                if frozenset(now.excluded) != asked.names:
                    del self.asked[job.job_id]
                return
            self.client.exclude_nodes(job.key, sorted(asked.names))
            self.asked[job.job_id] = _Asked(asked.names, self.clock())
        except Refused as error:
            log.warning("job %d: slow nodes could not be left out: %s", job.job_id, error)

    def clear(self, job: Job) -> bool:
        """Take back what we asked for, of a job that waits; whether there was anything. A list that is another one now
        is its owner's."""
        if (asked := self.asked.get(job.job_id)) is None:
            return False
        try:
            now = self.client.details([job.job_id]).get(job.job_id)
            ours = now is not None and now.pending and frozenset(now.excluded) == asked.names
            if ours:
                self.client.exclude_nodes(job.key, ())
        except Refused as error:
            log.warning("job %d: its list of nodes could not be taken back: %s", job.job_id, error)
            return False
        if now is None or now.pending:
            del self.asked[job.job_id]
        return ours

    def reconcile(self, jobs: Mapping[int, Job]) -> None:
        """Take back the lists of jobs that wait, for longer than a moment; `jobs` are those that Slurm knows. Raises
        `Unreachable`."""
        for job_id, asked in list(self.asked.items()):
            job = jobs.get(job_id)
            if job is None:
                del self.asked[job_id]
            # One that ended keeps its list, too, and its owner may requeue it as long as Slurm knows it.
            elif job.pending and self.clock() - asked.since >= self.wait_s and self.clear(job):
                log.info("job %d: it may have any node again", job_id)

    def clear_all(self) -> None:
        """Take back the lists of all jobs that wait. Raises `Unreachable`."""
        if not self.asked:
            return
        try:
            known = self.client.details(self.asked)
        except Refused as error:
            log.warning("lists of nodes could not be taken back: %s", error)
            return
        for job in known.values():
            if job.pending:
                self.clear(job)
