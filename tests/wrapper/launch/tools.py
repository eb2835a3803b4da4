"""Commands of Slurm that note what they are asked, for an `ones-run` on this machine."""

from __future__ import annotations

import os
from pathlib import Path

TOOL = """#!/bin/sh
echo "$(basename "$0") $@" >> "{folder}/asked"
{then}
"""


def on_node(folder: Path, scontrol: str = "", scancel: str = "") -> dict[str, str]:
    """The environment of a job on one node, with these commands in the PATH; what they do besides noting."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, then in (("scontrol", scontrol), ("scancel", scancel)):
        (tools / name).write_text(TOOL.format(folder=folder, then=then))
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "ONES_LAUNCHER": "local",
    }


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []
