"""Settings: a wrong file says what is wrong, where, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ones.config import ConfigError, Settings, load, parse


def refused(text: str) -> str:
    """What is said of a settings file that is not accepted."""
    with pytest.raises(ConfigError) as error:
        parse(text, "ones.toml")
    return str(error.value)


def test_defaults_change_nothing() -> None:
    """Without a word from the admin the companion only advises."""
    settings = parse("")
    assert settings.mode == "advise"
    assert settings.interval_s == 60
    assert parse('scope = "own"').interval_s == 180


def test_a_wrong_key_is_named_with_the_right_one() -> None:
    """A misspelt key is no silent default."""
    said = refused("tick_seconds = 3")
    assert "ones.toml: unknown key tick_seconds" in said
    assert "did you mean tick_s?" in said
    assert "whole_node_gpus" in said


def test_a_wrong_key_in_a_section_is_named_with_its_own_keys() -> None:
    """The accepted keys are those of the section, not of the file."""
    said = refused("[resize]\ndwell = 3")
    assert "unknown key resize.dwell (did you mean dwell_s?)" in said
    assert "max_wait_s" in said
    assert "whole_node_gpus" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mode = "on"', ["mode", "'advise' or 'act'", "'on'"]),
        ("tick_s = -1", ["tick_s", "greater than 0", "-1"]),
        ("[whole_node_gpus]\nrtx = 0", ["whole_node_gpus.rtx", "0 is not a number of GPUs"]),
        ("[resize]\nmax_open = 0", ["resize.max_open", "greater than or equal to 1"]),
        ('[whole_node_gpus]\nrtx = "four"', ["whole_node_gpus.rtx", "integer", "four"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(text: str, words: list[str]) -> None:
    """Key, value and accepted values stand in one line."""
    said = refused(text)
    assert all(word in said for word in words), said


def test_all_errors_are_said_at_once() -> None:
    """An admin mends a file in one go."""
    assert len(refused('mode = "on"\ntick = 3').splitlines()) == 2


def test_not_toml_and_not_there(tmp_path: Path) -> None:
    """A broken or missing file names itself."""
    assert "ones.toml: not TOML" in refused("mode = ")
    with pytest.raises(ConfigError, match=r"missing.toml: cannot be read"):
        load(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b'cluster = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin.toml: cannot be read"):
        load(tmp_path / "latin.toml")


def test_a_file_is_read(tmp_path: Path) -> None:
    """What is written is what holds."""
    path = tmp_path / "ones.toml"
    path.write_text('database = "sqlite:////tmp/x"\n[policy_options]\ngenerations = 5\n[resize]\ndwell_s = 7\n')
    settings = load(path)
    assert isinstance(settings, Settings)
    assert (settings.database_url, settings.resize.dwell_s) == ("sqlite:////tmp/x", 7)
    assert settings.policy_options == {"generations": 5}
