"""Six public scripts, written again in small, and what each must change to be elastic.

The change is the diff on docs/recipes.md: it is applied to the script here, its edits are counted, and what comes of it
is trained through resizes; the traces say how often each sample of each epoch was used.
"""

from __future__ import annotations

import difflib
import linecache
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ones_wrapper import testing
from ones_wrapper.run.run import Run
from tests.wrapper.runs import samples_used

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
SIZES = (1, 3, 2)
"""Ranks of each start."""
STOPS = (5, 17)
"""The steps at which the first ones end, in mid-epoch."""


@dataclass(frozen=True)
class Recipe:
    """A script, and what its training takes."""

    name: str
    samples: int = 200
    epochs: int = 3
    aim: int = 5
    needs: str = "torch"
    """A package."""

    @property
    def plain(self) -> str:
        return (Path(__file__).parent / f"{self.name}.py").read_text()

    @property
    def elastic(self) -> str:
        """The script after the edits on the page."""
        found = re.search(rf"```diff\n--- {self.name}\.py\n.*?\n(@@.*?)```", PAGE.read_text(), re.S)
        assert found is not None, f"docs/recipes.md has no diff of {self.name}.py"
        return patched(self.plain, found[1])

    @property
    def missing(self) -> bool:
        return find_spec(self.needs) is None


RECIPES = {
    one.name: one
    for one in (
        Recipe("nanogpt", samples=160),
        Recipe("imagenet"),
        Recipe("ddp_tutorial"),
        Recipe("dcgan"),
        Recipe("nlp", needs="accelerate"),
        Recipe("ppo", samples=128, epochs=8, aim=8),
    )
}


def patched(text: str, diff: str) -> str:
    """The text after a unified diff. Raises AssertionError if it is a diff of something else."""
    before, after, at = text.splitlines(keepends=True), [], 0
    for hunk in re.split(r"^(?=@@)", diff, flags=re.M)[1:]:
        head, *lines = hunk.splitlines(keepends=True)
        start, count = re.match(r"@@ -(\d+),?(\d*)", head).groups()  # type: ignore[union-attr]
        begin = int(start) - (count != "0")
        old = [line[1:] for line in lines if line[0] in " -"]
        assert before[begin : begin + len(old)] == old, f"{head.strip()} is not the script's"
        after += before[at:begin] + [line[1:] for line in lines if line[0] in " +"]
        at = begin + len(old)
    return "".join(after + before[at:])


def edits(recipe: Recipe) -> int:
    """Places that change; all imports together are one."""
    before, after = recipe.plain.splitlines(), recipe.elastic.splitlines()
    places, imports = 0, 0
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            only = all(re.match(r"(from|import) |$", line) for line in before[i:j] + after[k:m])
            places, imports = places + (not only), imports + only
    return places + bool(imports)


class Resized(BaseException):
    """Leaves a script at a step boundary."""


def start(text: str, sizes: tuple[int, ...], stops: tuple[int, ...]) -> int | None:
    """One start of the script."""
    number, act = int(os.environ["SLURM_RESTART_COUNT"]), Run.act

    def acts(run: Run) -> None:
        act(run)
        if number < len(stops) and run.progress.step == stops[number]:
            assert run.keeping.save("for a resize")
            raise Resized

    Run.act = acts  # type: ignore[method-assign]
    linecache.cache["recipe"] = len(text), None, text.splitlines(keepends=True), "recipe"
    sys.argv = ["recipe"]
    try:
        exec(compile(text, "recipe", "exec"), {"__name__": "__main__"})
    except Resized:
        return sizes[number + 1]
    return None


def measure(recipe: Recipe) -> dict[str, object]:
    """Its edits, and what a resized run of it loses and repeats."""
    if recipe.needs != "torch":
        import_module(recipe.needs)  # once, rather than in each rank
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        os.chdir(folder)
        try:
            env = {"ONES_TRACE": f"{folder}/trace-{{restart}}-{{rank}}.jsonl"}
            testing.run(partial(start, recipe.elastic, SIZES, STOPS), ranks=SIZES[0], env=env)
        finally:
            os.chdir(before)
        used = samples_used(Path(folder))
    whole = [used.get(epoch, Counter()) for epoch in range(recipe.epochs)]
    return {
        "edits": edits(recipe),
        "aim": recipe.aim,
        "lost": sum(recipe.samples - len(one) for one in whole),
        "repeated": sum(one.total() - len(one) for one in whole),
    }


def measured() -> dict[str, dict[str, object]]:
    """Of all whose packages are there."""
    return {name: measure(one) for name, one in RECIPES.items() if not one.missing}
