"""`slurm-ones template`: batch scripts and service files to start from, as the package ships them."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Annotated

import typer

from slurm_ones.cli.common import command, console
from slurm_ones.simulate import BadInput

FOLDERS = ("sbatch_templates", "service/units")
"""Where the package keeps them: users' batch scripts, and what systemd needs."""


def templates() -> dict[str, str]:
    """The text of every file by its name; `ddp` is `ddp.sbatch`."""
    found = [file for folder in FOLDERS for file in files("slurm_ones").joinpath(folder).iterdir()]
    return {file.name.removesuffix(".sbatch"): file.read_text("utf-8") for file in sorted(found, key=lambda f: f.name)}


def summary(text: str) -> str:
    """The first sentence of a file's first comment."""
    first = next((line for line in text.splitlines() if line.startswith("# ")), "")
    return first.removeprefix("# ").partition(". ")[0].rstrip(".")


@command
def template(name: Annotated[str, typer.Argument(help="Template to print. Without a name: list them.")] = "") -> None:
    """Print a batch script or a service file to start from."""
    known = templates()
    if not name:
        for known_name, text in known.items():
            console.print(f"{known_name:28}{summary(text)}", markup=False, soft_wrap=True)
        return
    text = known.get(name.removesuffix(".sbatch"), "")
    if not text:
        raise BadInput(f"there is no template {name!r}: choose one of {', '.join(known)}")
    sys.stdout.write(text)
