"""The commands as tests call them: in this process, without a home, on a wide terminal."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from slurm_ones.cli import app


def call(*arguments: str, width: int = 200) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width), "HOME": "/nonexistent"})


def printed(*arguments: str) -> Any:
    """What a command that succeeds prints as JSON."""
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
