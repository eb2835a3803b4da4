"""docs/database.md: as the models and views are, and every command in it runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ones_db import Store
from ones_db.views import VIEWS
from slurm_ones.cli import app
from tests.db.describe import renewed
from tests.db.test_views import fill, fill_blocks

TOP = Path(__file__).parents[2]
DOCUMENT = (TOP / "docs/database.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?slurm-ones (db query.*?)(?:\s+# .*)?$", DOCUMENT, re.MULTILINE)
CLI = CliRunner()


def test_tables_and_views_are_as_they_are() -> None:
    assert renewed(DOCUMENT) == DOCUMENT, "run: python -m tests.db.describe docs/database.md"


def test_a_document_without_a_place_says_so() -> None:
    with pytest.raises(ValueError, match="no place for the diagram"):
        renewed("# Nothing\n")


def test_every_view_has_an_example() -> None:
    for name in VIEWS:
        assert any(command.startswith(f"db query {name} ") or command == f"db query {name}" for command in COMMANDS)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, empty_sqlite: Path) -> str:
    """A database that commands read."""
    url = f"sqlite:///{shutil.copy(empty_sqlite, tmp_path_factory.mktemp('filled') / 'ones.sqlite')}"
    with Store.open(url, "gres") as store:
        fill(store)
        fill_blocks(store)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_and_prints_the_columns_shown(
    filled: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects whoever copies a command from the document; what it prints has the columns that are shown."""
    monkeypatch.chdir(TOP)
    arguments = [*shlex.split(command), "--database", filled]
    done = CLI.invoke(app, arguments, env={"COLUMNS": "300", "HOME": "/nonexistent"})
    assert done.exit_code == 0, done.output
    shown = re.search(rf"^\$ slurm-ones {re.escape(command)}\n(.*)$", DOCUMENT, re.MULTILINE)
    if shown is not None:
        assert done.stdout.splitlines()[0].split() == shown[1].split()
