"""`slurm-ones template`: batch scripts and service files to start from: the package's files, and scripts for sites."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import Annotated

import typer

from slurm_ones.cli.common import command, say
from slurm_ones.cli.sites import SITES, Wishes, batch_script
from slurm_ones.simulate import BadInput

FOLDERS = ("sbatch_templates", "service/units", "service/monitoring")
"""Where the package keeps them: users' batch scripts, what systemd needs, and what Prometheus and Grafana need."""


def templates() -> dict[str, str]:
    """The text of every file by its name; `ddp` is `ddp.sbatch`."""
    found = [file for folder in FOLDERS for file in files("slurm_ones").joinpath(folder).iterdir()]
    return {file.name.removesuffix(".sbatch"): file.read_text("utf-8") for file in sorted(found, key=lambda f: f.name)}


def summary(text: str) -> str:
    """The first sentence of a file's first comment; of a dashboard what it says of itself."""
    if text.startswith("{"):
        return str(json.loads(text)["description"])
    first = next((line for line in text.splitlines() if line.startswith("# ")), "")
    return first.removeprefix("# ").partition(". ")[0].rstrip(".")


@command
def template(
    name: Annotated[str, typer.Argument(help="Template or site to print. Without a name: list them.")] = "",
    account: Annotated[str, typer.Option(help="Of a site's script: whom the job is charged to.")] = "",
    partition: Annotated[str, typer.Option(help="Of a site's script: another partition than its usual one.")] = "",
    gpus: Annotated[str, typer.Option(help="Of a site's script: GPUs that you allow (1-16).")] = "",
    batch: Annotated[str, typer.Option(help="Of a site's script: global batches that you allow (32-1024).")] = "",
    time: Annotated[str, typer.Option(help="Of a site's script: its time limit, as Slurm writes it.")] = "",
) -> None:
    """Print a batch script for a site, or a file of the package, to start from."""
    wishes = Wishes(account, partition, gpus, batch, time)
    known = templates() | {name: batch_script(name, site) for name, site in SITES.items()}
    if not name:
        for known_name, text in known.items():
            say(f"{known_name:28}{summary(text)}")
        return
    if name in SITES:
        sys.stdout.write(batch_script(name, SITES[name], wishes))
        return
    text = known.get(name.removesuffix(".sbatch"), "")
    if not text:
        raise BadInput(f"there is no template {name!r}: choose one of {', '.join(known)}")
    if wishes.any:
        raise BadInput(f"{name} is printed as it is; options are for the scripts of sites: {', '.join(SITES)}")
    sys.stdout.write(text)
