"""Command `slurm-ones status`: health of the companion, for people and for monitoring."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ones_db import HealthRecord, LeaderRecord, ResizeRecord, Store, StoreError, migrate
from ones_db.engine import backend_of
from ones_wrapper.protocol import SPOOL_FILE
from slurm_ones.cli.common import ConfigOption, JsonOption, command, print_json, published_for, say, settings_of
from slurm_ones.config import SITE_VIEW, ConfigError, Settings, view_name
from slurm_ones.show.columns import RESIZE, ShownResize, record
from slurm_ones.show.live import LATE
from slurm_ones.show.why import slow_nodes_of
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.connect import connect
from slurm_ones.text import changed, clock, planned, seconds

if TYPE_CHECKING:
    from slurm_ones.learn.nodes import SlowNode

RECENT_S = 3600.0
"""Age, in seconds, up to which the last error is shown."""
SEVERAL = 2
"""Fewest jobs with the same fault for which the fault is reported as the site's."""

NEVER = (
    "no companion has run here yet: slurm-ones run --own --act starts your own, and an administrator starts one for "
    "all users"
)


@dataclass(frozen=True)
class Status:
    """State of a cluster's companion. Times are Unix seconds, or None if unknown."""

    healthy: bool
    problems: tuple[str, ...]
    """Sentences that say what is wrong; empty if the companion is healthy."""
    now: float
    cluster: str = ""
    database: str = ""
    schema: str | None = None
    slurm: str = ""
    """Release of Slurm; empty if Slurm was not asked or does not answer."""
    leader: LeaderRecord | None = None
    last: HealthRecord | None = None
    resizes: tuple[ResizeRecord, ...] = ()
    """Open resizes; for users who may not read the database, only those of their own jobs."""
    strategies: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs that have not ended, by training strategy."""
    slow_nodes: tuple[SlowNode, ...] = ()
    """Nodes on which jobs measured a lower speed than on other nodes; empty for users who may not read the database."""


def examine(settings: Settings, *, ask_slurm: bool = True, now: float | None = None) -> Status:
    """Return the state from the database, or from this user's published file; with `ask_slurm`, also from Slurm.

    Errors of the database and of Slurm are not raised, but returned as problems.
    """
    problems: list[str] = []
    slurm = _slurm(settings, problems) if ask_slurm else ""
    now, folder = time.time() if now is None else now, published_for(settings)
    place, schema = "", None
    try:
        url = settings.database_url if folder is None else f"sqlite:///{folder / SITE_VIEW}"
        place = backend_of(url).place
        if folder is not None and not (folder / SITE_VIEW).exists():
            raise StoreError(f"{place}: the companion has published nothing yet: is it running?")
        schema = migrate.current(url)
        if schema is None:
            problems.append(NEVER)
            return Status(False, tuple(problems), now, settings.cluster, place, schema, slurm)
        with Store.open(url, settings.cluster, read_only=True) as store:
            resizes = store.open_resizes() if folder is None else _own_resizes(settings, folder)
            leader, last = store.leader(), store.health()
            problems += [*of_companion(now, leader, last), *_of_site(store)]
            return Status(
                not problems, tuple(problems), now, store.cluster, place, schema, slurm, leader, last, tuple(resizes),
                store.strategies(), tuple(slow_nodes_of(store, now).values()),
            )  # fmt: skip
    except (ConfigError, StoreError) as error:
        problems.append(f"database: {error}" if folder is None else str(error))
    return Status(False, tuple(problems), now, settings.cluster, place, schema, slurm)


def _own_resizes(settings: Settings, folder: Path) -> list[ResizeRecord]:
    own = folder / view_name(os.geteuid())
    if not own.exists():
        return []
    with Store.open(f"sqlite:///{own}", settings.cluster, read_only=True) as mine:
        return mine.open_resizes()


def _slurm(settings: Settings, problems: list[str]) -> str:
    try:
        client = connect(settings)
        client.config()
        return "{:02d}.{:02d}".format(*client.version())
    except SlurmError as error:
        problems.append(f"Slurm: {error}")
        return ""


def _of_site(store: Store) -> list[str]:
    """Return sentences about faults of the site that keep jobs from being resized."""
    alive = store.jobs(sorted(store.live_jobs())).values()
    left = [job.refusal for job in alive if job.refusal.code == "files_silent"]
    counts = sorted(Counter(str(dict(one.arguments)["problem"]) for one in left).items())
    problems = [f"{what}: {count} job{'s' * (count > 1)} left alone until it does" for what, count in counts]
    refusals = [job.refusal for job in alive if job.refusal.code == "spool_not_read"]
    if len(refusals) < SEVERAL:
        return problems
    spool = dict(refusals[0].arguments)["spool"]
    return [
        *problems,
        f"{len(refusals)} jobs do not read the spool, so that no order reaches them: write {spool} to {SPOOL_FILE} on "
        "the compute nodes",
    ]


def of_companion(now: float, leader: LeaderRecord | None, last: HealthRecord | None) -> list[str]:
    """Return sentences about what keeps the companion from working."""
    if leader is None or last is None:
        return [NEVER]
    if not leader.holder:
        return [f"no companion runs: the last one stopped {_ago(now, leader.beat)}"]
    late_s = LATE * last.interval_s
    problems = []
    if now - leader.beat > late_s:
        problems.append(f"no companion runs: {leader.holder} sent its last heartbeat {_ago(now, leader.beat)}")
    elif last.tick_time is None or last.tick_time < leader.since:
        # None of its own yet.
        if now - leader.since > late_s:
            problems.append(f"no tick yet, though {leader.holder} leads since {clock(leader.since)}")
    elif now - last.tick_time > late_s:
        problems.append(f"the last tick was {_ago(now, last.tick_time)}, and should come every {last.interval_s:.0f} s")
    if problems and last.error_time is not None and now - last.error_time < RECENT_S:
        problems.append(f"last error, {_ago(now, last.error_time)}: {last.error}")
    return problems


def _ago(now: float, then: float) -> str:
    return f"{seconds(max(now - then, 0.0))} ago"


def lines(status: Status, *, asked: bool) -> list[str]:
    """Return the status as lines of text."""
    last, leader = status.last, status.leader
    shown = ["healthy" if status.healthy else "NOT HEALTHY", *(f"  {problem}" for problem in status.problems)]
    shown = [NEVER] if status.problems == (NEVER,) else shown
    known = f"schema {status.schema or 'none'}, cluster {status.cluster or '?'}"
    shown.append(f"database   {status.database or '?'}, {known}")
    if asked:
        shown.append(f"Slurm      {status.slurm or 'does not answer'}")
    if leader is not None and leader.holder:
        beat = f"last heartbeat {_ago(status.now, leader.beat)}"
        shown.append(f"companion  {leader.holder} leads since {clock(leader.since)} (term {leader.term}), {beat}")
    if last is not None and last.tick_time is not None:
        shown.append(
            f"last tick  {_ago(status.now, last.tick_time)}, took {last.tick_s or 0:.2f} s, mode {last.mode}: "
            f"elastic jobs running: {last.running} on {last.gpus} GPU{'s' * (last.gpus != 1)}, waiting: {last.waiting}"
        )
    if status.strategies:
        jobs = (f"{name} ({count} job{'s' * (count != 1)})" for name, count in status.strategies.items())
        shown.append(f"strategies {', '.join(jobs)}")
    for node in status.slow_nodes:
        shown.append(
            f"slow node  {node.name}: about {node.factor:.2f} of the speed of others, as {node.runs} runs of "
            f"{node.owners} owner{'s' * (node.owners != 1)} showed"
        )
    for resize in status.resizes:
        change = ", ".join(filter(None, (changed(resize), planned(resize), resize.stage)))
        shown.append(f"resize     job {resize.job_id} {change}, begun {_ago(status.now, resize.started)}")
    if last is not None and last.error_time is not None:
        shown.append(f"last error {_ago(status.now, last.error_time)}: {last.error}")
    return shown


@command
def status(
    config: ConfigOption = None,
    json: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm/--no-slurm", help="Also check if Slurm answers.")] = True,
) -> None:
    """Show if the companion works. The exit code is 0 if it does, and 1 if not."""
    found = examine(settings_of(config), ask_slurm=slurm)
    if json:
        # Records are tuples, which JSON would show without their names.
        leader, last = (one._asdict() if one is not None else None for one in (found.leader, found.last))
        resizes = [record(RESIZE, ShownResize(one)) for one in found.resizes]
        print_json({**vars(found), "leader": leader, "last": last, "resizes": resizes})
    else:
        for line in lines(found, asked=slurm):
            say(line, 2000)
    if not found.healthy:
        raise typer.Exit(1)
