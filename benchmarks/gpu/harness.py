"""Checks in processes of their own: one that hangs, crashes or fails costs itself alone, and the rest run.

The harness never calls CUDA, nor imports torch. Checks that share a process run one after the other; it writes a line
as each begins and ends, so that the harness knows which one a process died of.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
PATIENCE = 6
"""Times as long that everything may take in a rehearsal: a busy CPU is no card."""
START_S = 60.0
"""How long a process of checks may take to begin its first one."""
_TRACE = 3000
"""Most characters of an error that are kept."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    process: str
    """Checks of one process share it, in order."""
    shows: str
    expected: str
    function: str = ""
    """`module:function`, called with a `Lab` and `options`; empty if people have to do it."""
    gpus: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 90.0
    by_hand: str = ""
    """Why no run of `make gpu` can show it."""


@dataclass
class Result:
    """What became of a check."""

    name: str
    state: str
    """passed, failed, timed out, crashed or skipped."""
    why: str = ""
    seconds: float = 0.0
    seen: list[dict[str, Any]] = field(default_factory=list)
    """What was measured, with its bounds and if it kept them."""

    @property
    def good(self) -> bool:
        return self.state in ("passed", "skipped")


class SkipCheck(Exception):
    """This machine cannot show it; the message says why."""


class Lab:
    """What a check is given. In a rehearsal its code runs on the CPU at small sizes, and only what holds there, too, is
    required."""

    def __init__(self, gpus: int, rehearsal: bool, folder: Path) -> None:
        self.gpus, self.rehearsal, self.folder = gpus, rehearsal, folder
        self.seen: list[dict[str, Any]] = []

    def size(self, card: Any, rehearsal: Any) -> Any:
        """A size on a card, and the one of a rehearsal."""
        return rehearsal if self.rehearsal else card

    def require(self, what: str, value: Any, expected: Any = True) -> None:
        """It has to be so anywhere."""
        self.seen.append({"what": what, "value": value, "bound": f"= {expected}", "kept": bool(value == expected)})

    def measure(self, what: str, value: float, least: float | None = None, most: float | None = None) -> None:
        """A figure, with bounds that hold on a card."""
        bound = " and ".join(f"{sign} {one:g}" for sign, one in (("≥", least), ("≤", most)) if one is not None)
        kept = (least is None or value >= least) and (most is None or value <= most)
        self.seen.append({"what": what, "value": value, "bound": bound, "kept": kept or self.rehearsal})

    def env(self, ranks: int = 1, **more: str) -> dict[str, str]:
        """Variables by which these ranks find devices: cards of their own, one that they share, or the CPU."""
        if self.rehearsal:
            return {"ONES_DEVICE": "cpu", "ONES_BACKEND": "gloo", **more}
        shared = {"ONES_SHARE_GPUS": "1", "ONES_BACKEND": "gloo"} if ranks > self.gpus else {}
        return {**shared, **more}

    def ranks(
        self, body: Callable[..., int | None], *arguments: Any, ranks: int = 1, limit_s: float = 80.0, **env: str
    ) -> list[Any]:
        """What ranks put that run the body, which are forked from this process (`ones_wrapper.testing`)."""
        from ones_wrapper import testing

        limit_s *= self.size(1, PATIENCE)
        puts = testing.run(partial(body, *arguments), ranks=ranks, timeout_s=limit_s, env=self.env(ranks, **env))
        return [one.value for one in puts]

    def run(self, *command: str, limit_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
        """A Python of its own in this checkout; its output and errors together."""
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=paths(os.environ) | {"ONES_JOB_DIR": str(self.folder / "job")} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s * self.size(1, PATIENCE),
        )


def paths(env: Mapping[str, str]) -> dict[str, str]:
    """The environment, with this checkout's packages first."""
    where = [str(TOP), str(TOP / "wrapper"), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(where)}


def load(place: str) -> Any:
    """What stands at `module:name`."""
    return pkgutil.resolve_name(place)


# -- in a check's process -------------------------------------------------------------------------------------------


