"""Jobs of blocks that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.wrapper.membership.blocks import Job


@pytest.fixture
def kept() -> Iterator[Callable[[Job], Job]]:
    """Kills a job's blocks at the end."""
    with ExitStack() as ends:

        def keep(job: Job) -> Job:
            ends.callback(job.kill)
            return job

        yield keep


@pytest.fixture
def job(tmp_path: Path, kept: Callable[[Job], Job]) -> Job:
    """Its steps leave a busy machine time for what a test does while it trains; most tests hurry afterwards."""
    return kept(Job(tmp_path / "job", "--step-ms", "40", epochs=30))
