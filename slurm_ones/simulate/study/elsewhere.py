"""A study whose parts run as jobs of a site: sent, watched, repeated where a job fails, and gone on with later.

Nothing but files and the site's queue says how far a study is. So a command that was killed at any moment is started
again as it was: it takes the results that are there, finds the jobs that wait or run by their names, sends the rest.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from slurm_ones.simulate.study.parts import BadResult, Part, StudyFolder, parts_of, run_part
from slurm_ones.simulate.study.plan import Plan
from slurm_ones.simulate.study.runs import OnProgress, Run, RunProgress
from slurm_ones.slurm.client import SlurmError, Unreachable
from slurm_ones.slurm.model import ENDED, JobState

TRIES = 3
"""Jobs in which one command tries a part."""
MOST_TASKS = 500
"""Parts in one job array: sites allow 1,000 by default."""
SAME_AGAIN = {
    JobState.TIMEOUT: "it ran into its time limit: start the study again with more, as --sbatch '--time=8:00:00'",
    JobState.OUT_OF_MEMORY: "it needed more memory: start the study again with more, as --sbatch '--mem=8G'",
    JobState.CANCELLED: "somebody cancelled it",
    JobState.DEADLINE: "Slurm ended it at its deadline",
}
"""Ends that another job of the same kind would come to as well."""

Call = Callable[[], None]


@dataclass(frozen=True)
class Task:
    """A part as it was sent."""

    name: str
    """That of the jobs it was sent with."""
    index: int
    """Its place among them."""


@dataclass(frozen=True)
class Seen:
    """What the site says of it."""

    state: JobState
    job: str
    """As the site's users name it."""
    log: Path


class Site(Protocol):
    """What runs parts: Slurm, or processes of this machine in tests. Raises `SlurmError`."""

    def submit(self, name: str, calls: Sequence[Call]) -> str:
        """Have each called in a job of its own, under that name; returns what people call them. After `Unreachable`
        nobody knows whether they were taken, after other errors they were not."""

    def states(self, names: Collection[str]) -> Mapping[Task, Seen]:
        """Those that the site still knows."""

    def cancelling(self, names: Collection[str]) -> str:
        """The command by which their owner cancels them."""


@dataclass(frozen=True)
class Waits:
    """How often is looked, in seconds."""

    files_s: float = 1.0
    first_s: float = 2.0
    """To the site, after something has changed there."""
    most_s: float = 60.0
    """To the site in the end: sites ask for no more than a question a minute."""
    late_s: float = 60.0
    """How much later than a job's end its result may be seen, on a network file system."""


