"""The figures of the training strategies, side by side.

    python benchmarks/training_systems.py --json F [--only ring,hfta]

Each module of `benchmarks/systems` measures one system, in a process of its own, one after the other. F gets
`{"ring": {"max_error": …, …}, …}`; a Markdown table is printed. Systems of which a figure is missing or that fail are
named, and the exit code is 1. Errors and bytes do not depend on the machine; times want a quiet one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import pkgutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import systems

FIGURES = {
    "ring": ("max_error", "wire_over_formula", "memory_over_formula"),
    "optimus2d": ("max_error", "bytes_over_1d", "memory_over_formula"),
    "onebit_lamb": ("bytes_over_fp16", "accuracy_gap", "accuracy_gap_reset"),
    "lsgd": ("max_error", "bytes_over_allreduce"),
    "decentlam": ("bias_ratio", "fixed_point_error"),
    "hfta": ("max_error", "speedup_b8", "speedup_b16", "sweep_jct_ratio"),
    "craig": ("evaluations_ratio", "random_ratio"),
    "uneven": ("max_error",),
}
"""What each system must measure; it may measure more. Others are measured where --only names them."""


def measured(name: str) -> dict[str, float]:
    """A system's figures. Runs in a process of its own."""
    found = importlib.import_module(f"benchmarks.systems.{name}").measure()
    return {key: float(value) for key, value in found.items()}


def available() -> set[str]:
    """The systems that have a module."""
    return {module.name for module in pkgutil.iter_modules(systems.__path__)}


def collect(names: list[str]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The figures by system, and what went wrong."""
    there = available()
    found: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    for number, name in enumerate(names, 1):
        if name not in there:
            wrong.append(f"{name}: benchmarks/systems has no {name}.py")
            continue
        print(f"[{number}/{len(names)}] {name} …", end="", file=sys.stderr, flush=True)
        began = time.monotonic()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            try:
                found[name] = alone.submit(measured, name).result()
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
        print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        if name in found and (missing := sorted(set(FIGURES.get(name, ())) - set(found[name]))):
            wrong.append(f"{name}: {', '.join(missing)} not measured")
    return found, wrong


def table(found: dict[str, dict[str, float]]) -> str:
    """A line for each figure."""
    lines = ["| system | figure | value |", "|---|---|---|"]
    lines += [f"| {name} | {key} | {value:.4g} |" for name, its in found.items() for key, value in its.items()]
    return "\n".join(lines)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file that the figures are written to")
    parser.add_argument("--only", default="", help="systems to measure, by name, with commas between them")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name] or list(FIGURES)
    known = [*FIGURES, *sorted(available() - set(FIGURES))]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(known)}")
    found, wrong = collect(names)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
