"""The row of uneven ranks: the result is that of one process, whatever shares the ranks have."""

from __future__ import annotations

import json
from pathlib import Path

from ones_wrapper.group import Group
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import paired
from tests.wrapper.strategies.paired_script import SAMPLES
from tests.wrapper.strategies.rows import HERE, Row
from tests.wrapper.strategies.uneven_script import EPOCHS


def expected(group: Group) -> list[float]:
    return paired.trained(EPOCHS)


def once(job: Path) -> None:
    """And the slow rank of the last run's two got two fifths or less in the end, where a half is even."""
    assert_exactly_once(job, EPOCHS, SAMPLES)
    lines = [json.loads(line) for path in job.glob("trace-2-*.jsonl") for line in path.read_text().splitlines()]
    last = [line for line in lines if line.get("epoch") == EPOCHS - 1]
    slow = sum(len(line["samples"]) for line in last if line["rank"] == 1)
    assert slow <= 0.4 * SAMPLES, f"rank 1 got {slow} of {SAMPLES} samples"


ROW = Row(None, HERE / "uneven_script.py", SAMPLES, EPOCHS, expected, tolerance=1e-12, once=once, label="uneven")
