"""Name of all runs of a job, for experiment loggers that continue after a restart."""

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
"""Environment variable with the seed by which the random generators are seeded before the script's first line."""
_ALLOWED = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run_id(directory: Path, env: Mapping[str, str], job_id: int) -> str:
    """Return the run id of the job: an earlier run's, or else a new one. Blocks that start at the same time get the
    same id. Raises OSError if the directory cannot be written."""
    path = directory / FILE
    cluster = re.sub(r"[^A-Za-z0-9_.-]", "-", env.get("SLURM_CLUSTER_NAME") or "local")[:40]
    if not path.exists():
        create_small(path, f"{cluster}-{job_id}-{secrets.token_hex(4)}".encode())
    found = path.read_text()[:200].strip()
    if not _ALLOWED.fullmatch(found):
        raise ValueError(f"{path} holds no name of letters, digits, dots and dashes; remove it")
    return found


def seeds(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with seeds, equal on all ranks and at all starts of the run `name`, for scripts that
    set none. They seed the random generators, and the hash of texts, on which the order of sets depends."""
    seed = str(zlib.crc32(name.encode()))
    return {SEED: seed, "PYTHONHASHSEED": env.get("PYTHONHASHSEED") or seed}
