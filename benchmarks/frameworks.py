"""What a framework's script must change to be elastic, and what a resized run of it loses or repeats.

`lines_changed` counts the edits that docs/trainer.md shows. `Resized` runs the elastic example under `ones-run`, on
this machine, through starts of different sizes that are stopped or killed at given steps (`benchmarks.interrupted`),
and counts in the traces how often each sample of each epoch was used.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import ones_wrapper
from tests.wrapper.runs import samples_used

EXAMPLES = Path(ones_wrapper.__file__).parents[1] / "examples"
DOCS = EXAMPLES.parents[1] / "docs"
INTERRUPTED = Path(__file__).parent / "interrupted.py"


@dataclass(frozen=True)
class Case:
    """A framework's example."""

    name: str
    """Of the package, and of our module for it."""
    elastic: str
    arguments: tuple[str, ...]
    preload: str
    """Modules that the ranks of a node import once."""
    samples: int
    """Of an epoch."""
    epochs: int

    @property
    def missing(self) -> bool:
        """Whether the framework is not installed."""
        return find_spec(self.name) is None


CASES = {
    "transformers": Case(
        "transformers",
        "trainer_elastic.py",
        ("--epochs", "2", "--samples", "200"),
        "ones_wrapper.frameworks.transformers,transformers.models.gpt2.modeling_gpt2",
        200,
        2,
    ),
    "accelerate": Case(
        "accelerate",
        "accelerate_elastic.py",
        ("--epochs", "2"),
        "ones_wrapper.frameworks.accelerate,sklearn.datasets",
        1500,
        2,
    ),
    "lightning": Case(
        "lightning",
        "lightning_elastic.py",
        ("--epochs", "2"),
        "ones_wrapper.frameworks.lightning,sklearn.datasets",
        1500,
        2,
    ),
}


def lines_changed(case: Case) -> int:
    """Return the number of lines that docs/trainer.md adds to a plain script."""
    return lines_added(DOCS / "trainer.md", f"ones_wrapper.frameworks.{case.name} ", case.elastic)


def lines_added(page: Path, mark: str, elastic: str) -> int:
    """Return the number of lines that a page's diff with this `mark` adds to a plain script. Raises ValueError for a
    line that the elastic example does not have, or that it should not have any more."""
    script = [line.strip() for line in (EXAMPLES / elastic).read_text().splitlines()]
    edits = next(one for one in re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL) if mark in one)
    for line in edits.splitlines():
        if line[0] in "+-" and (line[1:].strip() in script) != (line[0] == "+"):
            raise ValueError(f"{page.name} and {elastic} differ: {line}")
    return sum(line.startswith("+") and bool(line[1:].strip()) for line in edits.splitlines())


@dataclass(frozen=True)
class Start:
    """One start: so many ranks, and which signal comes after which step."""

    ranks: int
    signals: tuple[str, ...] = ()
    """`STEP:NAME`, such as `7:TERM`, once; the last rank gets it."""


class Resized:
    """An elastic example through several starts in one folder."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.job = folder / "job"
        self.job.mkdir(parents=True, exist_ok=True)

    def run(self, starts: Sequence[Start], timeout_s: float = 120.0) -> list[subprocess.CompletedProcess[str]]:
        """Run it to its end. Raises RuntimeError where a start ends otherwise than it should: with a code of 143 where
        it was stopped, and with 0 at last.
        """
        found = []
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
        for number, start in enumerate(starts):
            env = {
                "ONES_JOB_DIR": str(self.job),
                "SLURM_RESTART_COUNT": str(number),
                "ONES_PRELOAD": self.case.preload,
                "ONES_TRACE": str(self.job / "trace-{restart}-{rank}.jsonl"),
                "ONES_INTERRUPT": " ".join(start.signals),
                "HF_HUB_OFFLINE": "1",
            }
            script = [str(INTERRUPTED), str(EXAMPLES / self.case.elastic), *self.case.arguments]
            command = [sys.executable, "-m", "ones_wrapper.launch", f"--ranks-per-node={start.ranks}", *script]
            done = subprocess.run(
                command,
                env=clean | env,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            found.append(done)
            if done.returncode != (0 if start is starts[-1] else 143):
                raise RuntimeError(f"start {number} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return found

    def samples(self) -> dict[str, int]:
        """How many samples were lost, and how many repeated, over all epochs."""
        used = samples_used(self.job)
        wanted = {(epoch, sample) for epoch in range(self.case.epochs) for sample in range(self.case.samples)}
        found = {(epoch, sample) for epoch, samples in used.items() for sample in samples}
        times = sum(samples.total() for samples in used.values())
        return {"samples_lost": len(wanted - found), "samples_repeated": times - len(found & wanted)}


RESIZES = (Start(1, ("5:TERM",)), Start(2, ("9:USR1", "11:KILL", "16:TERM")), Start(1))
"""One rank, two, one; of the two one is killed after a checkpoint, and the ranks start again."""


def measured(case: Case, folder: Path) -> dict[str, int]:
    """Lines changed, and samples lost and repeated through `RESIZES`, in a new folder."""
    resized = Resized(case, folder)
    resized.run(RESIZES)
    return {"lines_changed": lines_changed(case), **resized.samples()}


FRAMEWORKS = {name: partial(measured, case) for name, case in CASES.items() if not case.missing}
"""Of those that are installed."""
