"""Tests of resize logic in seconds, without Slurm: the test's body runs in forked ranks, again and again.

    @testing.elastic(ranks=2)
    def test_resize() -> int | None:
        job = ones.init(batch=8, epochs=1)
        ...                                     # the script's own set-up
        for _ in job.epochs():
            for x, y in loader:
                if job.progress.step == 5:      # five steps are done, this one is not begun
                    job.checkpoint()
                    return 3                    # go on with three ranks
                ...                             # a step
        testing.put(parameters)                 # for later starts, and for who called `testing.run`
        return None                             # the end

Each start is a new run of one job, as after a requeue: SLURM_RESTART_COUNT rises, the job's directory stays. The test
passes when a start returns None on all ranks. (A test that returns its next size is AdaptDL's idea; Qiao et al., OSDI
2021.) Forking shares what the test process has imported, so a start takes a fraction of a second.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ones_wrapper.forks import Rank, RankFailed, Start

__all__ = ["Put", "RankFailed", "die", "elastic", "put", "run", "values"]


@dataclass(frozen=True)
class Put:
    """A value that a rank put."""

    start: int
    """Number of the start, from 0."""
    rank: int
    world: int
    value: Any


_earlier: list[Put] = []


def put(value: Any) -> None:
    """Keep a value, which pickle must take, for later starts and for who called `run`."""
    _this("put").put.append(value)


def values() -> list[Put]:
    """What the ranks of earlier starts put, by start and rank."""
    return list(_earlier)


def die(ranks: int) -> NoReturn:
    """End this rank as SIGKILL does, with no goodbye; the next start has so many ranks. All ranks call it."""
    _this("die").die(ranks)


def _this(name: str) -> Rank:
    if Rank.this is None:
        raise RuntimeError(f"testing.{name}: call it in a body that testing.elastic or testing.run runs")
    return Rank.this


def elastic(
    ranks: int = 1, *, timeout_s: float = 60.0, most_starts: int = 32, env: Mapping[str, str] | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Decorates a test: its body runs in `ranks` processes, then in as many as it returned, until it returns
    None. Further as `run`.
    """

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            body = functools.partial(function, *args, **kwargs)
            run(body, ranks=ranks, timeout_s=timeout_s, most_starts=most_starts, env=env)

        return test

    return decorate


def run(
    body: Callable[[], int | None],
    *,
    ranks: int = 1,
    timeout_s: float = 60.0,
    most_starts: int = 32,
    env: Mapping[str, str] | None = None,
) -> list[Put]:
    """Run `body` in `ranks` processes, then in as many as it returned, until it returns None; what they put.

    `timeout_s` is for each start; `env` is added to the ranks' environment. Raises RankFailed where a rank
    raises, vanishes or hangs, where ranks return different sizes, and after `most_starts` starts;
    RuntimeError where this process cannot be forked (it uses a GPU, or has a process group).
    """
    if torch.cuda.is_initialized() or dist.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("testing: this process uses a GPU or has a process group, which no fork survives")
    # What each rank would import otherwise; torch.optim imports the second at its first use.
    for module in ("ones_wrapper.api", "torch._dynamo"):
        importlib.import_module(module)
    _earlier.clear()
    try:
        with tempfile.TemporaryDirectory(prefix="ones-test-") as directory:
            for number in range(most_starts):
                wanted = _start(Start(number, ranks, Path(directory)), number, body, timeout_s, env or {})
                if len(set(wanted)) > 1:
                    raise RankFailed(f"start {number}: the ranks returned different sizes: {wanted}")
                if wanted[0] is None:
                    return list(_earlier)
                ranks = wanted[0]
        raise RankFailed(f"the job has not ended after {most_starts} starts")
    finally:
        _earlier.clear()


def _start(
    start: Start, number: int, body: Callable[[], int | None], timeout_s: float, env: Mapping[str, str]
) -> list[int | None]:
    """What the ranks returned; what they put is kept."""
    try:
        start.fork(body, env)
        said = start.outcome(timeout_s)
    finally:
        start.end()
    _earlier.extend(Put(number, rank, len(said), value) for rank, one in enumerate(said) for value in one.put)
    return [one.wanted for one in said]
