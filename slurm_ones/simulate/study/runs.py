"""Runs of a study: each contender with each seed, in parallel processes. Results are kept in a directory.

Each result is a file, named by a digest of all that the result depends on: plan, contender, seed, workload files, code
and numerical libraries. If one of these changes, the part is run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.run import run
from slurm_ones.simulate.study.figures import (
    Bound,
    Comparison,
    Estimate,
    against_bound,
    compare,
    completion_times,
    end_of,
    estimate,
)
from slurm_ones.simulate.study.plan import Contender, StudyPlan
from slurm_ones.simulate.workloads.generate import undisturbed_s

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that limit the threads of numerical libraries."""
FORMAT = 3
"""Version of the file format, which is part of every digest."""
REPORT_S = 1.0
"""Least seconds between two progress reports of a part."""
OURS = ("slurm_ones", "ones_db", "ones_wrapper")
LIBRARIES = ("numpy", "scipy")
"""Packages whose version may change the last digits of a result."""

NO_BOUNDS: Mapping[int, Bound] = {}


@dataclass(frozen=True)
class StudyRun:
    """Run of one contender with one seed, and its outcome."""

    label: str
    seed: int
    outcome: Outcome | None = None
    error: str = ""
    """Error message of a run without an outcome."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run."""

    label: str
    seed: int
    simulated_s: float = 0.0
    """Simulated seconds so far; 0 if unknown."""
    ended: int = 0
    """Number of jobs that have ended so far."""
    jobs: int = 0
    """Number of jobs in the workload."""
    finished: bool = False
    """True if the run is over, also by an error."""

    @property
    def share(self) -> float:
        """Share of the run's jobs that have ended; 1 for a finished run."""
        return 1.0 if self.finished else self.ended / max(self.jobs, 1)


OnProgress = Callable[[RunProgress], None]


@dataclass(frozen=True)
class StudyPart:
    """Part of a study: one contender with one seed."""

    contender: Contender
    seed: int
    key: str
    """Digest of all that the result depends on; the name of the result's file."""

    @property
    def label(self) -> str:
        """Name of the part, as users see it."""
        return f"{self.contender.label}, seed {self.seed}"


def parts_of(plan: StudyPlan) -> list[StudyPart]:
    """Return all parts of a study, in the order of `run_all`. Their digests are computed from workload files and
    code."""
    common = repr((FORMAT, replace(plan, contenders=(), seeds=()), _files(plan), _code(), _libraries()))
    found = []
    for contender, seed in plan.runs():
        # Only the first seed keeps what is drawn.
        own = repr((contender, _module(contender.policy), seed, seed == plan.seeds[0]))
        found.append(StudyPart(contender, seed, hashlib.sha256(f"{common}\n{own}".encode()).hexdigest()[:24]))
    return found


def _files(plan: StudyPlan) -> str:
    profiles, workload = plan.source.profiles, Path(plan.source.workload)
    found = [_digest(workload.parent, [workload])] if workload.is_file() else []
    if profiles is not None:
        found.append(_digest(profiles, [path for path in profiles.rglob("*") if path.is_file()]))
    return " ".join(found)


@lru_cache
def _code() -> str:
    """Return a digest of our source code."""
    found: list[str] = []
    for package in OURS:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found.append(_digest(Path(folder), [p for p in Path(folder).rglob("*") if p.suffix in (".py", ".npz")]))
    return " ".join(found)


def _module(policy: str) -> str:
    name, colon, _ = policy.partition(":")
    spec = importlib.util.find_spec(name) if colon else None
    return _digest(Path(spec.origin).parent, [Path(spec.origin)]) if spec is not None and spec.origin else ""


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()!r} {len(data)}\n".encode() + data)
    return found.hexdigest()


def _libraries() -> list[str]:
    found = [platform.python_version()]
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


