"""What docs/recipes.md says of six public scripts holds: so many edits, and no sample is lost or repeated."""

from __future__ import annotations

import pytest

from benchmarks.recipes import RECIPES, edits, measure, patched
from tests.marks import nightly


@pytest.mark.parametrize("name", RECIPES)
def test_the_edits_are_few_and_apply(name: str) -> None:
    recipe = RECIPES[name]
    compile(recipe.elastic, name, "exec")
    assert 1 < edits(recipe) <= recipe.aim
    assert "ones_wrapper" in recipe.elastic and "ones_wrapper" not in recipe.plain


def test_a_diff_of_something_else_is_an_error() -> None:
    diff = "@@ -1,2 +1,3 @@\n a\n+x\n b\n@@ -3 +4,0 @@\n-c\n"
    assert patched("a\nb\nc\n", diff) == "a\nx\nb\n"
    with pytest.raises(AssertionError, match="is not the script's"):
        patched("a\nc\nc\n", diff)


@pytest.mark.parametrize("name", ["ddp_tutorial", *(nightly(name) for name in RECIPES if name != "ddp_tutorial")])
def test_a_recipe_loses_and_repeats_nothing(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects the samples of scripts as people have them, through two resizes in mid-epoch, and people from hints at
    what is right."""
    recipe = RECIPES[name]
    if recipe.missing:
        pytest.skip(f"needs {recipe.needs}")
    found = measure(recipe)
    assert (found["lost"], found["repeated"]) == (0, 0)
    hints = [line for line in capfd.readouterr().err.splitlines() if "(recipe:" in line or "resize" in line]
    assert hints == []
