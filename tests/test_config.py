"""The settings file: what is wrong with it is said with its name, its key, and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ones.config import ConfigError, Settings, load, parse


def error(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(text, "site.toml")
    return str(raised.value)


def test_an_empty_file_is_the_defaults() -> None:
    """Defaults only advise: nothing is changed at a site that has not said so."""
    settings = parse("")
    assert settings == Settings()
    assert (settings.mode, settings.scope, settings.client, settings.interval_s) == ("advise", "all", "auto", 60.0)


def test_a_whole_file() -> None:
    settings = parse(
        """
        mode = "act"
        scope = "own"
        tick_s = 30
        spool = "/shared/ones"
        policy_options = { population = 32, greedy = true }
        [whole_node_gpus]
        rtx = 4
        [resize]
        dwell_s = 60
        start_now = false
        """
    )
    assert (settings.mode, settings.scope, settings.interval_s, settings.spool) == (
        "act",
        "own",
        30.0,
        Path("/shared/ones"),
    )
    assert settings.policy_options == {"population": 32, "greedy": True}
    assert settings.whole_node_gpus == {"rtx": 4}
    assert (settings.resize.dwell_s, settings.resize.start_now, settings.resize.max_open) == (60.0, False, 16)


def test_guests_by_partition() -> None:
    """Slurm writes QOS and accounts in lower case."""
    found = parse('[guests.gpu]\nqos = "Guest"\naccount = "Guests"\n[guests.rtx]\npartition = "Scavenge"').guests
    assert (found["gpu"].qos, found["gpu"].account, found["gpu"].partition) == ("guest", "guests", "")
    assert found["rtx"].partition == "Scavenge"


def test_user_mode_polls_less_often() -> None:
    """Sites ask it of users."""
    assert parse('scope = "own"').interval_s == 180.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "clinet = 'auto'",
            ("site.toml: unknown key clinet (did you mean client?)", "accepted here: client, cluster,"),
        ),
        ("zzz = 1", ("unknown key zzz; accepted here:",)),
        ("[resize]\ndwell = 1", ("unknown key resize.dwell (did you mean dwell_s?)", "accepted here: advance_s,")),
        ("[guests.gpu]\nqso = 'guest'", ("unknown key guests.gpu.qso (did you mean qos?)", "accepted here: account,")),
        ("[resise]\ndwell_s = 1", ("unknown key resise (did you mean resize?)",)),
    ],
)
def test_a_wrong_key_is_named_with_its_neighbour(text: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in error(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mode = "go"', "site.toml: mode: Input should be 'advise' or 'act', not 'go'"),
        ("tick_s = 0", "tick_s: Input should be greater than 0, not 0"),
        ('tick_s = "often"', "tick_s: "),
        ("[resize]\nmax_open = 0", "resize.max_open: Input should be greater than or equal to 1, not 0"),
        ("[resize]\ndwell_s = -1", "resize.dwell_s: "),
        ("resize = 3", "resize: "),
        ("[whole_node_gpus]\nrtx = 0", "whole_node_gpus.rtx: Input should be greater than or equal to 1, not 0"),
        ("[whole_node_gpus]\nrtx = 'four'", "whole_node_gpus.rtx: "),
        ("[guests.gpu]\naccount = 'guests'", "guests.gpu: Value error, name a qos or a partition that Slurm preempts"),
        ("[guests.gpu]\nqos = 'guest TimeLimit=1'", "guests.gpu.qos: String should match pattern"),
        ("[guests]\ngpu = 'guest'", "guests.gpu: "),
        ("[notify.hook]\nusers = ['alice']", "notify.hook: Value error, name one of command, url, url_file and own"),
        (
            "[notify.hook]\ncommand = 'mail root'",
            "notify.hook: Value error, command: begin with the program's whole path",
        ),
        (
            "[notify.hook]\nurl = 'https://u@h/x'",
            "notify.hook: Value error, write an address such as https://HOST/PATH",
        ),
        ("[notify.hook]\nown = ['https://h/x']", "notify.hook: Value error, own: write addresses that end with /"),
        ("[notify.hook]\nurl = 'smtp://h'", 'notify.hook: Value error, form = "mail" goes with smtp:// addresses'),
        ("[notify.hook]\nurl = 'https://h/x'\nevents = ['all']", "notify.hook.events.0: Input should be 'resized'"),
        ('stop_file = "stop"', "stop_file: Value error, write the whole path, from /, not 'stop'"),
        ('spool = "~/spool"', "spool: Value error, write the whole path"),
        ("[notify.hook]\nurl_file = 'secret'", "notify.hook.url_file: Value error, write the whole path"),
        ("tick_s = nan", "tick_s: "),
        ("timeout_s = inf", "timeout_s: "),
        ("tick_s = 1e300", "tick_s: Input should be less than or equal to 31536000"),
        ("tick_s = true", "tick_s: Input should be a valid number, not True"),
        ("[retention]\nforget_after_days = 1e9", "retention.forget_after_days: "),
        ('[resize]\nstart_now = "no"', "resize.start_now: Input should be a valid boolean, not 'no'"),
        ('[resize]\nmax_open = "3"', "resize.max_open: Input should be a valid integer, not '3'"),
        ("[resize]\nshrink = 1", "resize.shrink: "),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(text: str, words: str) -> None:
    assert words in error(text)


def test_every_mistake_has_a_line() -> None:
    lines = error('mode = "go"\nzzz = 1\ntick_s = -1').splitlines()
    assert len(lines) == 3
    assert all(line.startswith("site.toml: ") for line in lines)


def test_what_is_not_toml() -> None:
    assert "site.toml: not TOML: " in error("mode = act")
    assert "line 2" in error('mode = "act"\n[resize\n')


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, a directory, not UTF-8: the path is in the message."""
    (tmp_path / "latin.toml").write_bytes(b'policy = "gr\xfcn"')
    for name in ("none.toml", ".", "latin.toml"):
        with pytest.raises(ConfigError, match="cannot be read") as raised:
            load(tmp_path / name)
        assert str(tmp_path) in str(raised.value)


def test_a_file_that_everybody_may_write(tmp_path: Path) -> None:
    """It names programs that run as whoever reads it."""
    path = tmp_path / "open.toml"
    path.touch()
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="everybody may write it"):
        load(path)
    path.chmod(0o664)
    assert load(path) == Settings()


def test_a_closed_directory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's, or after sudo another user's home. Root, who runs tests, may look into every one."""

    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("stat", "open"):
        monkeypatch.setattr(Path, name, closed)
    with pytest.raises(ConfigError, match="closed to you"):
        load()


def test_without_a_file_a_user_looks_after_their_own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's daemon looks after everybody's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("slurm_ones.config.default_path", lambda: tmp_path / "none.toml")
    for user, scope in (("alice", "own"), ("slurm", "all"), ("root", "all")):
        monkeypatch.setattr("getpass.getuser", lambda user=user: user)
        assert load().scope == scope


def test_the_users_own_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / ".config/slurm-ones/config.toml"
    own.parent.mkdir(parents=True)
    own.write_text("seed = 7")
    assert load().seed == 7
