"""Times on the command line."""

from __future__ import annotations

import pytest

from slurm_ones.cli.common import length, moment
from slurm_ones.simulate import BadInput

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("7d", NOW - 7 * 86_400),
        ("1.5h", NOW - 5_400),
        (" 2w ", NOW - 14 * 86_400),
        ("1700000000", 1_700_000_000.0),
        ("0.5", 0.5),
        ("2026-11-22T18:00:00Z", 1_795_370_400.0),
        ("2026-11-22 19:00+01:00", 1_795_370_400.0),
    ],
)
def test_a_moment(text: str, at: float) -> None:
    assert moment(text, now=NOW) == at


def test_a_date_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moment("2026-11-22T18:00") - moment("2026-11-22") == 18 * 3600


@pytest.mark.parametrize("text", ["", "yesterday", "7", "-1", "7 d", "1e3", "nan", "٧d", "2026-13-01", "9999-99-99"])
def test_what_is_no_time(text: str) -> None:
    """Is refused by both with the option's name, a bare number by one alone."""
    if text != "7":
        with pytest.raises(BadInput, match="--since"):
            moment(text, "--since")
    with pytest.raises(BadInput, match="--since"):
        length(text, "--since")
