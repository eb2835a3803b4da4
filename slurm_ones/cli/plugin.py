"""Commands `slurm-ones plugin`, which build, install and check the options `--elastic-…` of sbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slurm_ones.cli.common import command, say
from slurm_ones.plugin.build import PluginError, compile_spank
from slurm_ones.plugin.install import PluginSite, look, trial, write_own, write_site

app = typer.Typer(
    help="Options --elastic-… of sbatch, and checks of elastic jobs as they are submitted.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
IncludeOption = Annotated[Path | None, typer.Option("--include", help="Folder with slurm/spank.h, if none is found.")]


@app.command()
@command
def build(
    to: Annotated[Path, typer.Option("--to", help="Folder to write it to.")] = Path(), include: IncludeOption = None
) -> None:
    """Compile the SPANK plugin with this machine's compiler and Slurm's headers. It is not installed yet."""
    try:
        say(f"written: {compile_spank(to, include)}")
    except OSError as error:
        raise PluginError(str(error)) from None


@app.command()
@command
def install(
    to: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write: for a site, the folder of slurm.conf.")],
    own: Annotated[bool, typer.Option("--own", help="Only for your own commands, without privileges.")] = False,
    include: IncludeOption = None,
    spank: Annotated[bool, typer.Option("--spank/--no-spank", help="sbatch's options too, or only the checks.")] = True,
) -> None:
    """Write the plugin's files to a folder, and print the lines to add to Slurm's own files."""
    written, todo = write_own(to, include, look()) if own else write_site(to, include, spank, _seen())
    for line in [*(f"written: {path}" for path in written), *todo]:
        say(line)


def _seen() -> PluginSite | None:
    try:
        return look()
    except PluginError:
        return None


@app.command()
@command
def check() -> None:
    """Check that Slurm loads the plugin and that it works. No job is submitted. The exit code is 1 if it does not."""
    findings = trial(look())
    for one in findings:
        say(f"{'ok' if one.good else 'NO':4}{one.what:12}{one.text}", 500)
    if not all(one.good for one in findings):
        raise typer.Exit(1)
