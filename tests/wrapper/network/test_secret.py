"""The job's secret is made once, for its owner alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ones_wrapper import launch
from ones_wrapper.launch import LaunchError, main, new_secret
from ones_wrapper.network.secret import SECRET, SIZE, JobSecret


def test_it_is_made_once_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = {one.key("x") for one in pool.map(lambda _: JobSecret.make(tmp_path), range(8))}
    assert len(keys) == 1
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [SECRET]


def test_keys_are_bound_to_their_purpose(tmp_path: Path) -> None:
    secret = JobSecret.make(tmp_path)
    keys = {secret.key(*purpose) for purpose in (("proof", "term-1"), ("proof", "term-2"), ("group", "term-1"))}
    assert len(keys) == 3 and all(len(key) == 32 for key in keys)
    assert JobSecret.read(tmp_path).key("proof", "term-1") in keys


def test_what_is_no_secret(tmp_path: Path) -> None:
    """Nothing that another could have put there, or read."""
    path = tmp_path / SECRET
    with pytest.raises(LaunchError, match="missing"):
        JobSecret.read(tmp_path)
    with pytest.raises(LaunchError, match="cannot be made"):
        JobSecret.make(tmp_path / "nowhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError):
        JobSecret.make(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LaunchError, match="regular"):
        JobSecret.make(tmp_path)
    path.unlink()
    path.write_bytes(b"x" * SIZE)
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="others"):
        JobSecret.make(tmp_path)
    path.chmod(0o600)
    assert JobSecret.make(tmp_path)
    path.write_bytes(b"x" * 5)
    with pytest.raises(LaunchError, match="5 bytes"):
        JobSecret.make(tmp_path)


def test_a_job_that_does_not_run_gets_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its directory or its id, from the command line; while it runs its blocks would not find each other."""
    hot = tmp_path / "ones-7" / "hot"
    hot.mkdir(parents=True)
    before = JobSecret.make(hot).key("x")
    new_secret("7", {}, tmp_path)
    after = JobSecret.read(hot).key("x")
    assert after != before and "new secret" in capsys.readouterr().err
    assert (hot / SECRET).stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as running:
        running.setattr(launch, "holder", lambda path: "job 7 (process 3 on n1)")
        with pytest.raises(LaunchError, match=r"job 7 .* still runs"):
            new_secret(str(tmp_path / "ones-7"), {}, tmp_path)
    assert JobSecret.read(hot).key("x") == after
    for options, code in ((["--new-secret", "8"], 2), (["--new-secret", str(tmp_path / "ones-7")], 0)):
        with pytest.raises(SystemExit) as left:
            main(options)
        assert left.value.code == code
    assert JobSecret.read(hot).key("x") != after
