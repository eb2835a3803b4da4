"""`slurm-ones db grant`, `revoke` and `export`: who may read what of the job database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ones_db import access
from ones_db.engine import backend_of
from ones_db.export import export_user, export_users
from slurm_ones.cli.common import ConfigOption, DatabaseOption, command, console, person, settings_of
from slurm_ones.config import ConfigError
from slurm_ones.text import plain

RoleOption = Annotated[str, typer.Option("--role", help="The role; created (NOLOGIN) if it does not exist.")]


@command
def grant(
    config: ConfigOption = None,
    database: DatabaseOption = "",
    role: RoleOption = access.ROLE,
    everything: Annotated[bool, typer.Option("--open", help="Its members see all jobs in detail.")] = False,
) -> None:
    """Let a role of PostgreSQL read: its members see their own jobs in detail, others' only in gpu_hours.

    Run it as the owner of the tables, which the companion is; once more changes nothing. Add members with
    GRANT ones_reader TO alice: the name that they log in with is what separates them.
    """
    url = settings_of(config, database).database_url
    access.grant(url, role, everything=everything)
    seen = "everything" if everything else "their own jobs, and others' in gpu_hours alone"
    console.print(f"{backend_of(url).place}: members of {role} see {seen}", markup=False)


@command
def revoke(config: ConfigOption = None, database: DatabaseOption = "", role: RoleOption = access.ROLE) -> None:
    """Take from a role what `grant` gave it. The role stays."""
    url = settings_of(config, database).database_url
    access.revoke(url, role)
    console.print(f"{backend_of(url).place}: {role} may read nothing", markup=False)


@command
def export(
    file: Annotated[Path | None, typer.Argument(help="File to write, with --user.")] = None,
    user: Annotated[str, typer.Option(help="Login name of the user whose jobs to export.")] = "",
    to: Annotated[Path | None, typer.Option(help="Directory for one file USER.sqlite per user.")] = None,
    config: ConfigOption = None,
    database: DatabaseOption = "",
) -> None:
    """Copy each user's own jobs, and what belongs to them, to a database file of theirs (SQLite, mode 0640).

    Files appear whole, in place of older exports and of nothing else. Run as root, each belongs to its user.
    """
    if bool(user) != (file is not None) or bool(user) == (to is not None):
        raise ConfigError("name one user and a file (--user NAME FILE), or a directory for all (--to DIR)")
    url = settings_of(config, database).database_url
    if to is not None:
        done = export_users(url, to, person())
    else:
        assert file is not None
        done = [export_user(url, user, file, person())]
    for one in done:
        whose = "" if one.owned else "; its owner is who ran this"
        line = f"{one.path}: {one.jobs} jobs of {one.user}, nobody else's{whose}"
        console.print(plain(line, 1000), markup=False, soft_wrap=True)
    if not done:
        console.print("no jobs are known, so nothing was exported")
