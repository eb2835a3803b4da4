"""Study whose parts run as jobs of a site's Slurm. submitit sends the parts as a job array, and one squeue shows the
state of all.

All state is in files and in the queue. If the command is killed, the same command continues the study: it takes the
results that exist, finds waiting and running jobs by name, and sends the other parts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pwd
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.study.plan import StudyPlan
from slurm_ones.simulate.study.runs import (
    THREADS,
    OnProgress,
    RunProgress,
    StudyFolder,
    StudyPart,
    StudyRun,
    parts_of,
    run_part,
)
from slurm_ones.slurm.client import SlurmError, SlurmMissing, Unreachable
from slurm_ones.slurm.command import CommandClient, error_of, with_retries
from slurm_ones.slurm.model import ENDED, JobState

TRIES = 3
"""Largest number of attempts to run a part of the study, within one command."""
MOST_TASKS = 500
"""Largest number of parts in one job array. By default Slurm allows about 1,000 tasks."""
USUAL_MIN = 120
"""Time limit of a part in minutes, if `--sbatch` sets none."""
SAME_AGAIN = {
    JobState.TIMEOUT: "it ran into its time limit: start the study again with more, as --sbatch '--time=8:00:00'",
    JobState.OUT_OF_MEMORY: "it needed more memory: start the study again with more, as --sbatch '--mem=8G'",
    JobState.CANCELLED: "somebody cancelled it",
    JobState.DEADLINE: "Slurm ended it at its deadline",
}
"""End states after which another attempt would end the same way, with the reason shown to the user."""
LEADS_TO_SLURM = ("SLURM_CONF", "SLURM_JWT")
"""Slurm variables that are kept in the environment. All others are removed: they describe a Slurm job in which the
command itself may run."""

_UNSENT = re.compile(r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh")
"""Names of the files that submitit leaves if Slurm refuses its jobs. Names of other files contain a job id."""

SentAs = tuple[str, int]
"""Name of the job array with which a part was sent, and the part's index in the array."""


class SeenJob(NamedTuple):
    """Job that runs a part, as squeue shows it."""

    state: JobState
    job: str
    log: Path


class StudyJobs:
    """Access to the jobs of a study in the site's Slurm. All nodes must see `folder` at the same path."""

    def __init__(self, folder: Path, options: Mapping[str, str | bool]) -> None:
        """Use `folder` for scripts and logs, and `options` for sbatch. Raises `BadInput` if submitit is missing."""
        if importlib.util.find_spec("submitit") is None:
            raise BadInput("--executor slurm needs submitit: pip install 'slurm-ones[studies]'")
        self._folder, self._options = folder, options
        with _outside_of_jobs():  # it asks the very cluster that sbatch sends to
            self._client = CommandClient()

    def submit(self, name: str, calls: Sequence[Callable[[], None]]) -> str:
        """Submit a job array with a task for each call, and return a text such as "job 123".

        Raises `Unreachable` if Slurm may have accepted the array, and any other `SlurmError` if it has not.
        """
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        with _outside_of_jobs(), contextlib.redirect_stderr(io.StringIO()):
            try:
                executor = submitit.SlurmExecutor(self._folder)
                executor.update_parameters(
                    job_name=name,
                    time=USUAL_MIN,
                    wckey=None,
                    use_srun=False,
                    setup=[f"export {variable}=${{{variable}:-1}}" for variable in THREADS],
                    additional_parameters=dict(self._options),
                )
                jobs: list[submitit.Job[Any]] = executor.submit_array(calls)
            except FailedSubmissionError as error:  # sbatch took them, and its answer has no number
                raise Unreachable(f"sbatch: {' '.join(str(error).split())[:200]}") from None
            except FailedJobError as error:
                for path in self._folder.iterdir():
                    if _UNSENT.fullmatch(path.name) and not path.is_symlink():
                        path.unlink()
                raise error_of("sbatch", str(error)) from None
            except (FileNotFoundError, RuntimeError) as error:
                raise SlurmMissing(f"sbatch: {error}") from None
        return f"job {jobs[0].job_id.partition('_')[0]}"

    def states(self, names: Collection[str]) -> Mapping[SentAs, SeenJob]:
        """Return the jobs in the arrays of these names that Slurm still knows."""
        command = ["squeue", "--noheader", "--array", "--states=all", *_mine(names), "-o", "%F|%K|%T|%j"]
        found = {}
        for line in with_retries(lambda: self._client.run(command)).splitlines():
            job, index, state, name = line.strip().split("|", 3)
            place, shown = (int(index), f"{job}_{index}") if index.isdecimal() else (0, job)
            known = JobState[state if state in JobState.__members__ else "UNKNOWN"]
            found[name, place] = SeenJob(known, shown, self._folder / f"{shown}_0_log.err")
        return found

    def cancelling(self, names: Collection[str]) -> str:
        """Return the shell command that cancels this user's jobs of these names."""
        return " ".join(["scancel", *_mine(names)])


