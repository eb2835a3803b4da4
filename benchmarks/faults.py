"""Faults by the thousand, from a seed: the unchanged companion on small simulated clusters, and what must never be.

Each seed is a cluster, a few jobs, and faults of several kinds at every call and between any two steps. Seeds that
break an invariant are listed, and each can be replayed alone. Seeds that the log has are not run again.

    OMP_NUM_THREADS=1 python benchmarks/faults.py --seeds 10000 --first 1 --log faults.jsonl --json faults.json
    OMP_NUM_THREADS=1 python benchmarks/faults.py --seed 17 --verbose
    OMP_NUM_THREADS=1 python benchmarks/faults.py --seed 17 --page run.html
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.plan import FaultPlan
from tests.faults.replay_page import write_replay
from tests.faults.run import Result, run

SHOWN_S = 5.0
"""Between two lines of progress."""


def one(seed: int) -> Result:
    """A seed's run. Nothing that it logs is shown."""
    return run(FaultPlan.with_blocks(seed))


def one_requeued(seed: int) -> Result:
    """The same without jobs of blocks."""
    return run(FaultPlan.of(seed))


def one_with_strategies(seed: int) -> Result:
    """The same, most of the jobs having a training strategy."""
    return run(FaultPlan.with_strategies(seed))


def one_with_guests(seed: int) -> Result:
    """The same with jobs of blocks that grow by guests, and jobs of others over the same nodes."""
    return run(FaultPlan.with_guests(seed))


EACH = {"blocks": one, "plain": one_requeued, "strategies": one_with_strategies, "guests": one_with_guests}
PLANS = {
    "blocks": FaultPlan.with_blocks,
    "plain": FaultPlan.of,
    "strategies": FaultPlan.with_strategies,
    "guests": FaultPlan.with_guests,
}


def replay(seed: int, which: str, *, verbose: bool, page: Path | None = None) -> Result:
    """A seed's run, printed step by step, or written as a page."""
    plan = PLANS[which](seed)
    if page is not None:
        return write_replay(page, plan)
    if not verbose:
        return run(plan)
    print(plan)
    logging.basicConfig(level=logging.INFO, format="             %(message)s", stream=sys.stdout)
    return run(plan, print)


def many(first: int, seeds: int, processes: int, which: str, log: Path | None) -> dict[str, Any]:
    """All seeds from `first` on, over all processes, without those that the log has: it gets a line a seed."""
    began = shown = time.monotonic()
    done = [json.loads(line) for line in log.read_text().splitlines()] if log is not None and log.exists() else []
    wanted = range(first, first + seeds)
    done = [one for one in done if one["which"] == which and one["seed"] in wanted]
    left = sorted({*wanted} - {one["seed"] for one in done})
    with multiprocessing.get_context("spawn").Pool(processes, _collect_seldom) as pool:
        for result in pool.imap_unordered(EACH[which], left, chunksize=1):
            done.append(_line(result, which))
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[-1]) + "\n")
            for what in result.violations:
                print(f"seed {result.seed}: {what}", flush=True)
            if time.monotonic() - shown > SHOWN_S or len(done) == seeds:
                shown = time.monotonic()
                faults, wrong = sum(sum(one["kinds"].values()) for one in done), sum(bool(o["wrong"]) for o in done)
                print(f"{len(done)} of {seeds} runs, {faults} faults, {wrong} violations", flush=True)
    kinds = sum((Counter(one["kinds"]) for one in done), Counter[str]())
    return {
        "runs": seeds,
        "first": first,
        "faults": sum(kinds.values()),
        "kinds": dict(kinds.most_common()),
        "resizes": sum(one["resizes"] for one in done),
        "changes_of_blocks": sum(one["changes_of_blocks"] for one in done),
        "guests": _of_guests([one["guests"] for one in done]),
        "violations": [{"seed": one["seed"], "invariant": what} for one in done for what in one["wrong"]],
        "seconds": round(time.monotonic() - began, 1),
    }


def _collect_seldom() -> None:
    """Leave alone what was imported, and collect garbage seldom: a tenth of a run was spent on that."""
    gc.freeze()
    gc.set_threshold(100_000)


def _line(result: Result, which: str) -> dict[str, Any]:
    return {
        "which": which,
        "seed": result.seed,
        "kinds": {kind.value: count for kind, count in result.kinds.items()},
        "wrong": list(result.violations),
        "resizes": result.resizes,
        "changes_of_blocks": result.changes_of_blocks,
        "guests": vars(result.guests),
    }


def _of_guests(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What became of the guests of all seeds."""
    ends = sum((Counter(one["ends"]) for one in each), Counter[str]())
    return {
        "seeds_with_guests": sum(one["starts"] > 0 for one in each),
        "seeds_with_preemptions": sum(bool(one["ends"]) for one in each),
        "starts": sum(one["starts"] for one in each),
        "ends": dict(ends.most_common()),
        "taken_for": sum(one["taken_for"] for one in each),
        "served": sum(one["served"] for one in each),
        "longest_s": round(max((one["longest_s"] for one in each), default=0.0), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many runs")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--verbose", action="store_true", help="with --seed: every step of it")
    parser.add_argument("--page", type=Path, help="with --seed: write it as a page, to go through in a browser")
    which = parser.add_mutually_exclusive_group()
    for name, words in (
        ("blocks", "most jobs of blocks, as without these options"),
        ("plain", "no jobs of blocks"),
        ("strategies", "jobs with training strategies, and none of blocks"),
        ("guests", "jobs of blocks that grow by guests, and jobs of others over the same nodes"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, default="blocks", help=words)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, help="a line a seed, to go on from")
    parser.add_argument("--json", type=Path, help="where results go")
    options = parser.parse_args()
    if options.page is not None and (options.seed is None or options.verbose):
        parser.error("--page shows one run: give --seed, and leave --verbose out")
    if options.seed is not None:
        result = replay(options.seed, options.which, verbose=options.verbose, page=options.page)
        for kind, count in sorted(result.kinds.items(), key=lambda item: -item[1]):
            print(f"{count:6d} {kind.value}")
        print(f"{result.resizes} resizes, {result.seconds:.2f} s")
        sys.exit("\n".join(result.violations) or None)
    results = many(options.first, options.seeds, options.processes, options.which, options.log)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    kinds = len(results["kinds"])
    resizes = f"{results['resizes']} resizes, {results['changes_of_blocks']} of them changes of blocks"
    print(f"{results['runs']} runs, {results['faults']} faults of {kinds} kinds, {resizes}")
    if (guests := results["guests"])["starts"]:
        ends = ", ".join(f"{count} {end}" for end, count in guests["ends"].items())
        print(f"{guests['starts']} starts of guests in {guests['seeds_with_guests']} runs; preempted: {ends}")
        print(f"{guests['served']} jobs served by preemption, the last {guests['longest_s']} s beyond grace")
    sys.exit(1 if results["violations"] else 0)


if __name__ == "__main__":
    main()
