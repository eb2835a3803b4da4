"""Progress of a study on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from slurm_ones.cli.common import errors
from slurm_ones.text import plain, safe, seconds

if TYPE_CHECKING:
    from slurm_ones.simulate.study.runs import OnProgress, RunProgress

Found = TypeVar("Found")


class ProgressLines:
    """Progress without a terminal: a line at the end of each run, and else one every `EVERY_S` seconds."""

    EVERY_S = 15.0

    def __init__(self, runs: int, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`runs` is the total number of runs; `write` is called with each line."""
        self._runs = runs
        self._write = write
        self._clock = clock
        self._began = self._written = clock()
        self._latest: dict[tuple[str, int], RunProgress] = {}

    def __call__(self, progress: RunProgress) -> None:
        """See `runs.OnProgress`."""
        key = progress.label, progress.seed
        before = self._latest.get(key)
        if before is not None and before.finished:
            return
        if progress.finished and before is not None:
            progress = replace(before, finished=True)
        self._latest[key] = progress
        now = self._clock()
        if progress.finished or now - self._written >= self.EVERY_S:
            self._written = now
            self._write(self._line(progress, now - self._began))

    def _line(self, progress: RunProgress, elapsed_s: float) -> str:
        done = sum(one.share for one in self._latest.values()) / self._runs
        finished = sum(one.finished for one in self._latest.values())
        left = seconds(elapsed_s * (1.0 - done) / done) if done > 0 else "–"
        return (
            f"{finished} of {self._runs} runs done after {seconds(elapsed_s)}, about {left} left; {progress.label}, "
            f"seed {progress.seed}: {progress.ended} of {progress.jobs} jobs ended in "
            f"{seconds(progress.simulated_s)} of simulated time{', done' * progress.finished}"
        )


def shown(runs: int, run: Callable[[OnProgress], Found]) -> Found:
    """Call `run`, which does `runs` runs, and show its progress: a bar on a terminal, lines elsewhere."""
    if not errors.is_terminal:
        return run(ProgressLines(runs, inform))
    shares: dict[tuple[str, int], float] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[last]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(f"{runs} runs", total=float(runs), last="")

        def on_progress(progress: RunProgress) -> None:
            key = progress.label, progress.seed
            shares[key] = max(progress.share, shares.get(key, 0.0))
            bar.update(task, completed=sum(shares.values()), last=f"{safe(key[0], 40)}, seed {key[1]}")

        return run(on_progress)


def inform(line: str) -> None:
    """Print a sentence on stderr, above the progress bar if there is one."""
    errors.print(plain(line, 1000), markup=False, soft_wrap=True)
