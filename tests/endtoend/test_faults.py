"""A few faults on a real Slurm each time, others every time; `benchmarks/real_faults.py` has hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import paths, unavailable

pytestmark = pytest.mark.nightly

FAULTS = 4


@pytest.mark.cluster
@pytest.mark.parametrize("guests", [(), ("--guests", "--blocks", "3")], ids=["", "guests"])
def test_nothing_is_lost(tmp_path: Path, seed: int, guests: tuple[str, ...]) -> None:
    """Protects people's jobs, whatever is killed, paused, full, changed or preempted while they are resized; `python
    benchmarks/real_faults.py --seed SEED` does the same again, with `--guests --blocks 3` that with guests."""
    why = unavailable()
    if why is not None:
        pytest.skip(why)
    result, log = tmp_path / "faults.json", tmp_path / "log"
    part = ("sqlite own", "sqlite operator")[seed % 2]
    options = ["--faults", str(FAULTS), "--seed", str(seed), "--part", part, *guests]
    command = [sys.executable, "benchmarks/real_faults.py", *options, "--json", str(result), "--log", str(log)]
    # Of its own, since it makes mounts of its own.
    done = subprocess.run(command, cwd=paths.REPOSITORY, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(result.read_text())
    assert told["faults"] == FAULTS and not told["lost"] and not told["held"] and not told["broken"], done.stderr
