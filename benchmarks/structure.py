"""How the code is cut: files, lines, import arrows and circles, of this checkout and of an older one beside it.

    python -m benchmarks.structure [--before DIR]

prints a Markdown table. Only the three packages are counted, not tests and benchmarks. Imports inside functions and for
type checking count as arrows. A room is a folder or a loose module of `slurm_ones`; `ones_db` and `ones_wrapper` are
one room each.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grimp

PACKAGES = {"slurm_ones": ".", "ones_db": "db", "ones_wrapper": "wrapper"}
"""Each package with the folder of the checkout that holds it."""
Arrows = set[tuple[str, str]]


@contextmanager
def found_in(checkout: Path) -> Iterator[None]:
    """Let the packages be found in this checkout and nowhere else."""
    before = sys.path[:]
    sys.path[:0] = [str(checkout / folder) for folder in PACKAGES.values()]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def arrows_of(checkout: Path) -> Arrows:
    """Who imports whom, module by module."""
    with found_in(checkout):
        graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)}


def room(module: str) -> str:
    """The room that a module stands in."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "slurm_ones" else parts[0]


def circles(arrows: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The largest groups in which everyone reaches everyone, of more than one (Tarjan 1972)."""
    onward: dict[str, list[str]] = {}
    for one, other in sorted(arrows):
        onward.setdefault(one, []).append(other)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in onward.get(node, ()):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(set(group))

    for node in sorted(onward):
        if node not in index:
            visit(node)
    return found


def measure(checkout: Path) -> dict[str, str]:
    """The rows of the table, for one checkout."""
    files = {package: sorted((checkout / folder / package).rglob("*.py")) for package, folder in PACKAGES.items()}
    lines = {path: len(path.read_text("utf-8").splitlines()) for paths in files.values() for path in paths}
    names = Counter(path.name for path in lines if path.name != "__init__.py")
    arrows = arrows_of(checkout)
    between = {(room(one), room(other)) for one, other in arrows if room(one) != room(other)}
    each = {package: f"{len(paths)} / {sum(lines[path] for path in paths):,}" for package, paths in files.items()}
    return {
        "files": f"{len(lines)}",
        "lines": f"{sum(lines.values()):,}",
        **{f"{package}: files / lines": text for package, text in each.items()},
        "median lines of a file": f"{statistics.median(lines.values()):.0f}",
        "files over 400 lines": f"{sum(count > 400 for count in lines.values())}",
        "file names that occur more than once": f"{sum(count > 1 for count in names.values())}",
        "import arrows between modules": f"{len(arrows)}",
        "import arrows between rooms": f"{len(between)}",
        "circles of modules": f"{len(circles(arrows))}",
        "circles of rooms": f"{len(circles(between))}",
    }


def table(columns: dict[str, dict[str, str]]) -> str:
    """Markdown, one column a checkout."""
    rows = [["", *columns], ["---", *("---:" for _ in columns)]]
    rows += [[name, *(column[name] for column in columns.values())] for name in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older checkout (git worktree add DIR COMMIT)")
    parser.add_argument("--circles", action="store_true", help="name the modules and rooms of each circle as well")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    columns = {"before": measure(options.before.resolve())} if options.before else {}
    print(table(columns | {"now": measure(here)}))
    if options.circles:
        arrows = arrows_of(here)
        for group in circles(arrows) + circles({(room(a), room(b)) for a, b in arrows if room(a) != room(b)}):
            print(f"\n{' ↔ '.join(sorted(group))}")


if __name__ == "__main__":
    main()
