"""Two checkouts of this project side by side: the same benchmark in each, in turn, and the ratio of every figure.

    python -m benchmarks.versions --before DIR decision --repeats 3
    python -m benchmarks.versions --before DIR --rounds 3 ingest

Each checkout needs an environment of its own, as `make install` makes it. The order changes from round to round, so
that a machine that grows slower favours neither.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parents[1]


def figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a benchmark's JSON by their place in it; of a list the median."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        yield name, float(statistics.median(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def run(checkout: Path, arguments: list[str]) -> dict[str, float]:
    """The figures of one run in a checkout; its output goes to stderr."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "figures.json"
        command = [".venv/bin/python", f"benchmarks/{arguments[0]}.py", *arguments[1:], "--json", str(result)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr, check=True)
        return dict(figures(json.loads(result.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("benchmark", nargs=argparse.REMAINDER, help="its name and options")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    sides = [("before", options.before), ("after", HERE)]
    for number in range(options.rounds):
        for side, checkout in sides if number % 2 == 0 else reversed(sides):
            print(f"round {number + 1} of {options.rounds}: {side}", file=sys.stderr, flush=True)
            found[side].append(run(checkout, options.benchmark))
    names = [name for name in found["before"][0] if all(name in one for side in found.values() for one in side)]
    ratios: dict[str, list[float]] = defaultdict(list)
    table = Table("figure", "before", "after", "after / before (least – most)")
    for name in names:
        before, after = ([one[name] for one in found[side]] for side in ("before", "after"))
        ratios[name] = [new / old for old, new in zip(before, after, strict=True) if old]
        if ratios[name]:
            shown = f"{statistics.median(ratios[name]):.2f} ({min(ratios[name]):.2f} – {max(ratios[name]):.2f})"
            table.add_row(name, f"{statistics.median(before):.4g}", f"{statistics.median(after):.4g}", shown)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.json:
        options.json.write_text(json.dumps({"figures": found, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
