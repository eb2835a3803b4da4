"""A name for all runs of a job together, for loggers that go on where the last run stopped."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FILE = "run-id"
"""In the job's directory: who removes that starts from scratch, and gets another name."""
_ALLOWED = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run_id(directory: Path, env: Mapping[str, str], job_id: int) -> str:
    """The job's: what an earlier run wrote, else a new one. Blocks that begin at the same time get the same.

    Raises OSError where the directory cannot be written.
    """
    path = directory / FILE
    cluster = re.sub(r"[^A-Za-z0-9_.-]", "-", env.get("SLURM_CLUSTER_NAME") or "local")[:40]
    mine = directory / f".{FILE}-{os.getpid()}-{secrets.token_hex(4)}"
    if not path.exists():
        mine.write_text(f"{cluster}-{job_id}-{secrets.token_hex(4)}")
        with suppress(FileExistsError):
            os.link(mine, path)  # whole, or not there
        mine.unlink()
    found = path.read_text()[:200].strip()
    if not _ALLOWED.fullmatch(found):
        raise ValueError(f"{path} holds no name of letters, digits, dots and dashes; remove it")
    return found
