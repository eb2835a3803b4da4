"""`slurm-ones status`: whether the companion does its work, for people and for monitoring."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ones_db import HealthRecord, LeaderRecord, ResizeRecord, SchemaError, Store, StoreError, migrate
from ones_db.engine import backend_of
from ones_wrapper.protocol import SPOOL_FILE
from slurm_ones.cli.common import (
    ConfigOption,
    JsonOption,
    command,
    print_json,
    published_for,
    reading_store,
    say,
    settings_of,
)  # fmt: skip
from slurm_ones.config import SITE_VIEW, ConfigError, Settings, view_name
from slurm_ones.show.live import LATE
from slurm_ones.show.why import slow_nodes_of
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.connect import connect
from slurm_ones.text import changed, planned, seconds

if TYPE_CHECKING:
    from slurm_ones.learn.nodes import SlowNode

RECENT_S = 3600.0
"""How long an error is worth telling."""
SEVERAL = 2
"""So many jobs with the same fault make it one of the site."""


@dataclass(frozen=True)
class Resizing:
    """A resize under way."""

    job_id: int
    change: str
    state: str
    since: float
    """Unix seconds."""


@dataclass(frozen=True)
class Status:
    """What is known of the companion of a cluster. Times are Unix seconds, None where there is none."""

    healthy: bool
    problems: tuple[str, ...]
    """A sentence each; none where it is healthy."""
    now: float
    cluster: str = ""
    database: str = ""
    schema: str | None = None
    slurm: str = ""
    """Its release, where it was asked and answers."""
    leader: LeaderRecord | None = None
    last: HealthRecord | None = None
    resizes: tuple[Resizing, ...] = ()
    strategies: Mapping[str, int] = field(default_factory=dict)
    """How many jobs train by each training strategy, of those that have one."""
    slow_nodes: tuple[SlowNode, ...] = ()
    """Those that jobs showed to be slow; a user who may not read the database is told of none."""


def examine(settings: Settings, *, ask_slurm: bool = True, clock: Callable[[], float] = time.time) -> Status:
    """Look at the database, and at Slurm where asked; raises nothing of theirs."""
    problems: list[str] = []
    slurm = _slurm(settings, problems) if ask_slurm else ""
    now = clock()
    folder = published_for(settings)
    if folder is not None:
        return _published(settings, folder, now, slurm, problems)
    place, schema = "", None
    try:
        place = backend_of(settings.database_url).place
        schema = migrate.current(settings.database_url)
        with reading_store(settings) as store:
            return _of(store, now, place, schema, slurm, problems, store.open_resizes())
    except (ConfigError, StoreError, SchemaError) as error:
        problems.append(f"database: {error}")
    return Status(False, tuple(problems), now, settings.cluster, place, schema, slurm)


def _published(settings: Settings, folder: Path, now: float, slurm: str, problems: list[str]) -> Status:
    """By what the companion published: how it is, for everybody, and this user's own resizes."""
    site, own = folder / SITE_VIEW, folder / view_name(os.geteuid())
    try:
        if not site.exists():
            raise StoreError(f"{site}: the companion has published nothing yet: is it running?")
        resizes: list[ResizeRecord] = []
        if own.exists():
            with Store.open(f"sqlite:///{own}", settings.cluster, read_only=True) as mine:
                resizes = mine.open_resizes()
        with Store.open(f"sqlite:///{site}", settings.cluster, read_only=True) as store:
            return _of(store, now, str(site), migrate.current(f"sqlite:///{site}"), slurm, problems, resizes)
    except (StoreError, SchemaError) as error:
        problems.append(str(error))
    return Status(False, tuple(problems), now, settings.cluster, str(site), None, slurm)


def _slurm(settings: Settings, problems: list[str]) -> str:
    try:
        client = connect(settings)
        client.config()
        return "{:02d}.{:02d}".format(*client.version())
    except SlurmError as error:
        problems.append(f"Slurm: {error}")
        return ""


