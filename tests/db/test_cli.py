"""`slurm-ones db upgrade` and `db copy`, and where a password may stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ones_db import SCHEMA_REVISION, Store
from slurm_ones.config import ConfigError, load
from tests.commands import call
from tests.db.make import resized_job
from tests.db.server import Server


def test_a_site_is_moved_by_a_command(sqlite_url: str, server: Server) -> None:
    """Protects the way to a server: each migration and each table is shown, and what is there now is said."""
    name = server.fresh()
    done = call("db", "upgrade", "--database", server.url(name))
    said = done.output
    assert done.exit_code == 0, said
    assert said.startswith(f"{SCHEMA_REVISION}  A table of the GPUs") and f"none → {SCHEMA_REVISION}" in said
    with Store.open(sqlite_url, "gres") as store:
        resized_job(store)
    for copied in ("21", "0"):
        done = call("db", "copy", sqlite_url, server.url(name))
        assert done.exit_code == 0, done.output
        (line,) = (line for line in done.output.splitlines() if line.startswith("throughput "))
        assert line.split()[1:3] == ["21", copied]
    with Store.open(server.url(name), "gres", read_only=True) as store:
        assert store.histories([7])[7].samples == 3000
    server.drop(name)


def test_no_password_on_a_command_line(sqlite_url: str) -> None:
    """Protects a password from lists of processes and shells' histories."""
    secret = "postgresql://me:s3same@host/ones"
    for command in (("upgrade", "--database", secret), ("copy", sqlite_url, secret), ("copy", secret, sqlite_url)):
        done = call("db", *command)
        assert done.exit_code == 2 and "a password on the command line" in done.output and "s3same" not in done.output


def test_a_password_in_settings_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('database = "postgresql://me:s3same@host/ones"\n')
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        load(file)
    assert "s3same" not in str(caught.value)
    file.chmod(0o600)
    assert load(file).database.startswith("postgresql://")