@dataclass(frozen=True)
class StudyFolder:
    """Directory of a study, shared by all its processes. Only one study may use it at a time."""

    root: Path

    @property
    def jobs(self) -> Path:
        """Directory of the scripts and logs of Slurm jobs."""
        return self.root / "jobs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which no other study can use the folder.

        Raises `BadInput` if another study uses it, other users can write to it, or this user cannot.
        """
        try:
            for folder in ("", "results", "progress", "sent", "jobs"):
                (self.root / folder).mkdir(mode=0o700, parents=not folder, exist_ok=True)
                _check_ours(self.root / folder)
            file = (self.root / ".lock").open("a")
        except OSError as error:
            raise BadInput(f"--directory: {self.root} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise BadInput(
                    f"--directory: another study works in {self.root}: wait for it, or name another"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def result(self, part: StudyPart) -> StudyRun | None:
        """Return a part's run; None if there is no file, or if it is damaged."""
        try:
            key, run = pickle.loads(self._result(part).read_bytes())
        except Exception:  # whatever a damaged pickle raises
            return None
        return run if key == part.key and isinstance(run, StudyRun) else None

    def put_result(self, part: StudyPart, run: StudyRun) -> None:
        """Store a part's result atomically."""
        _write(self._result(part), pickle.dumps((part.key, run)))

    def drop_result(self, part: StudyPart) -> None:
        """Remove a part's result, so that the part is run again."""
        self._result(part).unlink(missing_ok=True)

    def done(self, parts: Iterable[StudyPart]) -> dict[str, StudyRun]:
        """Return the runs of those parts that ended without an error, by the part's key."""
        runs = {part.key: self.result(part) for part in parts}
        return {key: run for key, run in runs.items() if run is not None and run.outcome is not None}

    def progress(self, part: StudyPart) -> RunProgress | None:
        """Return the last progress report of a part; None if there is none."""
        try:
            found = json.loads((self.root / "progress" / f"{part.key}.json").read_text(encoding="utf-8"))
            return RunProgress(part.contender.label, part.seed, float(found[0]), int(found[1]), int(found[2]))
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def put_progress(self, part: StudyPart, progress: RunProgress) -> None:
        """Write a progress report of a part. Errors are ignored, since a report may be lost."""
        words = json.dumps([float(progress.simulated_s), progress.ended, progress.jobs])
        with contextlib.suppress(OSError):
            _write(self.root / "progress" / f"{part.key}.json", words.encode())

    def sent(self) -> dict[tuple[str, int], str]:
        """Return the keys of all parts ever sent to Slurm, by (name of the job array, index in the array)."""
        found = {}
        for path in sorted((self.root / "sent").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                keys = json.loads(path.read_text(encoding="utf-8"))
                found.update({(path.stem, index): str(key) for index, key in enumerate(keys)})
        return found

    def put_sent(self, name: str, parts: Sequence[StudyPart]) -> None:
        """Record the parts of a job array, before the array is sent. A later command can then find the array in Slurm
        by its name."""
        _write(self.root / "sent" / f"{name}.json", json.dumps([part.key for part in parts]).encode())

    def drop_sent(self, name: str) -> None:
        """Remove the record of an array that could not be sent."""
        (self.root / "sent" / f"{name}.json").unlink(missing_ok=True)

    def _result(self, part: StudyPart) -> Path:
        return self.root / "results" / f"{part.key}.pkl"


def _check_ours(folder: Path) -> None:
    """Raise `BadInput` if other users can write to the folder. Results in it are unpickled, which can run any code."""
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise BadInput(
            f"--directory: {folder} belongs to uid {info.st_uid}, who could decide what your jobs run: name another"
        )
    if info.st_mode & 0o022:
        raise BadInput(
            f"--directory: other users can write to {folder}, and so decide what your jobs run: check its files and "
            "chmod go-w it, or name another"
        )


def _write(path: Path, data: bytes) -> None:
    """Replace a file atomically: a concurrent reader sees the old or the new content."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def run_all(
    plan: StudyPlan,
    processes: int,
    on_progress: OnProgress = lambda progress: None,
    folder: StudyFolder | None = None,
) -> list[StudyRun]:
    """Run all parts of a plan in parallel processes, and return their runs. If a policy crashes, only this run gets an
    error.

    Results in `folder` are reused, and new results are stored there; the caller must hold `folder.locked()`. Without a
    folder, results are not kept. Only outcomes of the first seed keep segments and goodput, since only these are drawn.
    """
    parts = parts_of(plan)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = StudyFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-ones-"))))
            stack.enter_context(folder.locked())
        runs = folder.done(parts)
        left = [part for part in parts if part.key not in runs]
        if min(processes, len(left)) > 1:
            found = _in_processes(plan, left, processes, folder, on_progress)
        else:
            found = ((part, attempt(plan, part.contender, part.seed, on_progress)) for part in left)
        for part, run in stack.enter_context(contextlib.closing(found)):
            runs[part.key] = run
            # What cannot be kept, as on a full disk, is only run again.
            with contextlib.suppress(OSError):
                folder.put_result(part, run)
            on_progress(RunProgress(run.label, run.seed, finished=True))
    return [runs[part.key] for part in parts]


def _in_processes(
    plan: StudyPlan, parts: Sequence[StudyPart], processes: int, folder: StudyFolder, on_progress: OnProgress
) -> Generator[tuple[StudyPart, StudyRun]]:
    """Yield each part with its run, as soon as the run has ended."""
    context = multiprocessing.get_context("spawn")
    with (
        _one_thread_each(),
        ProcessPoolExecutor(min(processes, len(parts)), mp_context=context, initializer=_be_quiet) as pool,
    ):
        futures = {pool.submit(_reporting, plan, part, folder): part for part in parts}
        try:
            going: set[Future[StudyRun]] = set(futures)
            while going:
                ended, going = wait(going, timeout=REPORT_S, return_when=FIRST_COMPLETED)
                for part in [futures[future] for future in (*ended, *going) if future.running() or future.done()]:
                    if (progress := folder.progress(part)) is not None:
                        on_progress(progress)
                yield from ((futures[future], _result(future, futures[future])) for future in ended)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _be_quiet() -> None:
    # Output of native libraries (HiGHS prints) would appear in the midst of the progress bar.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _reporting(plan: StudyPlan, part: StudyPart, folder: StudyFolder) -> StudyRun:
    """Run a part in this process, and write its progress to the folder, where the parent process reads it."""
    sent, latest = 0.0, RunProgress(part.contender.label, part.seed)
    folder.put_progress(part, latest)  # in place of what a killed command left there

    def on_progress(progress: RunProgress) -> None:
        nonlocal sent, latest
        now, latest = time.monotonic(), progress
        if now - sent >= REPORT_S:
            sent = now
            folder.put_progress(part, progress)

    run = attempt(plan, part.contender, part.seed, on_progress)
    folder.put_progress(part, latest)
    return run


def _result(future: Future[StudyRun], part: StudyPart) -> StudyRun:
    error = future.exception()
    if isinstance(error, BadInput):
        raise error
    if error is not None:
        return StudyRun(part.contender.label, part.seed, error=f"its process died: {error}")
    return future.result()


def run_part(plan: StudyPlan, key: str, root: Path) -> None:
    """Run a part in this process, which is a task of a Slurm job.

    Raises RuntimeError if plan, code or libraries differ from those of the command that sent the job.
    """
    part = {part.key: part for part in parts_of(plan)}.get(key)
    if part is None:
        raise RuntimeError(
            "this node has another version of slurm-ones, Python, numpy or scipy than this part's sender, "
            "or the workload's files or the code have changed since: start the study again"
        )
    folder = StudyFolder(root)
    if folder.result(part) is None:  # else Slurm started the job again after its end
        folder.put_result(part, _reporting(plan, part, folder))


def attempt(plan: StudyPlan, contender: Contender, seed: int, on_progress: OnProgress) -> StudyRun:
    """Run one contender with one seed in this process. If the policy crashes, the run has an error. Raises
    `BadInput`."""
    try:
        workload = plan.workload(seed, contender)
        jobs = len(workload.submissions)
        outcome = run(
            contender.policy,
            contender.options,
            workload,
            plan.cluster,
            oracle="pack" if plan.idealized else None,
            interval_s=plan.interval_s,
            mechanism=plan.mechanism,
            seed=seed,
            settings=plan.settings_of(contender, seed),
            on_time=lambda now, ended: on_progress(RunProgress(contender.label, seed, now, ended, jobs)),
        )
    except BadInput:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}:{at.lineno}"
        return StudyRun(contender.label, seed, error=f"{type(error).__name__}: {error} ({place})")
    # The engine reports at decisions, and the last jobs end after the last one.
    ended = sum(job.ended is not None for job in outcome.jobs)
    on_progress(RunProgress(contender.label, seed, end_of(outcome), ended, len(outcome.jobs)))
    if seed != plan.seeds[0]:
        outcome = replace(outcome, segments=(), goodput=())
    return StudyRun(contender.label, seed, outcome)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Context in which child processes use one thread each for numerics, unless the environment sets another number."""
    ours = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


@dataclass(frozen=True)
class ContenderSummary:
    """Summary of one contender over all seeds."""

    label: str
    each: Mapping[int, Mapping[str, float]]
    """Metrics by key, for each seed whose run succeeded."""
    metrics: Mapping[str, Estimate]
    against_first: Comparison | None
    """Comparison with the first contender; None for the first contender itself, or if there is no common seed."""
    errors: tuple[str, ...] = ()


def summarize(
    plan: StudyPlan, runs: Sequence[StudyRun], bounds: Mapping[int, Bound] = NO_BOUNDS
) -> list[ContenderSummary]:
    """Summarize each contender over the seeds whose runs succeeded.

    A contender is compared with the first contender on their common seeds, and with the bounds on seeds that have a
    bound.
    """
    done = {(run.label, run.seed): run.outcome for run in runs if run.outcome is not None}
    for one in plan.contenders:
        stands = [done[one.label, seed] for seed in plan.seeds_of(one) if (one.label, seed) in done]
        if len(plan.seeds_of(one)) < len(plan.seeds) and stands:
            done |= {(one.label, seed): stands[0] for seed in plan.seeds}
    work = {seed: _work_of(plan, seed) for seed in plan.seeds}
    first = {seed: done.get((plan.contenders[0].label, seed)) for seed in plan.seeds}
    found = []
    for label in [contender.label for contender in plan.contenders]:
        own = {seed: done[label, seed] for seed in plan.seeds if (label, seed) in done}
        each = {seed: plan.source.figures(outcome, work[seed], first[seed]) for seed, outcome in own.items()}
        for seed in own.keys() & bounds.keys():
            each[seed] |= against_bound(own[seed], bounds[seed], plan.interval_s)
        pairs = [] if label == plan.contenders[0].label else [(own[s], was) for s in own if (was := first[s])]
        times = [[completion_times(plan.source.counted(outcome)) for outcome in pair] for pair in pairs]
        times = [pair for pair in times if len(pair[0]) == len(pair[1]) > 0]
        against = compare([now for now, _ in times], [was for _, was in times]) if times else None
        keys = each[min(each)] if each else ()
        metrics = {key: estimate([one[key] for one in each.values()]) for key in keys}
        errors = tuple(f"seed {run.seed}: {run.error}" for run in runs if run.label == label and run.error)
        found.append(ContenderSummary(label, each, metrics, against, errors))
    return found


def _work_of(plan: StudyPlan, seed: int) -> dict[str, float]:
    work = plan.workload(seed)
    return {
        s.name: undisturbed_s(work.applications[s.application], s, plan.cluster.least_node) for s in work.submissions
    }
