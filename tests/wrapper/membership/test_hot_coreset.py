"""A job on a coreset grows, moves and shrinks by blocks while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ones_wrapper.protocol import Membership
from tests.cluster.paths import REPOSITORY
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import Job
from tests.wrapper.strategies import coreset
from tests.wrapper.strategies.coreset_script import EPOCHS
from tests.wrapper.strategies.script import HURRY, OUT, PACE_MS

pytestmark = pytest.mark.slow


def test_what_was_chosen_travels_to_new_blocks(teams: dict[int, Team], tmp_path: Path) -> None:
    """1 → 2 → 1 ranks, the last one in another block than the first: each epoch uses the chosen samples once, with the
    same choice until the next one, and the parameters are those of one process."""
    folder = tmp_path / "job"
    script = Path(coreset.__file__).with_name("coreset_script.py")
    env = {OUT: str(folder / "out.json"), HURRY: str(folder / "hurry"), PACE_MS: "600", "PYTHONPATH": str(REPOSITORY)}
    job = Job(folder, epochs=EPOCHS, script=script, **env)
    job.move()
    assert [one.world for one in job.of(Membership)] == [1, 2, 1], job.errors()
    coreset.once(job.directory)
    (wanted,) = teams[1].run(coreset.expected)
    coreset.ROW.check(json.loads((folder / "out.json").read_text()), wanted)
