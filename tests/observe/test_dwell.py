"""The peace between two resizes."""

from __future__ import annotations

import pytest

from slurm_ones.observe.dwell import rested_at
from slurm_ones.slurm.model import JobState
from tests.act.make import history
from tests.observe.test_observer import job


@pytest.mark.parametrize(
    ("failures", "last", "expected"),
    [(0, None, 170.0), (0, 200.0, 260.0), (1, 200.0, 320.0), (3, 200.0, 680.0), (50, 200.0, 200.0 + 60 * 64)],
)
def test_each_failure_in_a_row_doubles_it(failures: int, last: float | None, expected: float) -> None:
    """A job that Slurm keeps refusing is not restarted for nothing for ever; it started at 110 s here."""
    assert rested_at(job(), history(1, failures=failures, last_resize_end=last), 60.0) == expected


def test_a_waiting_job_is_free_until_a_resize_of_it_failed() -> None:
    """Nothing of it is interrupted, but holding and releasing it each tick would be no use to anybody."""
    waiting = job(state=JobState.PENDING, node_list=(), start_time=0.0)
    assert rested_at(waiting, history(1, last_resize_end=200.0), 60.0) == 0.0
    assert rested_at(waiting, history(1, failures=2, last_resize_end=200.0), 60.0) == 440.0
    assert rested_at(waiting, None, 60.0) == 0.0
