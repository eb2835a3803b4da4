"""Runs of a study: each contender on every seed's workload, in parallel processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
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

POLL_S = 0.2
"""Seconds between two checks of the processes' progress."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that limit the threads of numerical libraries."""

NO_BOUNDS: Mapping[int, Bound] = {}


@dataclass(frozen=True)
class StudyRun:
    """Run of one contender on one seed, and its outcome."""

    label: str
    seed: int
    outcome: Outcome | None = None
    error: str = ""
    """Error message if there is no outcome."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run."""

    label: str
    seed: int
    simulated_s: float = 0.0
    """Simulated seconds so far; 0 if unknown."""
    ended: int = 0
    """Number of jobs that have ended."""
    jobs: int = 0
    """Number of jobs in the workload."""
    finished: bool = False
    """True once the run is over, with or without error."""

    @property
    def share(self) -> float:
        """Share of the run's jobs that have ended."""
        return 1.0 if self.finished else self.ended / max(self.jobs, 1)


OnProgress = Callable[[RunProgress], None]


def run_all(
    plan: StudyPlan,
    processes: int,
    on_progress: OnProgress = lambda progress: None,
    known: Mapping[tuple[str, int], StudyRun] | None = None,
    on_run: Callable[[StudyRun], None] = lambda run: None,
) -> list[StudyRun]:
    """Run all contenders and seeds of a plan in parallel processes. If a policy crashes, only that run is lost.

    Only outcomes of the first seed keep segments and goodput, which are drawn. Runs in `known`, by label and seed, are
    reused; `on_run` is called with every other run as it ends.
    """
    runs, tasks = dict(known or {}), list(plan.runs())
    left = [(contender, seed) for contender, seed in tasks if (contender.label, seed) not in runs]

    def ended_as(run: StudyRun) -> None:
        runs[run.label, run.seed] = run
        on_run(run)
        on_progress(RunProgress(run.label, run.seed, finished=True))

    if min(processes, len(left)) <= 1:
        for contender, seed in left:
            ended_as(attempt(plan, contender, seed, on_progress))
    else:
        _in_processes(plan, left, processes, on_progress, ended_as)
    return [runs[contender.label, seed] for contender, seed in tasks]


def _in_processes(
    plan: StudyPlan,
    tasks: Sequence[tuple[Contender, int]],
    processes: int,
    on_progress: OnProgress,
    ended_as: Callable[[StudyRun], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    reported = context.Queue()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(
            min(processes, len(tasks)), mp_context=context, initializer=_start_worker, initargs=(reported,)
        ) as pool,
    ):
        futures = {pool.submit(_run_in_worker, plan, *task): task for task in tasks}
        try:
            going: set[Future[StudyRun]] = set(futures)
            while going:
                ended, going = wait(going, timeout=POLL_S)
                with contextlib.suppress(queue.Empty):
                    while True:
                        on_progress(reported.get_nowait())
                for future in ended:
                    ended_as(_result(future, *futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def attempt(plan: StudyPlan, contender: Contender, seed: int, on_progress: OnProgress) -> StudyRun:
    """Run one contender on one seed in this process; if the policy crashes, the run has an error. Raises `BadInput`."""
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


_reported: multiprocessing.Queue[RunProgress] | None = None
"""Queue through which a worker process reports its progress."""


def _start_worker(reported: multiprocessing.Queue[RunProgress]) -> None:
    global _reported
    _reported = reported
    # Output of native libraries (HiGHS prints) would appear in the midst of the progress bar.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _run_in_worker(plan: StudyPlan, contender: Contender, seed: int) -> StudyRun:
    sent = 0.0

    def on_progress(progress: RunProgress) -> None:
        # Seldom, so that little is left unread when the run ends.
        nonlocal sent
        now = time.monotonic()
        if _reported is not None and now - sent > POLL_S:
            sent = now
            _reported.put(progress)

    return attempt(plan, contender, seed, on_progress)


def _result(future: Future[StudyRun], contender: Contender, seed: int) -> StudyRun:
    error = future.exception()
    if isinstance(error, BadInput):
        raise error
    if error is not None:
        return StudyRun(contender.label, seed, error=f"its process died: {error}")
    return future.result()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Context in which started processes compute in one thread, unless the environment says otherwise."""
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
    """Figures by key, of each seed that ended without error."""
    metrics: Mapping[str, Estimate]
    against_first: Comparison | None
    """Comparison with the first contender; None for the first itself, or without a common seed."""
    errors: tuple[str, ...] = ()


def summarize(
    plan: StudyPlan, runs: Sequence[StudyRun], bounds: Mapping[int, Bound] = NO_BOUNDS
) -> list[ContenderSummary]:
    """Summarize each contender over its seeds without error. It is compared with the first contender on common seeds,
    and with the bound of each seed that has one."""
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
