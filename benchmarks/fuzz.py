"""Every reader of what others wrote, under inputs that nobody wrote in good faith.

An input is made from the seed and its number alone, by the generator of one reader (`tests/fuzz/parsers.py`): a sound
one changed in its structure (wrong types, huge and odd numbers, deep nesting, missing and repeated parts), in its
bytes, or random ones. It fails where the reader raises what it does not promise, breaks what must hold of its result,
takes more than a second of the processor, or more memory than the bound, which the system enforces (RLIMIT_AS).
Failures are written one a file, each of which replays.

    python benchmarks/fuzz.py --inputs 1000000 --seed 1 --json fuzz.json
    python benchmarks/fuzz.py --replay failures/report-line-12.json
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from bisect import bisect
from collections import Counter
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

# One thread each, and no arenas of many: what is measured is the readers' own.
os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

LIMIT_S = 1.0
"""Of the processor's time, for one input."""
MEMORY = 256 << 20
"""Bytes that a process may take beyond what it has when all readers are loaded."""
AT_ONCE = 2_000
"""Inputs that a worker is given."""
STUCK_S = 300.0
"""A worker that says nothing for so long, on a machine however busy, waits for something."""
NEWER = "ONES_FUZZ_NEWER"
"""In the environment: only the readers of `tests/fuzz/newer.py`."""
MOST_KEPT = 200
"""Failures that are written."""


class TooSlow(BaseException):
    """No reader can take it for an error of its own."""


def _late(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _parsers() -> list[Any]:
    from tests.fuzz import newer, parsers

    return [*(() if os.environ.get(NEWER) else parsers.PARSERS), *newer.PARSERS]


def input_of(seed: int, number: int) -> tuple[Any, bytes]:
    """The reader and its input."""
    parsers = _parsers()
    rng = random.Random(f"{seed}/{number}")
    steps = list(accumulate(parser.share for parser in parsers))
    parser = parsers[min(bisect(steps, rng.random() * steps[-1]), len(parsers) - 1)]
    return parser, parser.make(rng)


def tried(parser: Any, data: bytes) -> tuple[str, float]:
    """What went wrong, or empty; and the processor's seconds."""
    why = ""
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        parser.run(data)
    except TooSlow:
        why = f"slow: more than {LIMIT_S:g} s\n{traceback.format_exc(limit=-8)}"
    except BaseException:
        why = traceback.format_exc(limit=-8)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return why, time.process_time() - begun


def _size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _load(parser: Any) -> None:
    """Let it import and prepare what it needs, which is no input's fault."""
    rng = random.Random(0)
    for _ in range(5):
        data = parser.make(rng)
        with contextlib.suppress(Exception):
            parser.run(data)


def _limited() -> None:
    """Load and try every reader once, then let the process grow by `MEMORY` and no more."""
    signal.signal(signal.SIGPROF, _late)
    logging.getLogger().addHandler(logging.NullHandler())
    for parser in _parsers():
        _load(parser)
    _bound()


def _bound() -> tuple[int, int]:
    """Let the process grow by `MEMORY` and no more; returns what held before."""
    gc.collect()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_size() + MEMORY, before[1]))
    return before


