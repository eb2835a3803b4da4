"""Documents that would go stale if nobody looked."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ones.cli import app
from slurm_ones.config import ResizeSettings, Settings
from slurm_ones.decide.ones_sc21.search import Options

TOP = Path(__file__).parents[1]


@pytest.mark.parametrize("model", [Settings, ResizeSettings])
def test_every_setting_is_documented_as_it_is(model: type[Settings] | type[ResizeSettings]) -> None:
    """An admin finds each key with the description that the program itself has."""
    text = (TOP / "docs/configuration.md").read_text()
    for name, field in model.model_fields.items():
        if name != "resize":
            assert f"`{name}`" in text
            assert str(field.description) in text


def test_policy_options_are_documented() -> None:
    """An admin finds each option of the search."""
    text = (TOP / "docs/configuration.md").read_text()
    assert all(f"`{name}`" in text for name in Options.__dataclass_fields__)


def test_readme_names_what_exists() -> None:
    """The commands and files that the README sends people to are there."""
    text = (TOP / "README.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"slurm-ones {command.callback.__name__}" in text
    for path in ("docs/benchmarks.md", "docs/architecture.md", "docs/img/demo.png", "wrapper/README.md"):
        assert path in text
        assert (TOP / path).exists(), path
