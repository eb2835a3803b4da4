"""What a block that trains nothing does without any Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ones_wrapper.protocol import Membership, decode_report, directory_name, reports_name
from tests.cluster import paths
from tests.endtoend import light_blocks
from tests.waiting import until

ARRAY = 117


@contextmanager
def block(folder: Path, gpus: int) -> Iterator[None]:
    """A block of task 2 in its first restart, killed at the end."""
    named = {"ARRAY_JOB_ID": ARRAY, "JOB_ID": 121, "ARRAY_TASK_ID": 2, "RESTART_COUNT": 1, "JOB_NUM_NODES": 1}
    env = {f"SLURM_{name}": str(value) for name, value in named.items()} | {"SLURM_GPUS_ON_NODE": str(gpus)}
    path = os.pathsep.join(str(paths.REPOSITORY / part) for part in ("", "db", "wrapper"))
    command = [sys.executable, light_blocks.__file__]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **env, "PYTHONPATH": path})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def trains(folder: Path, term: int) -> Membership:
    """The first membership of a term, once it is there."""
    path = folder / directory_name(ARRAY) / reports_name(term)

    def first() -> Membership | None:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        told = (decode_report(line)[2] for line in lines if line.endswith(b"\n"))
        return next((report for report in told if isinstance(report, Membership)), None)

    return until(first, f"nobody leads term {term}", 20.0, 0.05)


def test_a_block_that_slurm_starts_again_by_the_same_name_knows_itself(tmp_path: Path) -> None:
    """A slurmctld that is killed forgets its last seconds. What it starts again has the same restart count, and the
    size that it had before."""
    with block(tmp_path, gpus=2):
        assert trains(tmp_path, 0).world == 2
    with block(tmp_path, gpus=1):
        again = trains(tmp_path, 1)
    assert (again.blocks, again.restarts, again.world, again.why) == ((2,), (1,), 1, "lost")
