"""How long the steps of scripts take in tests: some time, until a test has seen and done all that it wants."""

from __future__ import annotations

import time
from pathlib import Path

LATE, SLOWER = 0.5, 5.0


def pace(step_ms: float, hurry: Path | None, done: float) -> None:
    """Call it in each step; `done` is the share of the training that is done. It takes `step_ms`, until there is the
    file `hurry`. Late in a training that shall hurry some time it takes longer: a test that stands still for seconds
    must not find it ended.
    """
    if hurry is None:
        time.sleep(step_ms / 1000)
    elif not hurry.exists():
        time.sleep(step_ms / 1000 * (SLOWER if done >= LATE else 1.0))
