"""Policies compared on the same work: every policy on every seed's workload, in parallel processes."""

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

from slurm_ones.policies import make_policy
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.bound.bound import Bound
from slurm_ones.simulate.engines.idealized import run_idealized
from slurm_ones.simulate.engines.outcome import Outcome
from slurm_ones.simulate.study.bounds import against_bound
from slurm_ones.simulate.study.figures import Comparison, Estimate, compare, completion_times, estimate, figures
from slurm_ones.simulate.study.plan import Plan, PolicySpec
from slurm_ones.simulate.workloads.generate import undisturbed_s
from slurm_ones.simulate.workloads.workload import Workload

POLL_S = 0.2
"""Seconds between two looks at how far the processes have come."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What keeps a numerical library from taking more cores than the process is meant to have."""

NO_BOUNDS: Mapping[int, Bound] = {}


@dataclass(frozen=True)
class Run:
    """One policy on one seed, and what became of it."""

    policy: str
    seed: int
    outcome: Outcome | None = None
    error: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class PolicySummary:
    """One policy over all seeds."""

    label: str
    seeds: tuple[int, ...]
    """Those that it came through."""
    metrics: Mapping[str, Estimate]
    against_first: Comparison | None
    """None for the first policy, and where the two have no seed in common."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunProgress:
    """How far one run has come."""

    policy: str
    seed: int
    simulated_s: float = 0.0
    """Simulated seconds so far; 0 where it is not known."""
    ended: int = 0
    """Jobs that have ended."""
    jobs: int = 0
    """Jobs of the workload."""
    finished: bool = False
    """The run is over, well or not."""

    @property
    def share(self) -> float:
        """Share of the run that is done, by its jobs."""
        return 1.0 if self.finished else self.ended / max(self.jobs, 1)


OnProgress = Callable[[RunProgress], None]


def simulate(plan: Plan, policy: PolicySpec, seed: int, on_progress: OnProgress) -> Outcome:
    """One policy on one seed, in this process."""
    workload = plan.workload(seed)
    jobs = len(workload.submissions)

    def on_time(simulated_s: float, ended: int) -> None:
        on_progress(RunProgress(policy.label, seed, simulated_s, ended, jobs))

    if plan.idealized:
        return run_idealized(
            make_policy(policy.name, **policy.options),
            workload,
            plan.cluster(),
            interval_s=plan.interval_s,
            mechanism=plan.mechanism,
            seed=seed,
            on_time=on_time,
        )
    # The companion and its database are needed for this one alone.
    from slurm_ones.simulate.engines.companion_engine import run

    return run(
        policy.name,
        policy.options,
        workload,
        plan.cluster(),
        interval_s=plan.interval_s,
        mechanism=plan.mechanism,
        seed=seed,
        settings=plan.settings,
        on_time=on_time,
    )


def run_all(
    plan: Plan,
    processes: int,
    on_progress: OnProgress = lambda progress: None,
    known: Mapping[tuple[str, int], Run] | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Every policy on every seed, in that many processes. A policy that crashes costs itself that seed alone.

    Only the first seed's outcomes keep what is drawn: who held what when, and the goodput. Runs that are `known`, by
    policy and seed, are taken as they are; `on_run` gets each other one as it ends.
    """
    runs = dict(known or {})
    tasks = [(policy, seed) for seed in plan.seeds for policy in plan.policies]
    left = [(policy, seed) for policy, seed in tasks if (policy.label, seed) not in runs]

    def ended_as(run: Run) -> None:
        runs[run.policy, run.seed] = run
        on_run(run)
        on_progress(RunProgress(run.policy, run.seed, finished=True))

    if processes <= 1 or not left:
        for policy, seed in left:
            ended_as(attempt(plan, policy, seed, on_progress))
        return [runs[policy.label, seed] for policy, seed in tasks]
    context = multiprocessing.get_context("spawn")
    reported = context.Queue()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(reported,)) as pool,
    ):
        futures = {pool.submit(_run_in_worker, plan, policy, seed): (policy, seed) for policy, seed in left}
        try:
            going: set[Future[Run]] = set(futures)
            while going:
                ended, going = wait(going, timeout=POLL_S)
                _forward(reported, on_progress)
                for future in ended:
                    ended_as(_result(future, *futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [runs[policy.label, seed] for policy, seed in tasks]


def attempt(plan: Plan, policy: PolicySpec, seed: int, on_progress: OnProgress) -> Run:
    """One policy on one seed, in this process; a policy that crashes is a run with an error. Raises `BadInput`."""
    try:
        outcome = simulate(plan, policy, seed, on_progress)
    except BadInput:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return Run(policy.label, seed, error=f"{type(error).__name__}: {error} ({place})")
    if seed != plan.seeds[0]:
        outcome = replace(outcome, segments=(), goodput=())
    return Run(policy.label, seed, outcome)


_reported: multiprocessing.Queue[RunProgress] | None = None
"""Of a worker process: where it reports how far it has come."""


def _start_worker(reported: multiprocessing.Queue[RunProgress]) -> None:
    global _reported
    _reported = reported
    # What native libraries print (HiGHS does) would appear in the midst of the progress bar.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _run_in_worker(plan: Plan, policy: PolicySpec, seed: int) -> Run:
    sent = 0.0

    def on_progress(progress: RunProgress) -> None:
        # Seldom, so that little is left unread when the run ends.
        nonlocal sent
        now = time.monotonic()
        if _reported is not None and now - sent > POLL_S:
            sent = now
            _reported.put(progress)

    return attempt(plan, policy, seed, on_progress)


def _forward(reported: multiprocessing.Queue[RunProgress], on_progress: OnProgress) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            on_progress(reported.get_nowait())


def _result(future: Future[Run], policy: PolicySpec, seed: int) -> Run:
    error = future.exception()
    if isinstance(error, BadInput):
        raise error
    if error is not None:
        return Run(policy.label, seed, error=f"its process died: {error}")
    return future.result()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started meanwhile compute in one thread, unless the environment says otherwise."""
    ours = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def summarize(plan: Plan, runs: Sequence[Run], bounds: Mapping[int, Bound] = NO_BOUNDS) -> list[PolicySummary]:
    """Each policy over the seeds that it came through, against the first on those that both did, and against the bound
    of each seed where there is one."""
    done = {(run.policy, run.seed): run.outcome for run in runs if run.outcome is not None}
    work = {seed: _work_of(plan.workload(seed), plan.gpus_per_node) for seed in plan.seeds}
    first = plan.policies[0].label
    found = []
    for policy in plan.policies:
        label = policy.label
        seeds = tuple(seed for seed in plan.seeds if (label, seed) in done)
        each = [figures(done[label, seed], work[seed]) for seed in seeds]
        for seed, found_there in zip(seeds, each, strict=True):
            if seed in bounds:
                found_there |= against_bound(done[label, seed], bounds[seed], plan.interval_s)
        both = [seed for seed in seeds if (first, seed) in done]
        against = None
        if label != first and both:
            against = compare(
                [completion_times(done[label, seed]) for seed in both],
                [completion_times(done[first, seed]) for seed in both],
            )
        metrics = {key: estimate([one[key] for one in each]) for key in (each[0] if each else ())}
        errors = tuple(f"seed {run.seed}: {run.error}" for run in runs if run.policy == label and run.error)
        found.append(PolicySummary(label, seeds, metrics, against, errors))
    return found


def _work_of(workload: Workload, per_node: int) -> dict[str, float]:
    """How much each job has to do: its seconds at the size and batch that its user asks for."""
    return {s.name: undisturbed_s(workload.applications[s.application], s, per_node) for s in workload.submissions}
