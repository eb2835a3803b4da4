"""`slurm-ones run`: the companion daemon."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from ones_db import Store, migrate
from slurm_ones.cli.acted import note
from slurm_ones.cli.common import ConfigOption, DatabaseOption, command, console, errors, settings_of
from slurm_ones.companion import Companion, Tick
from slurm_ones.config import Settings
from slurm_ones.daemon import Daemon
from slurm_ones.report.text import plain
from slurm_ones.slurm.connect import connect


def _log(verbose: bool) -> None:
    if errors.is_terminal:
        handler: logging.Handler = RichHandler(console=errors, show_path=False, markup=False)
        layout = "%(message)s"
    else:
        handler, layout = logging.StreamHandler(), "%(asctime)s %(levelname)s %(name)s: %(message)s"
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format=layout, handlers=[handler])
    # alembic speaks at INFO of every start; that is for those who migrate.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _line(tick: Tick) -> str:
    jobs = tick.seen.elastic.values()
    running = [e for e in jobs if e.job.running]
    begun = ", ".join(f"job {c.job_id} {c}" for c in tick.begun)
    return (
        f"{len(running)} elastic jobs run on {sum(e.shape.gpus for e in running)} GPUs, {len(jobs) - len(running)} wait"
        f" ({tick.seconds:.2f} s)" + (f"; begun: {begun}" if begun else "")
    )


def _store(settings: Settings, cluster: str) -> Store:
    # A first start makes the database; one of another schema is left to `db upgrade`, which keeps a copy.
    if migrate.current(settings.database_url) is None:
        migrate.upgrade(settings.database_url)
    return Store.open(settings.database_url, cluster)


@command
def run(
    config: ConfigOption = None,
    database: DatabaseOption = "",
    act: Annotated[
        bool | None,
        typer.Option("--act/--advise", help="Resize jobs, or only print the commands that would."),
    ] = None,
    own: Annotated[bool, typer.Option("--own", help="User mode: look after your own jobs alone.")] = False,
    ticks: Annotated[int, typer.Option(help="Stop after so many ticks; 0 goes on until stopped.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each step of each resize.")] = False,
) -> None:
    """Run the companion: observe, learn, decide and (with --act) resize, until SIGINT or SIGTERM."""
    settings = settings_of(config, database)
    changes: dict[str, Any] = {}
    if act is not None:
        changes["mode"] = "act" if act else "advise"
    if own:
        changes["scope"] = "own"
    settings = settings.model_copy(update=changes)
    _log(verbose)
    client = connect(settings)
    cluster = settings.cluster or client.config().get("ClusterName", "cluster")
    store = _store(settings, cluster)
    companion = Companion(settings, client, store, say=lambda line: console.print(line, markup=False, soft_wrap=True))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console.print(
        f"cluster {plain(cluster)} through {client.name}, policy {settings.policy}, mode {settings.mode}, "
        f"a tick every {settings.interval_s:.0f} s; Ctrl-C stops",
        markup=False,
        soft_wrap=True,
    )
    note(store, f"run --{settings.mode}", f"policy {settings.policy}, scope {settings.scope}, through {client.name}")
    left = ticks

    def on_tick(tick: Tick) -> None:
        nonlocal left
        console.print(_line(tick), markup=False, soft_wrap=True)
        left -= 1
        if ticks and left == 0:
            stop.set()

    Daemon(companion).run(stop, on_tick)
    note(store, "run ends")
    open_resizes = store.open_resizes()
    if open_resizes:
        console.print(f"stopped with {len(open_resizes)} resizes under way; the next start finishes them")
