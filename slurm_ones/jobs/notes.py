"""What of jobs' reports could not be believed, for their owners: as long as it is so, and for a while afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from dataclasses import dataclass

log = logging.getLogger(__name__)

STAYS_S = 3600.0
"""How long a note is shown after its cause was last seen."""


@dataclass(frozen=True)
class _Note:
    problem: str
    since: float
    seen: float
    """When it was last so, by Slurm's clock."""


class Notes:
    """The last complaint about each job, with its time."""

    def __init__(self) -> None:
        self._notes: dict[int, _Note] = {}
        self._looked: dict[int, float] = {}

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._notes

    def looked(self, job_id: int, problem: str, now: float) -> None:
        """A job's reports were read at `now`, with that problem; empty where there was none."""
        self._looked[job_id] = now
        if not problem:
            return
        known = self._notes.get(job_id)
        if known is None or known.problem != problem:
            log.warning("job %d: %s", job_id, problem)
            known = _Note(problem, now, now)
        self._notes[job_id] = _Note(problem, known.since, now)

    def text(self, job_id: int, now: float) -> str:
        """The note as it is shown at `now`; empty where there is none, or its cause is gone for long."""
        note = self._notes.get(job_id)
        if note is None:
            return ""
        if note.seen >= self._looked.get(job_id, note.seen):
            return f"{note.problem} (since {_clock(note.since)})"
        if now - note.seen > STAYS_S:
            del self._notes[job_id]
            return ""
        return f"{note.problem} (last seen {_clock(note.seen)})"

    def forget(self, alive: Container[int]) -> None:
        """Drop what is known of other jobs than these."""
        self._notes = {id_: note for id_, note in self._notes.items() if id_ in alive}
        self._looked = {id_: when for id_, when in self._looked.items() if id_ in alive}


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
