"""How long a collective may take."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ones_wrapper.devices.patience import HANG_S, collective


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("", timedelta(seconds=HANG_S)),
        ("60", timedelta(seconds=60)),
        ("0", timedelta(days=365)),
        ("inf", timedelta(days=365)),
        ("nan", timedelta(seconds=HANG_S)),
        ("soon", timedelta(seconds=HANG_S)),
        ("-5", timedelta(seconds=HANG_S)),
    ],
)
def test_collectives_take_as_long_as_steps_may(given: str, allowed: timedelta) -> None:
    """Protects ranks that wait for an evaluation of more than 10 minutes, after which NCCL would abort them."""
    assert collective({"ONES_HANG_S": given}) == allowed