def _of(
    store: Store,
    now: float,
    place: str,
    schema: str | None,
    slurm: str,
    problems: list[str],
    open_resizes: Sequence[ResizeRecord],
) -> Status:
    leader, last = store.leader(), store.health()
    resizes = tuple(
        Resizing(r.job_id, ", ".join(filter(None, (changed(r), planned(r)))), r.state, r.started) for r in open_resizes
    )
    problems += _of_companion(now, leader, last)
    problems += _of_site(store)
    found = Status(not problems, tuple(problems), now, store.cluster, place, schema, slurm, leader, last, resizes)
    return replace(found, strategies=store.strategies(), slow_nodes=tuple(slow_nodes_of(store, now).values()))


def _of_site(store: Store) -> list[str]:
    """What jobs are refused for that is not one job's fault."""
    alive = store.jobs(sorted(store.live_jobs())).values()
    refusals = [job.refusal for job in alive if job.refusal.code == "spool_not_read"]
    if len(refusals) < SEVERAL:
        return []
    spool = dict(refusals[0].arguments)["spool"]
    return [
        f"{len(refusals)} jobs do not read the spool, so that no order reaches them: write {spool} to {SPOOL_FILE} on "
        "the compute nodes"
    ]


def _of_companion(now: float, leader: LeaderRecord | None, last: HealthRecord | None) -> list[str]:
    if leader is None or last is None:
        return ["no companion has ever led here"]
    if not leader.holder:
        return [f"no companion runs: the last one stopped {_ago(now, leader.beat)}"]
    late_s = LATE * last.interval_s
    problems = []
    if now - leader.beat > late_s:
        problems.append(f"no companion runs: {leader.holder} was last heard of {_ago(now, leader.beat)}")
    elif last.tick_time is None or last.tick_time < leader.since:
        # None of its own yet.
        if now - leader.since > late_s:
            problems.append(f"no tick yet, though {leader.holder} leads since {_time(leader.since)}")
    elif now - last.tick_time > late_s:
        problems.append(f"the last tick was {_ago(now, last.tick_time)}, and should come every {last.interval_s:.0f} s")
    if problems and last.error_time is not None and now - last.error_time < RECENT_S:
        problems.append(f"last error, {_ago(now, last.error_time)}: {last.error}")
    return problems


def _ago(now: float, then: float) -> str:
    return f"{seconds(max(now - then, 0.0))} ago"


def _time(when: float) -> str:
    return datetime.datetime.fromtimestamp(when).astimezone().isoformat(" ", "seconds")


def lines(status: Status, *, asked: bool) -> list[str]:
    """The status as lines of text."""
    last, leader = status.last, status.leader
    shown = ["healthy" if status.healthy else "NOT HEALTHY", *(f"  {problem}" for problem in status.problems)]
    shown.append(
        f"database   {status.database or '?'}, schema {status.schema or 'none'}, cluster {status.cluster or '?'}"
    )
    if asked:
        shown.append(f"Slurm      {status.slurm or 'does not answer'}")
    if leader is not None and leader.holder:
        heard = _ago(status.now, leader.beat)
        shown.append(
            f"companion  {leader.holder} leads since {_time(leader.since)} (term {leader.term}), heard of {heard}"
        )
    if last is not None and last.tick_time is not None:
        shown.append(
            f"last tick  {_ago(status.now, last.tick_time)}, took {last.tick_s or 0:.2f} s, mode {last.mode}: "
            f"{last.running} elastic jobs run on {last.gpus} GPUs, {last.waiting} wait"
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
        shown.append(
            f"resize     job {resize.job_id} {resize.change}, {resize.state}, begun {_ago(status.now, resize.since)}"
        )
    if last is not None and last.error_time is not None:
        shown.append(f"last error {_ago(status.now, last.error_time)}: {last.error}")
    return shown


@command
def status(
    config: ConfigOption = None,
    json: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm/--no-slurm", help="Also check whether Slurm answers.")] = True,
) -> None:
    """Show whether the companion works. Exit code 0 when it does, 1 when not."""
    found = examine(settings_of(config), ask_slurm=slurm)
    if json:
        # Records are tuples, which JSON would show without their names.
        records = {"leader": found.leader, "last": found.last}
        named = {name: record._asdict() if record is not None else None for name, record in records.items()}
        print_json({**asdict(found), **named})
    else:
        for line in lines(found, asked=slurm):
            say(line, 2000)
    if not found.healthy:
        raise typer.Exit(1)
