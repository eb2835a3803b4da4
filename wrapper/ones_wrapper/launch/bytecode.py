"""Whether Python compiles torch anew at each start: its bytecode is not there, and may not be kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def note(env: Mapping[str, str]) -> str:
    """What a start without bytecode costs, and what to do, at the first start of a job alone; empty where torch has
    bytecode, or this start leaves it there.
    """
    if (env.get("SLURM_RESTART_COUNT") or "0") != "0":
        return ""
    if env.get("SLURM_ARRAY_TASK_ID", "") != env.get("SLURM_ARRAY_TASK_MIN", ""):
        return ""
    spec = find_spec("torch")
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return ""
    try:
        cached = Path(cache_from_source(spec.origin))
        kept = cached.is_file() or (_writable(cached.parent) and not sys.dont_write_bytecode)
    except NotImplementedError:  # this Python keeps none
        return ""
    except PermissionError:  # PYTHONPYCACHEPREFIX names a place of somebody else
        kept = False
    if kept:
        return ""
    packages = Path(spec.origin).parents[1]
    return (
        "torch has no bytecode, and none can be kept, so each start compiles torch anew: about 5 s of the "
        f"processor. Who owns {packages} can end that: {sys.executable} -m compileall -q {packages}"
    )


def _writable(folder: Path) -> bool:
    """Whether this user can make files there, or make the folder."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
