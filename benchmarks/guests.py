"""Who waits for what a training has grown by, on real Slurms: seconds until each is served, and what it costs the
training.

    python benchmarks/guests.py --json guests.json
    python benchmarks/guests.py --json guests.json --variant old --rows a1,b2,kill --rounds 3

The rows and the Slurms are those of tests/endtoend/guest_rows.py: a job that asked for one GPU trains with PyTorch on
all 16, by guests that Slurm preempts or, without those, by growth that the companion gives back; then somebody wants
something. The companion is the real one; only its policy is scripted, and wants the job's full size back afterwards.
What is in the file already is not run again, so that a run which was cut off goes on. Needs root on a Debian-like host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster import Cluster, ClusterError
from tests.conftest import quick
from tests.endtoend.guest_rows import ROWS, VARIANTS, rows_of
from tests.endtoend.guest_site import TICK_S, GuestStage, RowOutcome
from tests.endtoend.warm import WarmBox

KILL = "kill"
"""The row whose steps are longer than KillWait."""
Run = dict[str, Any]


class Results:
    """What was run so far, in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[Run] = []
        self.jobs: list[Run] = []
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            self.rows, self.jobs = kept["runs"], kept["jobs"]

    def add(self, to: list[Run], **run: Any) -> None:
        to.append(run)
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(
                json.dumps({**figures(self.rows, self.jobs), "runs": self.rows, "jobs": self.jobs}, indent=1)
            )
            new.replace(self._path)

    def left(self, variant: str, names: Sequence[str], rounds: int) -> list[str]:
        """The rows that were not run as often as that."""
        done = Counter(run["row"] for run in self.rows if run["variant"] == variant)
        return [name for name in names if done[name] < rounds]


def by_rule(variant: str, row: str) -> bool:
    """The companion serves it, not Slurm: licences too, where Slurm does not take them back."""
    where = VARIANTS[variant]
    return where.queue is None or ROWS[row].rule or (row == "f" and not where.site.accounting)


def figures(rows: Sequence[Run], jobs: Sequence[Run]) -> dict[str, Any]:
    """The figures of the whole, from all runs of all rows."""
    served: dict[str, dict[str, list[float]]] = {}
    fallback: dict[str, dict[str, list[float]]] = {}
    rules: dict[str, list[bool]] = {}
    pauses: dict[int, list[float]] = {}
    for run in rows:
        variant, name = run["variant"], run["row"]
        if ROWS[name].judged != "served" or ROWS[name].rule:
            rules.setdefault(f"{variant} {name}", []).append(not run["wrong"])
        if run["served_s"] is not None and name != KILL:
            to = fallback if by_rule(variant, name) else served
            to.setdefault(variant, {}).setdefault(name, []).append(run["served_s"])
        if run["taken"] and not by_rule(variant, name) and name != KILL:
            pauses.setdefault(run["taken"], []).append(round(sum(run["pauses_s"]), 4))
    kills = [run for run in rows if run["row"] == KILL]
    return {
        "served_s": served,
        "unserved": [f"{run['variant']} {run['row']}: {run['wrong']}" for run in rows if run["wrong"]],
        "rules": rules,
        "fallback_s": fallback,
        "pause_s": {str(count): pauses[count] for count in sorted(pauses)},
        "kill_pause_s": [pause for run in kills for pause in run["pauses_s"]],
        "kill_served_s": [run["served_s"] for run in kills],
        "steps_again": {f"{job['variant']} {job['grown']}": job["steps_again"] for job in jobs},
        "lost": sum(job["lost"] for job in jobs),
        "repeated": sum(job["repeated"] for job in jobs),
        "epochs": sum(job["epochs"] for job in jobs),
        "base_preempted": sum(run["base_taken"] for run in rows),
        "requeues": max((run["requeues"] for run in rows), default=0),
        "reuse_s": [seconds for run in rows for seconds in run["reuse_s"]],
        "tick_s": TICK_S,
    }


def run(variant: str, names: Sequence[str], results: Results, trains: bool) -> None:
    """The rows of one Slurm; those of one grown job after each other."""
    where = VARIANTS[variant]
    with Cluster(where.site) as cluster:
        quick(cluster)
        cluster.box = WarmBox(cluster)
        stage = GuestStage(cluster, where, trains=trains)
        for grown, group in groupby(names, lambda name: ROWS[name].grown):
            tell(f"{variant}: {where.about}: a job grows ({grown})")
            for name in group:
                row(stage, variant, name, results)
            end(stage, variant, grown, results)


def end(stage: GuestStage, variant: str, grown: str, results: Results) -> None:
    if trained := stage.end():
        results.add(results.jobs, variant=variant, grown=grown, **trained)


def row(stage: GuestStage, variant: str, name: str, results: Results) -> None:
    began = time.monotonic()
    try:
        found = stage.judge(ROWS[name])
    except (AssertionError, ClusterError) as error:
        tell(stage.companion_log())
        end(stage, variant, ROWS[name].grown, results)
        found = RowOutcome(wrong=f"{type(error).__name__}: {error}"[:1500])
    results.add(
        results.rows,
        variant=variant,
        row=name,
        **asdict(found),
        load=os.getloadavg()[0],
        seconds=time.monotonic() - began,
    )
    tell(f"{variant} {name}: {ROWS[name].about}: {found} ({time.monotonic() - began:.0f} s)")


def tell(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g}, n = {len(values)})"


def show(found: dict[str, Any]) -> None:
    """The figures, a row a line."""
    for key in ("served_s", "fallback_s"):
        for variant, rows in found[key].items():
            for name, seconds in rows.items():
                print(f"{key} {variant:10} {name:4} {spread(seconds)} s  {ROWS[name].about}")
    for taken, pauses in found["pause_s"].items():
        print(f"pause, {taken} guests taken: {spread(pauses)} s")
    print(f"steps longer than KillWait: pause {spread(found['kill_pause_s'])} s")
    print(f"a block is used again after {spread(found['reuse_s'])} s, a tick being {found['tick_s']:g} s")
    print(f"rules {found['rules']}")
    counts = ("epochs", "lost", "repeated", "base_preempted", "requeues")
    print(", ".join(f"{key} {found[key]}" for key in counts))
    for words in found["unserved"]:
        print(f"wrong: {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant", action="append", choices=list(VARIANTS), help="by default all, one after the other"
    )
    parser.add_argument("--rows", help="by default all, separated by commas")
    parser.add_argument("--rounds", type=int, default=1, help="how often each row is run")
    parser.add_argument("--light", action="store_true", help="the jobs train nothing: a quick look at all rows")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there; what is there is kept")
    given = parser.parse_args()
    results = Results(given.json)
    asked = given.rows.split(",") if given.rows else list(ROWS)
    for variant in given.variant or VARIANTS:
        possible = [name for name in rows_of(VARIANTS[variant]) if name in asked]
        for count in range(1, given.rounds + 1):
            if left := results.left(variant, possible, count):
                run(variant, left, results, not given.light)
    found = figures(results.rows, results.jobs)
    show(found)
    if found["unserved"] or found["lost"] or found["repeated"] or found["base_preempted"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
