"""Command `slurm-ones template`: prints the package's batch scripts and service files, and batch scripts for sites.

docs/sites.md names each site's public page, as of November 2026, and how sites differ. The scripts are untested there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Literal

import typer

from ones_wrapper.protocol.choices import listed
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.cli.check import PLACEHOLDER
from slurm_ones.cli.common import command, say
from slurm_ones.service import dashboard
from slurm_ones.simulate import BadInput


@dataclass(frozen=True)
class SiteRecord:
    """Properties of a site on which its batch scripts depend."""

    title: str
    partition: str | None
    """Partition to use; None for Slurm's default."""
    gpus_per_node: int
    asks: Literal["gres", "gpus-per-node", "whole nodes"]
    """Option of sbatch that requests GPUs; "whole nodes" if Slurm does not count GPUs at this site."""
    whole_nodes: bool = True
    """True if a job always gets whole nodes and is charged for them."""
    arrays: bool = True
    time: str = "24:00:00"
    directives: tuple[str, ...] = ()
    """Further options for sbatch."""
    scratch: str = ""
    """Sentence on when the site deletes files on $SCRATCH; empty if the script uses no $SCRATCH."""
    account: bool = True
    """True if scripts must name an account."""


_TACC_PURGE = "Files not accessed for ten days may be deleted."

SITES: dict[str, SiteRecord] = {
    "gres": SiteRecord(
        "a site where Slurm knows the GPUs (GRES)", None, 1, "gres", whole_nodes=False,
        directives=("--cpus-per-gpu=4",), account=False,
    ),
    "frontera": SiteRecord("Frontera (TACC)", "rtx", 4, "whole nodes", arrays=False, scratch=_TACC_PURGE),
    "lonestar6": SiteRecord("Lonestar6 (TACC)", "gpu-a100", 3, "whole nodes", scratch=_TACC_PURGE),
    "vista": SiteRecord("Vista (TACC)", "gh", 1, "whole nodes", scratch=_TACC_PURGE),
    "perlmutter": SiteRecord(
        "Perlmutter (NERSC)", None, 4, "gpus-per-node", time="12:00:00",
        directives=("--constraint=gpu", "--qos=regular", "--cpus-per-gpu=16"),
        scratch="Files that were not accessed for 8 weeks may be deleted.",
    ),
    "delta": SiteRecord(
        "Delta (NCSA)", "gpuA100x4", 4, "gpus-per-node", whole_nodes=False,
        directives=("--cpus-per-gpu=16", "--mem-per-gpu=58G"),
        scratch="What is deleted when was not found: check with NCSA's help.",
    ),
}  # fmt: skip
"""Known sites, by the name that `slurm-ones template` accepts."""

BLOCKS = 8
"""Number of tasks in the array of a job of blocks."""


@dataclass(frozen=True)
class Wishes:
    """Values for the script from the command line. An empty one becomes the site's default, or a text to edit."""

    account: str = ""
    partition: str = ""
    gpus: str = ""
    batch: str = ""
    time: str = ""
    guests: str = ""


_KNOWN = """\
#
# What is known of this site, from where, and what is not: the page "Your site". Not tried there.
"""
_ARRAY = """\
#
# One job, submitted as a job array: its tasks are blocks, which slurm-ones has join and leave while the
# job trains. Task 0 trains at once. scancel of the array ends all of it. Without slurm-ones one block
# trains at a time.
"""
_HERE = """\
# Reports, orders and checkpoints lie in ones-<the job's id> where you submit, which all nodes must share.
# To have them elsewhere: export ONES_JOB_ROOT="$SCRATCH/ones"
"""
_ON_SCRATCH = """\
# Reports, orders and checkpoints lie on $SCRATCH. {}
# So copy the last checkpoint away when the training is over.
export ONES_JOB_ROOT="${{ONES_JOB_ROOT:-${{SCRATCH:-$PWD}}/ones}}"
"""
_WHOLE_NODES = """\
# GPUs of one node: Slurm knows of none here.
export ONES_GPUS_PER_NODE="${{ONES_GPUS_PER_NODE:-{}}}"

"""
_EACH_BLOCK = "# Each block runs this script: nothing may stand here that must run once for the job.\n"


def batch_script(name: str, site: SiteRecord, wishes: Wishes = Wishes()) -> str:
    """Return a batch script for a site. Raises `BadInput` if a value does not fit into `#SBATCH` or the comment."""
    for word in (wishes.account, wishes.partition, wishes.time):
        if not all(char.isalnum() or char in "-_.:," for char in word):
            raise BadInput(f"{word!r} is no word of Slurm's: letters, digits, and any of - _ . : ,")
    launch, whole = "ones-run --blocks" if site.arrays else "ones-run", site.asks == "whole nodes"
    return f"""\
#!/bin/bash
# Elastic data-parallel training at {site.title}.
#
#   sbatch {name}.sbatch train.py --epochs 90
{_KNOWN if site.account else ""}{_ARRAY if site.arrays else ""}#
# Do not add --ntasks…: Slurm does not let you change task counts. One rank is started per GPU.
#SBATCH --job-name=elastic
{_directives(site, wishes)}#SBATCH --requeue
#SBATCH --open-mode=append
# 120 s before the time limit a checkpoint is written, and the job is requeued to go on from it.
#SBATCH --signal=B:USR2@120
#SBATCH --output={"%x-%A_%a.out" if site.arrays else "%x-%j.out"}
#SBATCH --comment="{_comment(site, wishes)}"
set -euo pipefail

{_ON_SCRATCH.format(site.scratch) if site.scratch else _HERE}
# Where sbatch does not pass on the environment that you train in, make it here:
# module load …; source …/bin/activate
# In a container: export ONES_CONTAINER="apptainer exec --nv image.sif"

{_WHOLE_NODES.format(site.gpus_per_node) if whole else ""}{_EACH_BLOCK if site.arrays else ""}\
{f'# Where srun is not allowed: {launch} --launcher ibrun "$@"{chr(10)}' if whole else ""}\
exec {launch} "$@"
"""


