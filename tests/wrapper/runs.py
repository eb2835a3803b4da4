"""Starts training runs with `ones-run` outside Slurm, and reads what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ones_wrapper.launch.pieces import NAME
from ones_wrapper.protocol import Order, Report, decode_report, encode, reports_name
from tests.wrapper.preloaded import Started, forkable

TRAIN = Path(__file__).parent / "train.py"
TIMEOUT_S = 180.0

R = TypeVar("R", bound=Report)


@cache
def decoded(line: bytes) -> Report:
    """The report of a line; who waits for a report reads the lines before many times."""
    return decode_report(line)[2]


def reports_in(path: Path) -> list[Report]:
    """The reports so far; none where there is no such file yet."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [decoded(line) for line in lines if line.endswith(b"\n")]


class Run:
    """One run: `ones-run --gpus-per-node RANKS train.py …` in the background."""

    forked = True
    """Whether it is a fork of a process that has imported torch (`preloaded`), where that makes no difference."""

    def __init__(
        self, job_dir: Path, *arguments: str, ranks: int = 1, restart: int = 0, script: Path = TRAIN, **env: str
    ) -> None:
        self.job_dir, self.restart = job_dir, restart
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_", "OMP_"))}
        clean |= {
            "ONES_JOB_DIR": str(job_dir),
            "SLURM_RESTART_COUNT": str(restart),
            "ONES_REPORT_EVERY_S": "0.2",
            "ONES_TRACE": str(job_dir / "trace-{restart}-{rank}.jsonl"),
            **env,
        }
        arguments = (f"--gpus-per-node={ranks}", str(script), *arguments)
        self.process: Started | subprocess.Popen[str]
        if self.forked and forkable(clean):
            self.process = Started(arguments, clean)
        else:
            command = [sys.executable, "-m", "ones_wrapper.launch", *arguments]
            self.process = subprocess.Popen(
                command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        self.output = self.errors = ""

    def end(self) -> int:
        """Wait for the end; the exit code."""
        try:
            self.output, self.errors = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            left = _standing(self.process.pid)
            self.process.kill()
            raise AssertionError(f"still there: {left}; printed: {error.output} {error.stderr}") from error
        return self.process.returncode

    def reports(self) -> list[Report]:
        return reports_in(self.job_dir / reports_name(self.restart))

    def of(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports() if isinstance(report, kind)]

    def wait_for(self, kind: type[R], condition: Callable[[R], bool] = lambda report: True) -> R:
        """Wait for a report; fails when the run ends without it."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            for report in self.of(kind):
                if condition(report):
                    return report
            if ended:
                break
            time.sleep(0.02)
        self.process.kill()
        self.end()
        raise AssertionError(f"no such {kind.kind}; reports {self.reports()}; stderr {self.errors}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def children(pid: int) -> list[int]:
    """The processes that a process's first thread started; none if it ended meanwhile."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def ranks_of(launcher: int) -> list[int]:
    """The ranks of a node launcher, which also has a process that serves its folder in memory."""
    found = []
    for pid in children(launcher):
        with suppress(OSError):  # ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() != NAME:
                found.append(pid)
    return found


def _standing(pid: int) -> list[str]:
    """What a process and those that it started do in the kernel, a line a thread."""
    lines = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"{pid}/{thread.name} {state} {(thread / 'wchan').read_text()}")
    return lines + [line for child in children(pid) for line in _standing(child)]


def write_order(job_dir: Path, order: Order) -> None:
    """Replace `orders.json` as the companion does."""
    new = job_dir / ".orders.json"
    new.write_bytes(encode(order))
    new.replace(job_dir / "orders.json")


def lines_that_count(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of a trace (`ONES_TRACE`) that led to the final parameters.

    A start that was killed took steps after its last checkpoint, which the next start took again: what counts of
    a start is what came before the step at which a later one went on.
    """
    lines = list(lines)

    def start(line: dict[str, Any]) -> tuple[int, int]:
        return line["restart"], line["attempt"]

    begins = {start(line): line["begin"] for line in lines if "begin" in line}

    def counts(line: dict[str, Any]) -> bool:
        later = [begin for other, begin in begins.items() if other > start(line)]
        return line["step"] < min(later, default=line["step"] + 1)

    return [line for line in lines if "samples" in line and counts(line)]


def samples_used(job_dir: Path) -> dict[int, Counter[int]]:
    """How often each sample of each epoch was used, by epoch, from the traces in a job's directory."""
    used: dict[int, Counter[int]] = {}
    for line in lines_that_count(_trace(job_dir)):
        used.setdefault(line["epoch"], Counter()).update(line["samples"])
    return used


def samples_by_step(job_dir: Path) -> dict[tuple[int, int, int], int]:
    """How many samples each step used that counts, by step, epoch and restart."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for line in lines_that_count(_trace(job_dir)):
        counts[line["step"], line["epoch"], line["restart"]] += len(line["samples"])
    return counts


def _trace(job_dir: Path) -> list[dict[str, Any]]:
    texts = (path.read_text() for path in sorted(job_dir.glob("trace-*.jsonl")))
    return [json.loads(line) for text in texts for line in text.splitlines()]


def samples_wrong(job_dir: Path, samples: int) -> tuple[int, int, int]:
    """Epochs but the last, in which it may have been stopped, and the samples lost and repeated in them."""
    used = samples_used(job_dir)
    whole = [used.get(epoch, Counter()) for epoch in range(max(used, default=0))]
    lost = sum(samples - len(counter) for counter in whole)
    return len(whole), lost, sum(counter.total() - len(counter) for counter in whole)


def steps_undone(job_dir: Path) -> int:
    """Steps that were taken again."""
    lines = _trace(job_dir)
    counted = {id(line) for line in lines_that_count(lines)}
    return len({(line["restart"], line["step"]) for line in lines if "samples" in line and id(line) not in counted})


def assert_exactly_once(job_dir: Path, epochs: int, samples: int) -> None:
    """Every sample of every epoch was used once, and nothing else was."""
    used = samples_used(job_dir)
    assert sorted(used) == list(range(epochs))
    for epoch, counter in used.items():
        wrong = {s: n for s, n in counter.items() if n != 1}
        assert not wrong, f"epoch {epoch}: samples used {wrong}"
        assert set(counter) == set(range(samples)), f"epoch {epoch}: {samples - len(counter)} samples not used"
