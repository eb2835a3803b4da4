"""Command `slurm-ones doctor`: checks a site, and says what to change."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ones_db import SCHEMA_REVISION, StoreError, migrate
from ones_db.engine import backend_of
from ones_wrapper.protocol import SPOOL_FILE
from ones_wrapper.protocol.optin import near_miss
from slurm_ones.cli.common import (
    ConfigOption,
    JsonOption,
    command,
    console,
    grid,
    not_seen,
    print_json,
    published_for,
    settings_of,
)
from slurm_ones.cli.guests import SiteFinding, bad, examine_guests, note, ok, read_site, sacctmgr
from slurm_ones.config import ConfigError, Settings, default_path, view_name
from slurm_ones.plugin.install import JOB_SUBMIT, names_lua
from slurm_ones.service.publisher import let_read
from slurm_ones.slurm.client import SlurmClient, SlurmError
from slurm_ones.slurm.connect import connect, why_not_pyslurm
from slurm_ones.slurm.parse import allows_arrays, hides_gpus
from slurm_ones.text import safe

OLDEST = (21, 8)
MOST_NEAR = 5
"""Largest number of jobs that are listed because their comments almost opt in."""


def _version(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    major, minor = client.version()
    fine = (major, minor) >= OLDEST
    advice = "" if fine else "the companion needs squeue --json, which Slurm has from 21.08 on"
    yield SiteFinding("ok" if fine else "bad", "Slurm", f"{major:02d}.{minor:02d}", advice)
    why = why_not_pyslurm()
    if client.name == "pyslurm":
        yield ok("client", "PySlurm")
    elif ":" in settings.client:
        yield ok("client", settings.client)
    elif settings.client == "command":
        yield ok("client", "command line, as the settings ask")
    else:
        advice = "works everywhere; a PySlurm of Slurm's own release saves a process per call"
        yield note("client", f"command line, since PySlurm cannot be used: {why}", advice)


def _permission(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    user = getpass.getuser()
    if published_for(settings) is not None:
        yield ok("permission", f"this site's companion acts on {user}'s jobs, so {user} needs no permission")
        return
    slurm_user = client.config().get("SlurmUser", "").split("(")[0]
    if settings.scope == "own":
        yield ok("permission", f"user mode: {user} may resize {user}'s own jobs")
    elif user in ("root", slurm_user):
        yield ok("permission", f"{user} may resize everybody's jobs")
    elif sacctmgr("user", user, fields="adminlevel")[:1] in ([["Operator"]], [["Administrator"]]):
        yield ok("permission", f"{user} is an operator and may resize everybody's jobs")
    else:
        yield bad(
            "permission",
            f"{user} may resize only {user}'s own jobs, and the settings ask for all users' (scope = \"all\")",
            f'run as an operator (sacctmgr modify user {user} set adminlevel=operator), or set scope = "own"',
        )


def _gpus(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    snapshot = client.snapshot()
    for partition in snapshot.partitions.values():
        counts = sorted({snapshot.nodes[n].gpus for n in partition.node_names if n in snapshot.nodes})
        what = f"partition {partition.name}"
        if partition.name in settings.whole_node_gpus:
            gpus = settings.whole_node_gpus[partition.name]
            yield ok(what, f"whole nodes of {gpus} GPUs, as the settings say; use ddp-whole-node.sbatch")
        elif counts and counts[-1] > 0:
            kind = "whole nodes" if partition.whole_nodes else "GRES"
            mixed = f" (nodes differ: {', '.join(map(str, counts))})" if len(counts) > 1 else ""
            yield ok(what, f"{kind}, {counts[-1]} GPUs a node{mixed}; use ddp.sbatch")
        else:
            yield note(
                what,
                "Slurm knows of no GPUs there, so its jobs are not resized",
                f"if its nodes have GPUs, add [whole_node_gpus] {partition.name} = N to the settings",
            )


def _requeue(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    config = client.config()
    if config.get("JobRequeue", "1") == "0":
        yield note("requeue", "JobRequeue=0: only jobs with --requeue are requeued", "templates have --requeue")
    delay = re.search(r"requeue_delay=(\d+)", config.get("SchedulerParameters", ""))
    expire = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    # A requeued job waits until the credentials of its last run have expired.
    seconds = int(delay[1]) if delay else (int(expire[1]) if expire else 120) + 1
    if settings.resize.start_now:
        yield ok("requeue delay", f"{seconds} s, skipped by StartTime=now (resize.start_now)")
    else:
        advice = "each resize waits that long; resize.start_now = true skips it" if seconds > 10 else ""
        yield SiteFinding("note" if advice else "ok", "requeue delay", f"{seconds} s", advice)
    wait = config.get("KillWait", "30 sec").split()[0]
    yield ok("KillWait", f"{wait} s between SIGTERM and SIGKILL")


def _blocks(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    config = client.config()
    most = config.get("MaxArraySize", "")
    if not allows_arrays(config):
        advice = "running jobs are resized by requeue; blocks need MaxArraySize above 1"
        yield note("blocks", f"MaxArraySize={most}: no job arrays, so no jobs of blocks", advice)
    else:
        yield ok("blocks", f"job arrays of up to {most or 'any number of'} tasks: jobs of blocks resize in place")
    if hides_gpus(config):
        found = "ConstrainDevices=yes: two blocks on one node may not reach each other's GPUs directly"
        yield note("blocks on a node", found, "the companion prefers one block a node there")


def _plugin(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    """Check that the job_submit script exists in Slurm's folder, if Slurm is configured to run it."""
    config = client.config()
    path = Path(config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent / JOB_SUBMIT
    if names_lua(config.get("JobSubmitPlugins", "")) and not path.exists():
        found = f"JobSubmitPlugins=lua, but {path} does not exist here"
        advice = "on the controller's machine scontrol reconfigure fails without it: slurm-ones plugin install"
        yield note("plugin", found, advice)


def _directories(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    here = Path.cwd()
    if os.access(here, os.W_OK):
        yield ok("job directory", f"jobs submitted from {here} keep their files in ones-<job id> there")
    else:
        yield bad("job directory", f"{here} is not writable", "submit from a shared directory that is")
    if settings.spool is not None and published_for(settings) is not None:
        yield ok("spool", f"{settings.spool}: jobs need ONES_SPOOL={settings.spool}")
    elif settings.spool is not None:
        try:
            with tempfile.NamedTemporaryFile(dir=settings.spool):
                yield ok("spool", f"{settings.spool}")
        except OSError as error:
            yield bad("spool", f"{settings.spool}: {error.strerror}", "create it, owned by this user, mode 755")
        yield _published(settings.spool)
    elif settings.scope == "all" and os.geteuid() != 0:
        yield bad(
            "spool",
            "none: orders cannot be written into other users' directories",
            f"set spool to a shared directory of this user's, and write its path to {SPOOL_FILE} on the compute nodes "
            "(or have jobs export ONES_SPOOL)",
        )


def _published(spool: Path, file: Path = Path(SPOOL_FILE)) -> SiteFinding:
    """Check that jobs can find the spool by themselves. Only this machine is checked, no compute node."""
    what = "spool for jobs"
    try:
        path = Path(file.read_text().strip())
        states = [one.lstat() for one in (file, file.parent)]
    except (OSError, ValueError):
        advice = f"write {spool} to {file} on every compute node, as root; or have jobs export ONES_SPOOL={spool}"
        return note(what, f"{file} does not exist here, and compute nodes were not checked", advice)
    if path != spool:
        return bad(what, f"{file} names {path}, not {spool}", "write the spool from the settings into that file")
    if any(state.st_uid != 0 or state.st_mode & 0o022 for state in states):
        return bad(what, f"users other than root may write {file} or its folder", "jobs ignore such a file")
    return ok(what, f"{file} names it on this machine; put the same file on every compute node")


def _settings_file(path: Path, settings: Settings) -> Iterator[SiteFinding]:
    if settings.scope == "own" or not path.exists():
        return
    if path.stat().st_mode & 0o004:
        yield ok("settings", str(path))
    else:
        advice = f"put a password into a file of its own (database_url_file), then chmod 644 {path}"
        yield note("settings", f"{path}: users cannot read it, and so cannot find their jobs", advice)


def _views(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    """Check that users who may not open the database can see their jobs."""
    folder = settings.views_folder
    if published_for(settings) is not None:
        assert folder is not None
        own = folder / view_name(os.geteuid())
        if own.exists():
            yield ok("your jobs", f"in {own}, without other users' jobs")
        else:
            yield note("your jobs", "the companion has seen none of them yet", not_seen(settings, folder))
        return
    if settings.scope == "own":
        return
    if folder is None:
        yield note("views", "not set, so users cannot see their jobs", "set views, or a spool, in the settings")
        return
    where = folder if folder.exists() else folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=where) as file:
            let_read(file.fileno(), os.geteuid())
        yield ok("views", f"{folder}: each user finds their own jobs there")
    except OSError as error:
        advice = "set views to a folder of this user's, on a file system with POSIX ACLs, visible where users log in"
        yield bad("views", f"{folder}: users cannot see their jobs: {error.strerror}", advice)


def _database(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    if published_for(settings) is not None:
        return
    try:
        place, current = backend_of(settings.database_url).place, migrate.current(settings.database_url)
    except (ConfigError, StoreError) as error:
        yield bad("database", str(error), "give a path that this user can write, or a server that answers")
        return
    if current is None:
        yield note("database", f"{place} does not exist yet", "slurm-ones run creates it")
    elif current != SCHEMA_REVISION:
        yield bad("database", f"schema {current}, not {SCHEMA_REVISION}", "slurm-ones db upgrade")
    else:
        yield ok("database", f"{place}, schema {current}")


def _comments(client: SlurmClient, settings: Settings) -> Iterator[SiteFinding]:
    jobs = client.snapshot().jobs.values()
    mine = [job for job in jobs if not job.ended and (settings.scope != "own" or job.uid == os.geteuid())]
    for job, right in [(job, right) for job in mine if (right := near_miss(job.comment))][:MOST_NEAR]:
        advice = f'to opt in: scontrol update JobId={job.job_id} Comment="{right}"'
        yield note("comments", f"job {job.job_id} almost opts in, and is not resized", advice)


_CHECKS: tuple[Callable[[SlurmClient, Settings], Iterator[SiteFinding]], ...] = (
    _version,
    _permission,
    _gpus,
    _requeue,
    _blocks,
    _plugin,
    _directories,
    _views,
    _database,
    _comments,
)


def examine(client: SlurmClient, settings: Settings) -> list[SiteFinding]:
    """Return all findings about a site. A check that fails gives a finding too."""
    found: list[SiteFinding] = []
    for check in _CHECKS:
        try:
            found += check(client, settings)
        except SlurmError as error:
            found.append(bad(check.__name__.strip("_"), str(error), "see slurmctld's log"))
    return found


@command
def doctor(
    config: ConfigOption = None,
    own: Annotated[bool, typer.Option("--own", help="Check for user mode.")] = False,
    guests: Annotated[bool, typer.Option("--guests", help="Check only what guests need of Slurm.")] = False,
    json: JsonOption = False,
) -> None:
    """Check this site, and say what to change. The exit code is 1 if a check finds something bad."""
    settings = settings_of(config)
    if own:
        settings = settings.model_copy(update={"scope": "own"})
    if guests:
        found = [*examine_guests(read_site(connect(settings), settings), settings)]
    else:
        found = [*_settings_file(config or default_path(), settings), *examine(connect(settings), settings)]
    if json:
        print_json(found)
    else:
        table = grid("", "what", "found", "what to do", overflow="fold")
        marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}
        for f in found:
            table.add_row(marks[f.verdict], safe(f.what), safe(f.found, 500), safe(f.advice, 500))
        console.print(table)
        lines = dict.fromkeys(line for f in found for line in f.lines)
        for title, commands in (("slurm.conf", False), ("commands", True)):
            if some := [line for line in lines if line.startswith("sacctmgr") is commands]:
                typer.echo("\n".join(["", f"# {title}", *some]))
    if any(f.verdict == "bad" for f in found):
        raise typer.Exit(1)
