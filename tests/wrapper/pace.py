"""How long the steps of scripts take in tests: some time, until a test has seen and done all that it wants."""

from __future__ import annotations

import time
from pathlib import Path

SLOWER = 15.0
"""How much longer a step takes by the end."""


def pace(step_ms: float, hurry: Path | None, done: float) -> None:
    """Call it in each step; `done` is the share of the training that is done. It takes `step_ms`, until there is the
    file `hurry`. In a training that shall hurry some time the steps grow longer and longer: a test that stands still
    for seconds must not find it ended.
    """
    if hurry is None:
        time.sleep(step_ms / 1000)
    elif not hurry.exists():
        time.sleep(step_ms / 1000 * (1.0 + SLOWER * done * done))
