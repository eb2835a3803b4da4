"""Documents that would go stale if nobody looked."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

from slurm_ones.cli import app
from slurm_ones.config import LimitSettings, ResizeSettings, RetentionSettings, Settings
from slurm_ones.decide import POLICIES

TOP = Path(__file__).parents[1]


@pytest.mark.parametrize("model", [Settings, ResizeSettings, LimitSettings, RetentionSettings])
def test_every_setting_is_documented_as_it_is(model: type[BaseModel]) -> None:
    """An admin finds each key with the description that the program itself has."""
    text = (TOP / "docs/configuration.md").read_text()
    for name, field in model.model_fields.items():
        if name != "resize":
            assert f"`{name}`" in text
            assert str(field.description) in text


@pytest.mark.parametrize("name", POLICIES)
def test_policies_and_their_options_are_documented(name: str) -> None:
    """An admin finds each policy, and each of its options with the default that it has."""
    text = (TOP / "docs/configuration.md").read_text()
    assert f"`{name}`" in text
    for field in fields(POLICIES[name].options_type):
        told = json.dumps(field.default)
        assert f"| `{field.name}` | `{told}` |" in text or f"`{field.name}` {told}" in text


def test_policies_are_named_where_people_choose() -> None:
    """A researcher finds each policy in the README."""
    text = (TOP / "README.md").read_text()
    assert all(f"`{name}`" in text for name in POLICIES)


def test_readme_names_what_exists() -> None:
    """The commands and files that the README sends people to are there."""
    text = (TOP / "README.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"slurm-ones {command.callback.__name__}" in text
    for path in ("docs/benchmarks.md", "docs/architecture.md", "docs/img/demo.png", "wrapper/README.md"):
        assert path in text
        assert (TOP / path).exists(), path