@dataclass
class Study:
    """One command's work on a study, from within `folder.locked()`."""

    plan: Plan
    folder: StudyFolder
    site: Site
    say: Callable[[str], None]
    """Takes sentences for people."""
    waits: Waits = Waits()
    _all: list[Part] = field(init=False)
    _left: dict[str, Part] = field(default_factory=dict, init=False)
    """Those without a result, by key."""
    _runs: dict[str, Run] = field(default_factory=dict, init=False)
    _todo: list[Part] = field(default_factory=list, init=False)
    """Those to be sent."""
    _sent: dict[str, Task] = field(default_factory=dict, init=False)
    _seen: dict[str, Seen] = field(default_factory=dict, init=False)
    _gone: dict[str, float] = field(default_factory=dict, init=False)
    """Since when the job of a part has ended."""
    _tries: Counter[str] = field(default_factory=Counter, init=False)
    _at_once: int = field(default=MOST_TASKS, init=False)
    _not_before: float = field(default=0.0, init=False)
    """When parts may be sent again."""

    def __post_init__(self) -> None:
        """Read the results that are there, and find what waits or runs. Raises `SlurmError`."""
        self._all = parts_of(self.plan)
        again = set()
        for part in self._all:
            try:
                run = self.folder.result(part)
            except BadResult as error:
                self.say(f"{error}: run again")
                run = None
                again.add(part.key)
            if run is not None and run.outcome is None:
                # Not finished: whatever was the matter then may be mended.
                again.add(part.key)
                run = None
            if run is not None:
                self._runs[part.key] = run
                continue
            if part.key in again:
                self.folder.drop_result(part)
            self._left[part.key] = part
        sent = {
            Task(name, index): key
            for name, keys in self.folder.sent().items()
            for index, key in enumerate(keys)
            if key in self._left
        }
        for task, seen in self.site.states({task.name for task in sent}).items() if sent else ():
            key = sent.get(task)
            result_is_due = seen.state is JobState.COMPLETED and key not in again
            if key is not None and (seen.state not in ENDED or result_is_due):
                self._sent[key], self._seen[key] = task, seen
        self._todo = [part for key, part in self._left.items() if key not in self._sent]
        if self._runs or self._sent:
            self.say(
                f"{len(self._runs)} of {len(self._all)} runs were done before, {len(self._sent)} wait or run as jobs, "
                f"{len(self._todo)} are sent now ({self.folder.root})"
            )

    @property
    def left(self) -> int:
        """Runs without a result."""
        return len(self._left)

    def run(self, on_progress: OnProgress) -> list[Run]:
        """All runs, once each has a result or has failed too often. Raises `SlurmError` where the site takes none."""
        look_s, look_at = self.waits.first_s, 0.0
        try:
            while self._left:
                now = time.monotonic()
                if self._todo and now >= self._not_before:
                    self._send(now)
                    look_s, look_at = self.waits.first_s, now + self.waits.first_s
                self._collect(on_progress)
                if self._sent and time.monotonic() >= look_at:
                    changed = self._look(on_progress)
                    look_s = self.waits.first_s if changed or self._gone else min(1.5 * look_s, self.waits.most_s)
                    look_at = time.monotonic() + look_s
                if self._left:
                    time.sleep(self.waits.files_s)
        except (KeyboardInterrupt, SlurmError):
            self._say_what_runs()
            raise
        return [self._runs[part.key] for part in self._all]

    def _send(self, now: float) -> None:
        while self._todo:
            parts = self._todo[: self._at_once]
            name = f"ones-study-{secrets.token_hex(4)}"
            self.folder.put_sent(name, parts)
            calls = [partial(run_part, self.plan, part.key, self.folder.root) for part in parts]
            try:
                jobs = self.site.submit(name, calls)
            except Unreachable as error:
                # They may be there: the next look finds them by their name, or they count as failed once.
                self.say(f"{error}; looking whether the jobs named {name} are there")
            except SlurmError as error:
                self.folder.drop_sent(name)
                if len(parts) > 1:
                    self._at_once = len(parts) // 2
                    continue
                if not self._sent:
                    raise
                self.say(f"{error}; {len(self._todo)} parts are sent later")
                self._not_before = now + self.waits.most_s
                return
            else:
                self.say(f"{len(parts)} parts sent as {jobs}, named {name}")
            for index, part in enumerate(parts):
                self._sent[part.key] = Task(name, index)
                self._seen.pop(part.key, None)
            del self._todo[: len(parts)]

    def _collect(self, on_progress: OnProgress) -> None:
        """Take the results that have come, and say how far the others are."""
        for key, part in list(self._left.items()):
            try:
                run = self.folder.result(part)
            except BadResult as error:
                self.say(f"{error}: run again")
                self.folder.drop_result(part)
                run = None
            if run is not None:
                seen = self._seen.get(key)
                if run.error and seen is not None:
                    self.say(f"{part.label}: {run.error}; log: {seen.log}")
                self._finish(part, run, on_progress)
            elif key in self._sent and (progress := self.folder.progress(part)) is not None:
                on_progress(progress)

    def _look(self, on_progress: OnProgress) -> bool:
        """Ask the site for the jobs; whether one of them has come to another state."""
        try:
            found = self.site.states({task.name for task in self._sent.values()})
        except SlurmError as error:
            self.say(f"{error}; asking again")
            return False
        now, before = time.monotonic(), dict(self._seen)
        for key, task in list(self._sent.items()):
            seen = found.get(task)
            if seen is not None:
                self._seen[key] = seen
            if seen is not None and seen.state not in ENDED:
                self._gone.pop(key, None)
                continue
            since = self._gone.setdefault(key, now)
            # A job that ended well, or that is forgotten, may have left a result that is not seen yet.
            due = seen is None or seen.state is JobState.COMPLETED
            if now - since >= (self.waits.late_s if due else self.waits.first_s):
                self._fail(self._left[key], seen, on_progress)
        changed = before != self._seen
        if changed:
            running = sum(seen.state is JobState.RUNNING for key, seen in self._seen.items() if key in self._sent)
            waiting = sum(seen.state is JobState.PENDING for key, seen in self._seen.items() if key in self._sent)
            if waiting:
                self.say(f"in the queue: {waiting} parts wait, {running} run")
        return changed

    def _fail(self, part: Part, seen: Seen | None, on_progress: OnProgress) -> None:
        """A job ended without a result: another one, or no more of this part. `seen` is what the site knows of it now,
        None for nothing."""
        before = self._seen.get(part.key)
        name = self._sent.pop(part.key).name
        self._gone.pop(part.key)
        self._tries[part.key] += 1
        same_again = SAME_AGAIN.get(seen.state, "") if seen is not None else ""
        if seen is None:
            job = f"job {before.job}" if before is not None else f"its job, named {name},"
            why = f"Slurm knows {job} no more; logs: {self.folder.jobs}"
            # One that ran is known for some minutes after its end; of an array's waiting tasks nothing is left.
            if before is not None and before.state is JobState.PENDING:
                same_again = SAME_AGAIN[JobState.CANCELLED]
        else:
            why = f"job {seen.job} ended without a result ({seen.state.value}); log: {seen.log}"
            if not seen.log.exists():
                why += " is not there: do the nodes see this directory (--directory)?"
        if same_again:
            why = f"{same_again}; {why}"
        tries = self._tries[part.key]
        if tries < TRIES and not same_again:
            self.say(f"{part.label}: {why}; sent again, try {tries + 1} of {TRIES}")
            self._todo.append(part)
            return
        self._finish(part, Run(part.policy.label, part.seed, error=why), on_progress)

    def _finish(self, part: Part, run: Run, on_progress: OnProgress) -> None:
        self._runs[part.key] = run
        for known in (self._left, self._sent, self._gone):
            known.pop(part.key, None)
        # Its result may have come after its job was given up.
        self._todo = [other for other in self._todo if other.key != part.key]
        if (progress := self.folder.progress(part)) is not None:
            on_progress(progress)
        on_progress(RunProgress(part.policy.label, part.seed, finished=True))

    def _say_what_runs(self) -> None:
        if not self._sent:
            return
        names = sorted({task.name for task in self._sent.values()})
        self.say(
            f"{len(self._sent)} parts still wait or run; the same command goes on with them. "
            f"To cancel them: {self.site.cancelling(names)}"
        )
