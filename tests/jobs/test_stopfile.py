"""Who stopped the companion's hand, and when."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from ones_db import ActionRecord, Store, migrate
from slurm_ones.jobs.observer import StopFile


def test_it_is_written_down_once(tmp_path: Path) -> None:
    """Protects an admin's question who stopped the resizes: made, removed and made again, whoever starts meanwhile."""
    url = f"sqlite:///{tmp_path / 'ones.sqlite'}"
    migrate.upgrade(url)
    path, me = tmp_path / "stop", getpass.getuser()
    with Store.open(url, "here") as store:
        file = StopFile(path, store)
        file.check(10.0)
        assert store.actions() == []
        path.touch()
        os.utime(path, (20.0, 20.0))
        for looks in (file, file, StopFile(path, store)):
            looks.check(30.0)
        made = ActionRecord(20.0, me, "stop file made", str(path))
        assert store.actions() == [made]
        path.unlink()
        file.check(40.0)
        file.check(50.0)
        assert store.actions() == [ActionRecord(40.0, "", "stop file removed", str(path)), made]
