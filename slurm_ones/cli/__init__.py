"""`slurm-ones …`: one module a command."""

from __future__ import annotations

import typer

from slurm_ones import __version__
from slurm_ones.cli import db, import_
from slurm_ones.cli.doctor import doctor
from slurm_ones.cli.jobs import jobs
from slurm_ones.cli.run import run
from slurm_ones.cli.simulate import simulate
from slurm_ones.cli.status import status
from slurm_ones.cli.why import why

app = typer.Typer(help="Elastic training jobs on plain Slurm.", no_args_is_help=True, pretty_exceptions_enable=False)
for _command in (run, status, jobs, why, doctor, simulate):
    app.command()(_command)
app.add_typer(db.app, name="db")
app.add_typer(import_.app, name="import")


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
