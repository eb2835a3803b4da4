"""The lines of docs/operations.md, typed on an SQLite database of a test's own."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ones_db import Store, migrate
from tests.db.make import job
from tests.guide import guide

PLACES = (
    "/var/lib/slurm-ones",
    "/var/backups",
    "/var/spool/slurm-ones",
    "/shared/slurm-ones",
    "/etc/slurm-ones",
    "/etc/prometheus",
    "/etc/systemd/system",
)
PROGRAMS = ("/opt/slurm-ones", "/usr/lib/systemd/system", "/usr/lib/sysusers.d", "/usr/lib/tmpfiles.d")
NOT_HERE = ("systemctl ", "chown ")
"""What a test cannot do without a system of its own."""


def lines_of(section: str) -> list[list[str]]:
    """The commands of each block of a section that can be typed here."""
    return [[command.line for command in block] for block in guide.blocks(section, "console (?:sqlite|files)")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A host's directories, with the database of a site that has one job."""
    for name in (*PLACES, *PROGRAMS):
        (tmp_path / name.lstrip("/")).mkdir(parents=True)
    (tmp_path / "etc/slurm-ones/config.toml").write_text(f'database = "{url(tmp_path)}"\n')
    migrate.upgrade(url(tmp_path))
    record(tmp_path, 7)
    return tmp_path


def url(place: Path) -> str:
    return f"sqlite:///{place}/var/lib/slurm-ones/ones.sqlite"


def record(place: Path, job_id: int) -> None:
    with Store.open(url(place), "here") as store:
        store.record_jobs([job(job_id)])


def known(place: Path) -> set[int]:
    with Store.open(url(place), "here", read_only=True) as store:
        return {one.job_id for one in store.job_summaries()}


@pytest.fixture
def type_block(place: Path) -> Callable[[list[str]], str]:
    """Types the lines of a block, below `place`; all but `NOT_HERE`. Gives what they printed."""
    used = f"{sys.executable} -m slurm_ones.cli"

    def typed(lines: list[str]) -> str:
        said = []
        for line in lines:
            if line.startswith(NOT_HERE):
                continue
            here = re.sub("^(slurm-ones) (.*)", r"PROGRAM \2 --config /etc/slurm-ones/config.toml", line)
            for name in (*PLACES, *PROGRAMS):
                here = here.replace(name, f"{place}{name}")
            done = subprocess.run(
                ["bash", "-euc", here.replace("PROGRAM", used)], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            said.append(done.stdout)
        return "".join(said)

    return typed


def test_a_backup_is_restored(place: Path, type_block: Callable[[list[str]], str]) -> None:
    """What was known at the backup is known again, whatever the log of SQLite still held."""
    back_up, restore = lines_of("Back up and restore")
    with Store.open(url(place), "here") as running:
        assert type_block(back_up).strip() == "ok"
        running.record_jobs([job(8)])
        assert known(place) == {7, 8}
    assert "nothing to do" in type_block(restore)
    assert known(place) == {7}
    record(place, 9)
    assert known(place) == {7, 9}


def test_an_upgrade_is_rolled_back(place: Path, type_block: Callable[[list[str]], str]) -> None:
    """The newest copy that an upgrade kept is the database again, and the program is that of before."""
    file = place / "var/lib/slurm-ones/ones.sqlite"
    for number, stamp in enumerate((1, 2)):
        with sqlite3.connect(file) as source, sqlite3.connect(f"{file}.0018-{stamp}.bak") as copy:
            source.backup(copy)
        record(place, 20 + number)
    (place / "opt/slurm-ones.before").mkdir()
    (block,) = lines_of("Roll an upgrade back")
    type_block(block)
    assert known(place) == {7, 20}
    assert {one.name for one in (place / "opt").iterdir()} == {"slurm-ones", "slurm-ones.after"}


def test_nothing_is_left(place: Path, type_block: Callable[[list[str]], str]) -> None:
    """What the installation of docs/admin.md writes is gone."""
    for name in ("slurm-ones.service", "slurm-ones-maintain.service", "slurm-ones-maintain.timer", "other.service"):
        (place / "usr/lib/systemd/system" / name).touch()
    (place / "etc/systemd/system/slurm-ones.service.d").mkdir()
    (place / "etc/prometheus/slurm-ones-alerts.yml").touch()
    for folder in ("sysusers.d", "tmpfiles.d"):
        (place / "usr/lib" / folder / "slurm-ones.conf").touch()
    (block,) = lines_of("Uninstall")
    type_block(block)
    assert [one.name for one in place.rglob("*") if "slurm-ones" in one.name] == []
    assert [one.name for one in place.rglob("*") if one.is_file()] == ["other.service"]