def _comment(site: SiteRecord, wishes: Wishes) -> str:
    gpus, batch = wishes.gpus or "1-16", wishes.batch or "32-1024"
    blocks = " array=blocks" + (f" guests={wishes.guests}" if wishes.guests else "") if site.arrays else ""
    if wishes.guests and not blocks:
        raise BadInput(f"{site.title} has no job arrays, and guests are tasks of one")
    try:
        given = parse_comment(f"ones: gpus={gpus} batch={batch}{blocks}")
    except BadComment as error:
        raise BadInput(str(error)) from None
    assert given is not None and given.gpus is not None
    size = f"gpus={gpus}"
    if site.whole_nodes and given.step == 1:  # a range of nodes has no steps
        low = -(-given.gpus[0] // site.gpus_per_node)
        size = f"nodes={low}-{max(low, given.gpus[1] // site.gpus_per_node)}"
    return f"ones: {size} batch={batch}{blocks}"


def _directives(site: SiteRecord, wishes: Wishes) -> str:
    """Return the options of sbatch that differ between sites."""
    partition, gpus = wishes.partition or site.partition, site.gpus_per_node if site.whole_nodes else 1
    asked = {"gres": f"--gres=gpu:{gpus}", "gpus-per-node": f"--gpus-per-node={gpus}", "whole nodes": ""}
    options = (
        f"--account={wishes.account or PLACEHOLDER}" if site.account or wishes.account else "",
        f"--partition={partition}" if partition else "",
        # %1 keeps Slurm from starting all of them at once.
        f"--array=0-{BLOCKS - 1}%1" if site.arrays else "",
        "--nodes=1",
        asked[site.asks],
        *site.directives,
        f"--time={wishes.time or site.time}",
    )
    return "".join(f"#SBATCH {option}\n" for option in options if option)


FOLDERS = ("sbatch_templates", "service/units", "service/monitoring")
"""Folders of the package with batch scripts, systemd units and Prometheus files."""


def templates() -> dict[str, str]:
    """Return the text of each template by name. The name of `ddp.sbatch` is `ddp`."""
    found = [file for folder in FOLDERS for file in files("slurm_ones").joinpath(folder).iterdir()]
    texts = {file.name: file.read_text("utf-8") for file in found} | {dashboard.NAME: dashboard.text()}
    return {name.removesuffix(".sbatch"): texts[name] for name in sorted(texts)}


def summary(text: str) -> str:
    """Return the first sentence of a template's first comment, or a dashboard's description."""
    if text.startswith("{"):
        return str(json.loads(text)["description"])
    first = next((line for line in text.splitlines() if line.startswith("# ")), "")
    return first.removeprefix("# ").partition(". ")[0].rstrip(".")


@command
def template(
    name: Annotated[
        str, typer.Argument(help="Template or site (none: list them).", autocompletion=lambda: [*templates(), *SITES])
    ] = "",
    account: Annotated[str, typer.Option(help="For a site's script: account to charge.")] = "",
    partition: Annotated[str, typer.Option(help="For a site's script: partition (default: its usual one).")] = "",
    gpus: Annotated[str, typer.Option(help="For a site's script: GPUs that you allow, such as 1-16.")] = "",
    batch: Annotated[str, typer.Option(help="For a site's script: batches that you allow, such as 32-1024.")] = "",
    time: Annotated[str, typer.Option(help="For a site's script: time limit, as in sbatch.")] = "",
    guests: Annotated[str, typer.Option(help="For a site's script: queue of guests: partition:NAME or qos:NAME.")] = "",
) -> None:
    """Print a batch script for a site, or a file of the package, to start from."""
    wishes = Wishes(account, partition, gpus, batch, time, guests)
    known = templates() | {name: batch_script(name, site) for name, site in SITES.items()}
    if not name:
        for known_name, text in known.items():
            say(f"{known_name:28}{summary(text)}")
        return
    name = name.removesuffix(".sbatch")
    if name in SITES:
        sys.stdout.write(batch_script(name, SITES[name], wishes))
        return
    text = known.get(name, "")
    if not text:
        raise BadInput(f"there is no template {name!r}: choose one of {listed(known, name)}")
    if wishes != Wishes():
        raise BadInput(f"{name} is printed as it is; options are for the scripts of sites: {', '.join(SITES)}")
    sys.stdout.write(text)
