"""What all commands share: settings, store, client, and how errors end."""

from __future__ import annotations

import functools
import getpass
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from ones_db import ActionRecord, SchemaError, Store, StoreError
from ones_db.engine import names_password
from slurm_ones.config import ConfigError, Settings, load
from slurm_ones.report.text import plain
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import SlurmError

P = ParamSpec("P")
R = TypeVar("R")

# A pipe has no width: wide enough for the tables. A user's ":x:" is no picture.
console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, highlight=False, emoji=False)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Settings file (default: ~/.config/slurm-ones/config.toml, else /etc/slurm-ones/config.toml).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DatabaseOption = Annotated[str, typer.Option("--database", help="Database URL, in place of the one in the settings.")]


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Errors that people can act on end in a line on stderr and exit code 2, all others in a traceback."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (BadInput, ConfigError, SlurmError, StoreError, SchemaError) as error:
            for line in str(error).splitlines():
                errors.print(f"slurm-ones: {plain(line, 2000)}", markup=False, soft_wrap=True)
            raise typer.Exit(2) from None

    return wrapped


def job_number(text: str) -> int:
    """The job that a word names: of a task of a job array, such as 4711_3, the array."""
    match = re.fullmatch(r"([0-9]{1,15})(?:_[0-9]{1,9})?", text)
    if match is None:
        raise typer.BadParameter(f"{plain(text, 40)!r} is no job id")
    return int(match[1])


def settings_of(config: Path | None, database: str = "") -> Settings:
    """The settings file's settings, with what the command line overrides."""
    settings = load(config)
    return settings.model_copy(update={"database": without_password(database)}) if database else settings


def without_password(url: str) -> str:
    """A database URL of the command line, which every user of the machine can read; raises `ConfigError` where it names
    a password."""
    if names_password(url):
        raise ConfigError(
            "a password on the command line can be read by every user of this machine: leave it out of the URL, and "
            "keep it in ~/.pgpass, PGPASSWORD or a service file"
        )
    return url


def reading_store(settings: Settings) -> Store:
    """The job database, for reading. A settings file that names no cluster means the only one there is."""
    return Store.open(settings.database_url, settings.cluster, read_only=True)


def print_json(value: Any) -> None:
    """JSON on stdout; dataclasses become objects."""

    def default(item: Any) -> Any:
        if is_dataclass(item) and not isinstance(item, type):
            return asdict(item)
        raise TypeError(f"{type(item).__name__} is not JSON")

    json.dump(value, sys.stdout, default=default, indent=1, allow_nan=False)
    sys.stdout.write("\n")


def person() -> str:
    """Login name of who runs this process; of who became root or another user by sudo, both."""
    user, before = getpass.getuser(), os.environ.get("SUDO_USER", "")
    return f"{before} as {user}" if before and before != user else user


def record_action(store: Store, action: str, detail: str = "") -> None:
    """Write down that the person behind this process does this."""
    store.add_action(ActionRecord(time.time(), person(), action, detail))
