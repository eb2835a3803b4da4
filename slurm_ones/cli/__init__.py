"""`slurm-ones …`: one module a command."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from slurm_ones import __version__

_MODULES = {
    "run": "run",
    "status": "status",
    **dict.fromkeys(("jobs", "why", "top"), "jobs"),
    **{name: name for name in ("report", "doctor", "check", "simulate", "db", "web", "demo", "template", "plugin")},
    "import": "import_",
    "study": "study",
    "guests": "standing",
    **dict.fromkeys(("resize", "pin", "release", "estimate", "rehearse"), "by_hand"),
}


class _Commands(TyperGroup):
    """Imports a command's module when it is asked for: `why` need not wait for all that `run` needs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _MODULES:
            return None
        name = _MODULES[cmd_name]
        module = import_module(f"{__name__}.{name}")
        one: typer.Typer | None = getattr(module, "app", None)
        if one is None:
            one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            one.command()(getattr(module, cmd_name if hasattr(module, cmd_name) else name))
        command = typer.main.get_command(one)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands, help="Elastic training jobs on plain Slurm.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"slurm-ones {__version__}")
        raise typer.Exit


@app.callback()
def _main(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


def main() -> None:
    """Entry point."""
    app()
