"""Hint that each start compiles torch's Python files again, since their bytecode cannot be stored."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def note(env: Mapping[str, str]) -> str:
    """Return the hint, with the seconds lost and a remedy. Empty if torch has bytecode, if this start can store it, and
    after a job's first start."""
    again = (env.get("SLURM_RESTART_COUNT") or "0") != "0"
    if again or env.get("SLURM_ARRAY_TASK_ID", "") != env.get("SLURM_ARRAY_TASK_MIN", ""):
        return ""
    spec = find_spec("torch")
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return ""
    try:
        cached = Path(cache_from_source(spec.origin))
        kept = cached.is_file() or (_writable(cached.parent) and not sys.dont_write_bytecode)
    except NotImplementedError:  # this Python keeps none
        return ""
    except PermissionError:  # PYTHONPYCACHEPREFIX names another user's folder
        kept = False
    if kept:
        return ""
    packages = Path(spec.origin).parents[1]
    return (
        "torch has no bytecode, and none can be kept, so each start compiles torch again: about 5 s of the "
        f"processor. The owner of {packages} can avoid that: {sys.executable} -m compileall -q {packages}"
    )


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
