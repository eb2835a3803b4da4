"""docs/database.md: every command in it runs; docs/tables.md: as the models and views are."""

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
from tests.commands import printed
from tests.db.describe import MADE, page
from tests.db.test_views import fill, fill_blocks

TOP = Path(__file__).parents[2]
DOCUMENT = (TOP / "docs/database.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?slurm-ones (db query.*?)(?:\s+# .*)?$", DOCUMENT, re.MULTILINE)
QUESTION = re.compile(r"^\*\*(.*?\?)\*\*$.*?^(?:\$ )?slurm-ones (db query .*?)$", re.MULTILINE | re.DOTALL)
CLI = CliRunner()

ANSWERS: dict[str, tuple[str, list[tuple[object, ...]]]] = {
    "Which size is the fastest for my job?": ("gpus batch samples_per_s", [(4, 256, 512.0), (1, 64, 128.0)]),
    "How does my job scale?": ("gpus speed_up gpu_efficiency", [(1, 1.0, 1.0), (4, 4.0, 1.0)]),
    "Why does my job have this size?": ("action from_gpus gpus reason", [("grows", 1, 4, "gains (why=reason 7)")]),
    "Did the loss suffer from a resize?": ("gpus epoch loss", [(1, 0, 1.0), (1, 1, 0.9), (4, 2, 0.7)]),
    "What did resizing cost me?": ("job_id resizes pause_s jct_s", [(7, 1, 410.0, 2593.0)]),
    "Did resizing pay?": ("user_name predicted jct_s", [("alice", 0, None), ("carol", 1, 450.0)]),
    "Who used the GPUs last week?": ("user_name gpu_hours", [("bob", 12.0), ("alice", 3300 / 3600), ("carol", 0.4)]),
    "How long do jobs wait, by the GPUs that they ask for?": (
        "requested_gpus jobs queueing_s",
        [(1, 1, 50.0), (2, 2, (993 + 86_400 - 1800 - 1008) / 2)],
    ),
    "Who leaves GPUs idle?": ("user_name gpu_use idle_gpu_hours", [("bob", 0.5, 0.0)]),
    "What keeps jobs from changing?": ("code jobs times", [("gains", 3, 3)]),
}
"""What each question's command answers of `fill` and `fill_blocks`: columns, and rows of them."""


def test_tables_and_views_are_as_they_are() -> None:
    assert (TOP / "docs/tables.md").read_text(encoding="utf-8") == page(), MADE


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


DAYS = {"since": "1969-12-31", "until": "1970-02-01"}
"""Days around all rows, in any time zone."""


def test_ten_questions_are_answered(filled: str) -> None:
    """By the document's own command for each; its moments become days that the rows are of."""
    asked = dict(QUESTION.findall(DOCUMENT))
    assert len(asked) == 10 and asked.keys() == ANSWERS.keys()
    for question, command in asked.items():
        command = re.sub(r"(since|until)=\S+", lambda at: f"{at[1]}={DAYS[at[1]]}", command)
        found = printed(*shlex.split(command), "--format", "json", "--database", filled)
        columns, rows = ANSWERS[question]
        assert [tuple(row[name] for name in columns.split()) for row in found] == rows, question