def run_here(checks: Sequence[Check], gpus: int, rehearsal: bool, out: Path) -> None:
    """Run checks one after the other, and write what became of each."""
    with out.open("a", buffering=1) as file:
        for check in checks:
            file.write(json.dumps({"begins": check.name}) + "\n")
            file.write(json.dumps(asdict(_one(check, gpus, rehearsal))) + "\n")


def _one(check: Check, gpus: int, rehearsal: bool) -> Result:
    began, state, why = time.monotonic(), "passed", ""
    with tempfile.TemporaryDirectory(prefix=f"ones-gpu-{check.name}-") as folder:
        lab = Lab(gpus, rehearsal, Path(folder))
        try:
            load(check.function)(lab, **check.options)
            if missed := [f"{one['what']}: {one['value']}, not {one['bound']}" for one in lab.seen if not one["kept"]]:
                state, why = "failed", "; ".join(missed)
        except SkipCheck as reason:
            state, why = "skipped", str(reason)
        except Exception:
            state, why = "failed", traceback.format_exc()[-_TRACE:]
    return Result(check.name, state, why, time.monotonic() - began, lab.seen)


# -- in the harness ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """The machine, and how its checks are run."""

    gpus: int
    rehearsal: bool = False
    table: str = "benchmarks.gpu.checks:CHECKS"
    python: str = sys.executable
    until: float = float("inf")
    """Monotonic time at which all ends."""

    def why_not(self, check: Check) -> str:
        """Why it does not run here; empty if it does."""
        if check.by_hand:
            return f"by hand: {check.by_hand}"
        if self.rehearsal or self.gpus >= check.gpus:
            return ""
        return f"needs {check.gpus} GPUs, and {self.gpus} are visible" if self.gpus else "needs a GPU"


def run_all(checks: Sequence[Check], site: Site, say: Callable[[Result], None]) -> list[Result]:
    """Run what this machine can; the results in the table's order."""
    results: dict[str, Result] = {}

    def found(result: Result) -> None:
        results[result.name] = result
        say(result)

    for name in dict.fromkeys(check.process for check in checks):
        left = []
        for check in (one for one in checks if one.process == name):
            if why := site.why_not(check):
                found(Result(check.name, "skipped", why))
            else:
                left.append(check)
        while left:
            if time.monotonic() > site.until:
                found(Result(left.pop(0).name, "skipped", "no time was left"))
                continue
            for result in _process(left, site):
                found(result)
            left = [check for check in left if check.name not in results]
    return [results[check.name] for check in checks]


def _process(checks: Sequence[Check], site: Site) -> list[Result]:
    """Results of one process: of all of its checks, or of those up to the one that it did not survive."""
    with tempfile.TemporaryDirectory(prefix="ones-gpu-") as folder:
        out, log = Path(folder) / "results", Path(folder) / "log"
        out.touch()
        command = [site.python, "-m", "benchmarks.gpu.process", site.table, str(out), str(site.gpus)]
        command += [str(int(site.rehearsal)), *(check.name for check in checks)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=TOP, env=paths(os.environ), stdout=file, stderr=file, start_new_session=True
            )
        try:
            return _watch(process, checks, site, out, log)
        finally:
            with suppress(ProcessLookupError):  # what it started, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _watch(process: subprocess.Popen[bytes], checks: Sequence[Check], site: Site, out: Path, log: Path) -> list[Result]:
    results: list[Result] = []
    lines, began = 0, time.monotonic()
    while True:
        ended = process.poll()  # first: what it wrote before is there
        text = out.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines()[lines:]:
            lines += 1
            entry = json.loads(line)
            if "begins" not in entry:
                results.append(Result(**entry))
            began = time.monotonic()
        if len(results) == len(checks):
            return results
        now, took = checks[len(results)], time.monotonic() - began
        tail = log.read_text(errors="replace")[-_TRACE:]
        if ended is not None:
            how = f"signal {-ended}" if ended < 0 else f"exit code {ended}"
            return [*results, Result(now.name, "crashed", f"its process ended by {how}\n{tail}", took)]
        limit = (now.limit_s if lines else START_S) * (PATIENCE if site.rehearsal else 1)
        if took > limit or time.monotonic() > site.until:
            return [*results, Result(now.name, "timed out", f"still running after {took:.0f} s\n{tail}", took)]
        time.sleep(0.05)
