"""A name for all runs of a job together, for loggers that go on where the last run stopped."""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path

from ones_wrapper.files.small_files import create_small

FILE = "run-id"
"""File in the job's directory: who removes it starts from scratch, and gets another name."""
SEED = "ONES_SEED"
"""Variable with the number by which a script's generators are seeded before its first line."""
_ALLOWED = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run_id(directory: Path, env: Mapping[str, str], job_id: int) -> str:
    """Return the job's run id: the one that an earlier run wrote, else a new one. Blocks that start at the same time
    get the same id.

    Raises OSError where the directory cannot be written.
    """
    path = directory / FILE
    cluster = re.sub(r"[^A-Za-z0-9_.-]", "-", env.get("SLURM_CLUSTER_NAME") or "local")[:40]
    if not path.exists():
        create_small(path, f"{cluster}-{job_id}-{secrets.token_hex(4)}".encode())
    found = path.read_text()[:200].strip()
    if not _ALLOWED.fullmatch(found):
        raise ValueError(f"{path} holds no name of letters, digits, dots and dashes; remove it")
    return found


def seeds(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a script choose alike on all ranks and at all starts of the run of this name, where it gives
    no seed: the hash of texts, by which sets are ordered, and the first state of its generators.
    """
    seed = str(zlib.crc32(name.encode()))
    return {SEED: seed, "PYTHONHASHSEED": env.get("PYTHONHASHSEED") or seed}
