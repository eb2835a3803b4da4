"""Command line `slurm-ones …`, with one module per command."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from ones_wrapper.protocol.choices import near
from slurm_ones import __version__

_GROUPS: dict[str, dict[str, str]] = {
    "Your jobs": {
        **dict.fromkeys(("jobs", "why", "top"), "jobs"),
        "report": "report",
        **dict.fromkeys(("resize", "pin", "release", "estimate", "rehearse", "guests"), "by_hand"),
    },
    "Before you submit": {"check": "check", "template": "template", "demo": "demo"},
    "A site": {name: name for name in ("run", "status", "doctor", "web", "plugin", "db")} | {"import": "import_"},
    "Studies": {"simulate": "simulate", "study": "study"},
}
_MODULES = {name: module for group in _GROUPS.values() for name, module in group.items()}
"""Name of the module that contains each command, by the command's name."""
_PANELS = {name: panel for panel, group in _GROUPS.items() for name in group}


class _Commands(TyperGroup):
    """Command group that imports only the module of the called command."""

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
        command: Any = typer.main.get_command(one)
        command.name = cmd_name
        command.rich_help_panel = _PANELS[cmd_name]
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        hint = near(args[0], _MODULES) if args and args[0] not in _MODULES else ""
        if hint and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0][:40]!a}{hint}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Elastic training jobs on plain Slurm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"slurm-ones {__version__}")
        raise typer.Exit


@app.callback()
def _main(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it is closed
        # A name may have letters that a locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
