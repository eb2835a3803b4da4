"""Which client the settings choose; a client of another's needs no edit here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from slurm_ones.config import ConfigError, Settings
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.connect import connect


class Mine(CommandClient):
    name = "mine"

    def __init__(self, *, timeout_s: float, keepalive: Callable[[], None]) -> None:
        self.timeout_s, self.keepalive = timeout_s, keepalive


class Old(CommandClient):
    """One that was written for another release."""

    def __init__(self) -> None:
        super().__init__()


class Remote:
    """A client that passes all calls on."""

    def __init__(self, **_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda: name


def test_a_client_that_passes_calls_on() -> None:
    """Its class has none of the methods."""
    assert connect(Settings(client=f"{__name__}:Remote")).config() == "config"  # type: ignore[comparison-overlap]


def test_a_client_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`client = "package.module:Class"`; it needs no scontrol on the PATH."""
    monkeypatch.setenv("PATH", "")
    called: list[int] = []
    made = connect(Settings(client=f"{__name__}:Mine", timeout_s=7), lambda: called.append(1))
    assert isinstance(made, Mine)
    made.keepalive()
    assert (made.timeout_s, called) == (7, [1])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.such:Client", "No module named 'no'"),
        (f"{__name__}:No", "'No'"),
        ("os:system", "no Slurm client .*: it is no class"),
        ("site_client:Client", "SyntaxError"),
        (f"{__name__}:Old", "cannot be made: .*timeout_s"),
        ("pathlib:Path", "no Slurm client .*: it lacks version, config, snapshot"),
    ],
)
def test_a_client_that_is_none(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with what is wrong, as for every other setting."""
    (tmp_path / "site_client.py").write_text("class Client(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=says):
        connect(Settings(client=name))


def test_a_misspelt_client() -> None:
    """Refused with the settings, not at the first tick."""
    with pytest.raises(ValidationError, match="client"):
        Settings(client="pyslrum")
