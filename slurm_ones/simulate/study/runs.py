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
from functools import partial
from pathlib import Path

from slurm_ones.decide import make_policy
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.engines.idealized import plain_cluster, run_plain
from slurm_ones.simulate.engines.outcome import Outcome
from slurm_ones.simulate.study.figures import Comparison, Estimate, compare, completion_times, estimate, figures
from slurm_ones.simulate.study.plan import Contender, Plan
from slurm_ones.simulate.workloads.generate import undisturbed_s
from slurm_ones.simulate.workloads.workload import Workload

POLL_S = 0.2
"""Seconds between two looks at how far the processes have come."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What keeps a numerical library from taking more cores than the process is meant to have."""


@dataclass(frozen=True)
class Run:
    """One contender on one seed, and what became of it."""

    contender: str
    seed: int
    outcome: Outcome | None = None
    error: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class Standing:
    """One contender over all seeds."""

    label: str
    seeds: tuple[int, ...]
    """Those that it came through."""
    metrics: Mapping[str, Estimate]
    against_first: Comparison | None
    """None for the first contender, and where the two have no seed in common."""
    errors: tuple[str, ...] = ()


OnProgress = Callable[[str, int, float], None]
"""Contender, seed, and the share of its jobs that have ended."""


def simulate(plan: Plan, contender: Contender, seed: int, on_share: Callable[[float], None]) -> Outcome:
    """One contender on one seed, in this process."""
    workload = plan.workload(seed)
    jobs = len(workload.submissions)

    def on_time(_: float, ended: int) -> None:
        on_share(ended / jobs)

    if plan.plain:
        return run_plain(
            make_policy(contender.policy, **contender.options),
            workload,
            plain_cluster(plan.nodes, plan.gpus_per_node),
            interval_s=plan.interval_s,
            resize_s=plan.resize_s,
            seed=seed,
            on_time=on_time,
        )
    # The companion and its database are needed for this one alone.
    from slurm_ones.simulate.engines.companion_engine import run
    from slurm_ones.simulate.engines.world import ClusterSpec

    return run(
        contender.policy,
        contender.options,
        workload,
        ClusterSpec(plan.nodes, plan.gpus_per_node),
        interval_s=plan.interval_s,
        resize_s=plan.resize_s,
        seed=seed,
        settings=plan.settings,
        on_time=on_time,
    )


def run_all(plan: Plan, processes: int, on_progress: OnProgress = lambda label, seed, share: None) -> list[Run]:
    """Every contender on every seed, in that many processes. A contender that crashes costs itself that seed alone.

    Only the first seed's outcomes keep what is drawn: who held what when, and the goodput.
    """
    tasks = [(contender, seed) for seed in plan.seeds for contender in plan.contenders]
    if processes <= 1:
        return [_attempt(plan, c, seed, partial(on_progress, c.label, seed)) for c, seed in tasks]
    context = multiprocessing.get_context("spawn")
    heard = context.Queue()
    with (
        _one_thread_each(),
        ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(heard,)) as pool,
    ):
        futures = {pool.submit(_work, plan, contender, seed): (contender, seed) for contender, seed in tasks}
        try:
            left: set[Future[Run]] = set(futures)
            while left:
                ended, left = wait(left, timeout=POLL_S)
                _listen(heard, on_progress)
                for future in ended:
                    on_progress(futures[future][0].label, futures[future][1], 1.0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [_result(future, contender, seed) for future, (contender, seed) in futures.items()]


def _attempt(plan: Plan, contender: Contender, seed: int, on_share: Callable[[float], None]) -> Run:
    try:
        outcome = simulate(plan, contender, seed, on_share)
    except BadInput:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return Run(contender.label, seed, error=f"{type(error).__name__}: {error} ({place})")
    if seed != plan.seeds[0]:
        outcome = replace(outcome, segments=(), goodput=())
    return Run(contender.label, seed, outcome)


_heard: multiprocessing.Queue[tuple[str, int, float]] | None = None
"""Of a worker process: where it says how far it has come."""


def _begin(heard: multiprocessing.Queue[tuple[str, int, float]]) -> None:
    global _heard
    _heard = heard
    # What native libraries print (HiGHS does) would appear in the midst of the progress bar.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _work(plan: Plan, contender: Contender, seed: int) -> Run:
    said = 0.0

    def on_share(share: float) -> None:
        # Seldom, so that what is not yet heard when it ends is little.
        nonlocal said
        now = time.monotonic()
        if _heard is not None and now - said > POLL_S:
            said = now
            _heard.put((contender.label, seed, share))

    return _attempt(plan, contender, seed, on_share)


def _listen(heard: multiprocessing.Queue[tuple[str, int, float]], on_progress: OnProgress) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            on_progress(*heard.get_nowait())


def _result(future: Future[Run], contender: Contender, seed: int) -> Run:
    error = future.exception()
    if isinstance(error, BadInput):
        raise error
    if error is not None:
        return Run(contender.label, seed, error=f"its process died: {error}")
    return future.result()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started meanwhile compute in one thread, unless told otherwise."""
    ours = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def standings(plan: Plan, runs: Sequence[Run]) -> list[Standing]:
    """Each contender over the seeds that it came through, and against the first on those that both did."""
    done = {(run.contender, run.seed): run.outcome for run in runs if run.outcome is not None}
    work = {seed: _work_of(plan.workload(seed), plan.gpus_per_node) for seed in plan.seeds}
    first = plan.contenders[0].label
    found = []
    for contender in plan.contenders:
        label = contender.label
        seeds = tuple(seed for seed in plan.seeds if (label, seed) in done)
        each = [figures(done[label, seed], work[seed]) for seed in seeds]
        both = [seed for seed in seeds if (first, seed) in done]
        against = None
        if label != first and both:
            against = compare(
                [completion_times(done[label, seed]) for seed in both],
                [completion_times(done[first, seed]) for seed in both],
            )
        metrics = {key: estimate([one[key] for one in each]) for key in (each[0] if each else ())}
        errors = tuple(f"seed {run.seed}: {run.error}" for run in runs if run.contender == label and run.error)
        found.append(Standing(label, seeds, metrics, against, errors))
    return found


def _work_of(workload: Workload, per_node: int) -> dict[str, float]:
    """How much each job has to do: its seconds at the size and batch that its user asks for."""
    return {s.name: undisturbed_s(workload.applications[s.application], s, per_node) for s in workload.submissions}