def _mine(names: Collection[str]) -> list[str]:
    """Return the options of squeue and scancel for this user's jobs of these names."""
    return [f"--user={pwd.getpwuid(os.geteuid()).pw_name}", f"--name={','.join(sorted(names))}"]


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Context without the Slurm and sbatch variables of the environment, which would override options."""
    words = ("SLURM_", "SBATCH_")
    hidden = {k: v for k, v in os.environ.items() if k.startswith(words) and k not in LEADS_TO_SLURM}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


@dataclass(frozen=True)
class Waits:
    """Intervals, in seconds, at which a study looks for results in files and queries Slurm."""

    files_s: float = 1.0
    first_s: float = 2.0
    """Interval between queries to Slurm right after a job's state has changed."""
    most_s: float = 60.0
    """Longest interval between queries to Slurm. Sites ask users not to query more often than once a minute."""
    late_s: float = 60.0
    """Longest time from a job's end until its result is visible on a network file system."""


@dataclass
class _Open:
    part: StudyPart
    sent: SentAs | None = None
    """Array and index of the job that runs the part; None if there is no such job."""
    seen: SeenJob | None = None
    ended_at: float | None = None
    tries: int = 0


class StudyQueue:
    """Parts of a study that still have no result, and the loop that runs them as jobs. The caller must hold
    `folder.locked()`.

    `say` is called with each sentence for the user.
    """

    def __init__(
        self, plan: StudyPlan, folder: StudyFolder, site: StudyJobs, say: Callable[[str], None], waits: Waits = Waits()
    ) -> None:
        """Read the existing results, and find waiting and running jobs of the study. Raises `SlurmError`."""
        self._plan, self._folder, self._site, self._say, self._waits = plan, folder, site, say, waits
        self._all = parts_of(plan)
        self._at_once, self._not_before = MOST_TASKS, 0.0
        before = {part.key: folder.result(part) for part in self._all}
        self._runs = {key: run for key, run in before.items() if run is not None and run.outcome is not None}
        self._open = {part.key: _Open(part) for part in self._all if part.key not in self._runs}
        again = {key for key, run in before.items() if run is not None} - self._runs.keys()
        for key in again:  # the cause of its failure may be gone
            folder.drop_result(self._open[key].part)
        sent = {task: key for task, key in folder.sent().items() if key in self._open}
        for task, seen in site.states({name for name, _ in sent}).items() if sent else ():
            key = sent.get(task, "")
            result_is_due = seen.state is JobState.COMPLETED and key not in again
            if key and (seen.state not in ENDED or result_is_due):
                self._open[key].sent, self._open[key].seen = task, seen
        waiting = len(self._sent)
        if self._runs or waiting:
            say(
                f"{len(self._runs)} of {len(self._all)} runs were done before, {waiting} wait or run as jobs, "
                f"{len(self._open) - waiting} are sent now ({folder.root})"
            )

    @property
    def left(self) -> int:
        """Number of parts without a result."""
        return len(self._open)

    @property
    def _sent(self) -> list[_Open]:
        return [one for one in self._open.values() if one.sent is not None]

    def _names(self) -> set[str]:
        return {one.sent[0] for one in self._sent if one.sent is not None}

    def run(self, on_progress: OnProgress) -> list[StudyRun]:
        """Run all parts, and return their runs. A part that failed too often gets a run with an error.

        Raises `SlurmError` if Slurm refuses jobs while no job of the study waits or runs.
        """
        pause_s, ask_at = self._waits.first_s, 0.0
        try:
            while self._open:
                if self._send():
                    pause_s, ask_at = self._waits.first_s, time.monotonic() + self._waits.first_s
                self._collect(on_progress)
                if self._names() and time.monotonic() >= ask_at:
                    changed = self._ask(on_progress) or any(one.ended_at is not None for one in self._open.values())
                    pause_s = self._waits.first_s if changed else min(1.5 * pause_s, self._waits.most_s)
                    ask_at = time.monotonic() + pause_s
                if self._open:
                    time.sleep(self._waits.files_s)
        except (KeyboardInterrupt, SlurmError):
            if names := self._names():
                self._say(
                    f"{len(self._sent)} parts still wait or run; the same command continues with them. To cancel them: "
                    f"{self._site.cancelling(names)}"
                )
            raise
        return [self._runs[part.key] for part in self._all]

    def _send(self) -> bool:
        """Send all parts that have no job. If Slurm refuses them, send fewer at a time. Return True if any part was
        due."""
        todo = [one for one in self._open.values() if one.sent is None]
        if not todo or time.monotonic() < self._not_before:
            return False
        while todo:
            some = todo[: self._at_once]
            name = f"ones-study-{secrets.token_hex(4)}"
            self._folder.put_sent(name, [one.part for one in some])
            calls = [partial(run_part, self._plan, one.part.key, self._folder.root) for one in some]
            try:
                self._say(f"{len(some)} parts sent as {self._site.submit(name, calls)}, named {name}")
            except Unreachable as error:
                # They may be there: the next question finds them by their name, or they count as failed once.
                self._say(f"{error}; checking whether Slurm has the jobs named {name}")
            except SlurmError as error:
                self._folder.drop_sent(name)
                if len(some) > 1:
                    self._at_once = len(some) // 2
                    continue
                if not self._names():
                    raise
                self._say(f"{error}; {len(todo)} parts are sent later")
                self._not_before = time.monotonic() + self._waits.most_s
                break
            for index, one in enumerate(some):
                one.sent, one.seen = (name, index), None
            del todo[: len(some)]
        return True

    def _collect(self, on_progress: OnProgress) -> None:
        """Take new results from files, and report the progress of the other parts."""
        for one in list(self._open.values()):
            run = self._folder.result(one.part)
            if run is not None:
                if run.error and one.seen is not None:
                    self._say(f"{one.part.label}: {run.error}; log: {one.seen.log}")
                self._finish(one, run, on_progress)
            elif one.sent is not None and (progress := self._folder.progress(one.part)) is not None:
                on_progress(progress)

    def _ask(self, on_progress: OnProgress) -> bool:
        """Query Slurm for the state of the jobs. Return True if the state of any has changed."""
        try:
            found = self._site.states(self._names())
        except SlurmError as error:
            self._say(f"{error}; asking again")
            return False
        now, changed = time.monotonic(), False
        for one in self._sent:
            seen = found.get(one.sent) if one.sent is not None else None
            changed |= seen is not None and seen != one.seen
            one.seen = seen or one.seen
            if seen is not None and seen.state not in ENDED:
                one.ended_at = None
                continue
            one.ended_at = now if one.ended_at is None else one.ended_at
            # A job that ended well, or that Slurm forgot, may have left a result that is not visible yet.
            due = seen is None or seen.state is JobState.COMPLETED
            if now - one.ended_at >= (self._waits.late_s if due else self._waits.first_s):
                self._fail(one, seen, on_progress)
        states = [one.seen.state for one in self._sent if one.seen is not None]
        if changed and JobState.PENDING in states:
            running = states.count(JobState.RUNNING)
            self._say(f"in the queue: {states.count(JobState.PENDING)} parts wait, {running} run")
        return changed

    def _fail(self, one: _Open, seen: SeenJob | None, on_progress: OnProgress) -> None:
        """Send a part again, or give up, because its job ended without a result. `seen` is None if Slurm no longer
        knows the job."""
        same_again = SAME_AGAIN.get(seen.state, "") if seen is not None else ""
        if seen is None:
            job = f"job {one.seen.job}" if one.seen is not None else f"its job, named {one.sent and one.sent[0]}"
            why = f"Slurm no longer knows {job}; logs: {self._folder.jobs}"
            # Slurm remembers a job that ran for some minutes, and an array's waiting tasks not at all.
            if one.seen is not None and one.seen.state is JobState.PENDING:
                same_again = SAME_AGAIN[JobState.CANCELLED]
        else:
            why = f"job {seen.job} ended without a result ({seen.state.value}); log: {seen.log}"
            if not seen.log.exists():
                why += " does not exist: do the nodes see this directory (--directory)?"
        one.sent, one.ended_at, one.tries = None, None, one.tries + 1
        if one.tries < TRIES and not same_again:
            self._say(f"{one.part.label}: {why}; sent again, try {one.tries + 1} of {TRIES}")
            return
        why = f"{same_again}; {why}" if same_again else why
        self._finish(one, StudyRun(one.part.contender.label, one.part.seed, error=why), on_progress)

    def _finish(self, one: _Open, run: StudyRun, on_progress: OnProgress) -> None:
        part = one.part
        self._runs[part.key] = run
        del self._open[part.key]
        if (progress := self._folder.progress(part)) is not None:
            on_progress(progress)
        on_progress(RunProgress(part.contender.label, part.seed, finished=True))
