"""How the code is cut: files, lines, import arrows and circles, of this checkout and of an older one.

    python -m benchmarks.structure [--before DIR] [--json FILE]

prints a Markdown table. The three packages are counted without the history of migrations, and next to them the Python
files of the tests. Imports inside functions and for type checking count as arrows. The table's "rooms" are the
packages and loose modules of `slurm_ones`, and the whole packages `ones_db` and `ones_wrapper`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
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
    """The package or loose module of `slurm_ones`, or else the top package, that has this module."""
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


def modules_of(checkout: Path, package: str) -> list[Path]:
    """The package's files, without the history of its migrations."""
    files = sorted((checkout / PACKAGES[package] / package).rglob("*.py"))
    return [path for path in files if "versions" not in path.parts]


def repeated_classes(checkout: Path) -> dict[str, list[str]]:
    """Names of top-level public classes that more than one module has, with those modules; examples apart."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in modules_of(checkout, package):
            if "examples" in path.parts:
                continue
            module = ".".join(path.relative_to(checkout / PACKAGES[package]).with_suffix("").parts)
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def measure(checkout: Path) -> dict[str, int]:
    """The figures of one checkout, by name."""
    files = {package: modules_of(checkout, package) for package in PACKAGES}
    lines = {path: _lines(path) for paths in files.values() for path in paths}
    tests = sorted((checkout / "tests").rglob("*.py"))
    names = Counter(path.name for path in lines if path.name != "__init__.py")
    arrows = arrows_of(checkout)
    between = {(room(one), room(other)) for one, other in arrows if room(one) != room(other)}
    each: dict[str, int] = {}
    for package, paths in files.items():
        each |= {f"{package}: files": len(paths), f"{package}: lines": sum(lines[path] for path in paths)}
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        **each,
        "median lines of a file": round(statistics.median(lines.values())),
        "files over 400 lines": sum(count > 400 for count in lines.values()),
        "file names that occur more than once": sum(count > 1 for count in names.values()),
        "class names that occur more than once": len(repeated_classes(checkout)),
        "tests: files": len(tests),
        "tests: lines": sum(map(_lines, tests)),
        "tests: functions": sum(path.read_text("utf-8").count("def test_") for path in tests),
        "import arrows between modules": len(arrows),
        "import arrows between rooms": len(between),
        "circles of modules": len(circles(arrows)),
        "circles of rooms": len(circles(between)),
    }


def _lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def table(columns: dict[str, dict[str, int]]) -> str:
    """Markdown, one column a checkout."""
    rows = [["", *columns], ["---", *("---:" for _ in columns)]]
    rows += [[name, *(f"{column[name]:,}" for column in columns.values())] for name in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older checkout (git worktree add DIR COMMIT)")
    parser.add_argument("--circles", action="store_true", help="name the modules and rooms of each circle as well")
    parser.add_argument("--classes", action="store_true", help="name the classes that share a name as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and those classes, there as well")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    columns = {"before": measure(options.before.resolve())} if options.before else {}
    columns |= {"now": measure(here)}
    print(table(columns))
    repeated = repeated_classes(here)
    if options.classes:
        for name, modules in repeated.items():
            print(f"\n{name}: {', '.join(modules)}")
    if options.circles:
        arrows = arrows_of(here)
        for group in circles(arrows) + circles({(room(a), room(b)) for a, b in arrows if room(a) != room(b)}):
            print(f"\n{' ↔ '.join(sorted(group))}")
    if options.json:
        options.json.write_text(json.dumps({**columns, "repeated classes": repeated}, indent=1) + "\n")


if __name__ == "__main__":
    main()
