"""Name that all runs of a job share, for loggers that continue where the last run stopped."""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path

from ones_wrapper.files.small_files import create_small

FILE = "run-id"
"""File with the run id in the job's directory; removing the file gives the next run a new id."""
SEED = "ONES_SEED"
"""Environment variable with the seed of the script's random generators before its first line."""
_ALLOWED = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run_id(directory: Path, env: Mapping[str, str], job_id: int) -> str:
    """Return the job's run id: an earlier run's, else a new id. Blocks that start at the same time get the same id.
    Raises OSError if the directory cannot be written."""
    path = directory / FILE
    cluster = re.sub(r"[^A-Za-z0-9_.-]", "-", env.get("SLURM_CLUSTER_NAME") or "local")[:40]
    if not path.exists():
        create_small(path, f"{cluster}-{job_id}-{secrets.token_hex(4)}".encode())
    found = path.read_text()[:200].strip()
    if not _ALLOWED.fullmatch(found):
        raise ValueError(f"{path} holds no name of letters, digits, dots and dashes; remove it")
    return found


def seeds(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that give all ranks, and all starts of the run `name`, the same seeds if the script
    gives none: of the hash of texts, which orders sets, and of the script's generators."""
    seed = str(zlib.crc32(name.encode()))
    return {SEED: seed, "PYTHONHASHSEED": env.get("PYTHONHASHSEED") or seed}