def work(pipe: Connection, seed: int) -> None:
    """Try the inputs that are asked for, until there are none; says each number before it is tried."""
    from tests.fuzz.parsers import clean

    _limited()
    before = _peak()
    try:
        while (span := pipe.recv()) is not None:
            counts: Counter[str] = Counter()
            worst: dict[str, float] = {}
            failures = []
            for number in range(*span):
                pipe.send(number) if number % 50 == 0 else None
                parser, data = input_of(seed, number)
                why, seconds = tried(parser, data)
                counts[parser.name] += 1
                worst[parser.name] = max(worst.get(parser.name, 0.0), seconds)
                if why:
                    failures.append({"parser": parser.name, "number": number, "why": why, "data": _text(data)})
            pipe.send((counts, worst, failures, _peak() - before))
    finally:
        clean()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Worker:
    """A process that tries inputs, begun anew where one ended it or holds it up."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.span: tuple[int, int] | None = None
        self.begin()

    def begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, self._seed), daemon=True)
        self.process.start()
        other.close()
        self.heard, self.at = time.monotonic(), 0

    def ask(self, span: tuple[int, int] | None) -> None:
        self.span = span
        self.heard, self.at = time.monotonic(), span[0] if span else 0
        self.pipe.send(span)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Found:
    """What came of all inputs."""

    def __init__(self, failures: Path) -> None:
        self.folder = failures
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, float] = {}
        self.failures: list[dict[str, Any]] = []
        self.peak = 0

    def add(self, counts: Counter[str], worst: dict[str, float], failures: list[dict[str, Any]], peak: int) -> None:
        self.counts += counts
        for name, seconds in worst.items():
            self.worst[name] = max(self.worst.get(name, 0.0), seconds)
        self.peak = max(self.peak, peak)
        for failure in failures:
            self.fail(failure)

    def fail(self, failure: dict[str, Any]) -> None:
        self.failures.append(failure)
        print(f"{failure['parser']}, input {failure['number']}: {failure['why'].strip().splitlines()[-1][:200]!r}")
        if len(self.failures) <= MOST_KEPT:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{failure['parser'].strip('.').replace(' ', '-')}-{failure['number']}.json"
            (self.folder / name).write_text(json.dumps(failure, indent=1) + "\n")


def run(inputs: int, seed: int, first: int, workers: int, found: Found) -> None:
    """Try so many inputs, in several processes."""
    spans = iter([(at, min(at + AT_ONCE, first + inputs)) for at in range(first, first + inputs, AT_ONCE)])
    crew = [Worker(seed) for _ in range(workers)]
    for worker in crew:
        worker.ask(next(spans, None))
    begun = said = time.monotonic()
    while busy := [worker for worker in crew if worker.span is not None]:
        ready = wait([worker.pipe for worker in busy], timeout=1.0)
        for worker in busy:
            if worker.pipe in ready:
                try:
                    told = worker.pipe.recv()
                except (EOFError, OSError):
                    _lost(worker, seed, found, "its process died")
                    continue
                worker.heard = time.monotonic()
                if isinstance(told, int):
                    worker.at = told
                else:
                    found.add(*told)
                    worker.ask(next(spans, None))
            elif time.monotonic() - worker.heard > STUCK_S:
                _lost(worker, seed, found, f"slow: it waits for more than {STUCK_S:.0f} s")
        if time.monotonic() - said > 30:
            said = time.monotonic()
            done = sum(found.counts.values())
            print(f"{done} inputs, {done / (said - begun):.0f}/s, {len(found.failures)} failures", flush=True)
    for worker in crew:
        worker.process.join(10)
        worker.end()


def _lost(worker: Worker, seed: int, found: Found, why: str) -> None:
    """One of the fifty inputs since its last word ended the worker: the rest of its span is given up."""
    parser, data = input_of(seed, worker.at)
    found.fail({"parser": parser.name, "number": worker.at, "why": f"{why}, or of the 49 after", "data": _text(data)})
    worker.end()
    end = worker.span[1] if worker.span else 0
    worker.begin()
    worker.ask((min(worker.at + 50, end), end))


def replay(path: Path) -> str:
    """What a saved input does now: what goes wrong, or empty."""
    saved = json.loads(path.read_text())
    signal.signal(signal.SIGPROF, _late)
    (parser,) = (parser for parser in _parsers() if parser.name == saved["parser"])
    _load(parser)
    before = _bound()
    try:
        return tried(parser, base64.b64decode(saved["data"]))[0]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--newer", action="store_true", help="only the readers of tests/fuzz/newer.py")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "ones-fuzz-failures")
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args()
    os.environ |= {NEWER: "1"} if given.newer else {}
    if given.replay is not None:
        from tests.fuzz.parsers import clean

        why = replay(given.replay)
        clean()
        print(why or "nothing goes wrong")
        return bool(why)
    from tests.fuzz.parsers import room

    found, begun = Found(given.failures), time.monotonic()
    # Also of workers that were killed nothing is left.
    with tempfile.TemporaryDirectory(prefix="ones-fuzz-", dir=room()) as place:
        os.environ["ONES_FUZZ_ROOM"] = place
        run(given.inputs, given.seed, given.first, given.workers, found)
    seconds = time.monotonic() - begun
    slow = [failure for failure in found.failures if failure["why"].startswith("slow")]
    result = {
        "inputs": sum(found.counts.values()),
        "per_parser": dict(sorted(found.counts.items())),
        "exceptions": len(found.failures) - len(slow),
        "slow": len(slow),
        "worst_s": max(found.worst.values(), default=0.0),
        "worst_s_per_parser": dict(sorted(found.worst.items())),
        "memory_bound_bytes": MEMORY,
        "peak_bytes": found.peak,
        "seconds": seconds,
        "seed": given.seed,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"seed {given.seed}: {result['inputs']} inputs over {len(found.counts)} readers in {seconds:.0f} s, "
        f"{result['exceptions']} exceptions, {result['slow']} slow (the slowest took {result['worst_s']:.3f} s), "
        f"{found.peak >> 20} MiB of {MEMORY >> 20} MiB"
    )
    return bool(found.failures)


if __name__ == "__main__":
    sys.exit(main())
