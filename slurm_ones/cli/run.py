"""Command `slurm-ones run`: the companion daemon."""

from __future__ import annotations

import faulthandler
import logging
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ones_db import Store, StoreBusy, StoreError, StoreLost
from ones_db.leader import LeaderLock
from slurm_ones.cli.common import (
    ConfigOption,
    DatabaseOption,
    command,
    complain,
    errors,
    own_store,
    record_action,
    say,
    settings_of,
)
from slurm_ones.companion import Companion, Tick, policy_of
from slurm_ones.config import ConfigError, ReloadableSettings, Settings
from slurm_ones.service import logs
from slurm_ones.service.daemon import Daemon, SignalStop
from slurm_ones.service.file_child import FileChild
from slurm_ones.service.health import Health, Notifier, summary
from slurm_ones.service.leadership import Leadership
from slurm_ones.service.notify import CLOSE_S, Notifications
from slurm_ones.service.publisher import Publisher
from slurm_ones.service.wake import Waking
from slurm_ones.slurm.client import SlurmClient, SlurmError, Unreachable
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.connect import check_client, connect
from slurm_ones.slurm.parse import mean_rpc_s
from slurm_ones.untrusted_files import run_by

if TYPE_CHECKING:
    from slurm_ones.service.metrics import Metrics

T = TypeVar("T")
log = logging.getLogger(__name__)

REFUSED = 78
"""Exit code if the settings are refused (EX_CONFIG); systemd then does not restart the service."""
JITTER = 0.05
"""Largest random change of a wait, as a share of it. It keeps companions from querying Slurm at the same time."""
RETRY_S = 30.0
"""Seconds between a service's attempts to reach controller or database."""
SPARE_S = 30.0
"""Seconds beyond `leave_s` in which a stopping companion may end a running command and its database work. After that it
prints its stacks and exits with code 1."""
STDERR = 2


def _read_settings(config: Path | None, database: str, act: bool | None, own: bool) -> Settings:
    """Return the settings in the file, changed by the command line. Raises `ConfigError`."""
    settings = settings_of(config, database)
    changes: dict[str, Any] = {}
    if act is not None:
        changes["mode"] = "act" if act else "advise"
    if own:
        changes["scope"] = "own"
    settings = settings.model_copy(update=changes)
    # A standby, or a reload, must not find a bad policy or client, or a secret that others may read, only when needed.
    policy_of(settings)
    check_client(settings)
    _ = settings.database_url, [one.address for one in settings.notify.values()]
    return settings


EAGER_S = 30.0
SLOW_RPC_S = 1.0
"""Mean RPC time, in seconds, above which slurmctld counts as busy."""


def paced(settings: Settings, client: SlurmClient) -> Settings:
    """Return the settings. In user mode a tick comes every `EAGER_S` seconds, unless `tick_s` is set, or slurmctld is
    busy or limits the rate of RPCs."""
    if settings.scope != "own" or settings.tick_s is not None:
        return settings
    try:
        limits = "rl_enable" in client.config().get("SlurmctldParameters", "").lower()
        if limits or mean_rpc_s(CommandClient(timeout_s=settings.timeout_s).run(["sdiag"])) > SLOW_RPC_S:
            return settings
    except SlurmError:
        return settings
    return settings.model_copy(update={"tick_s": EAGER_S})


def jitter() -> float:
    return random.uniform(1 - JITTER, 1 + JITTER)


def _metrics(settings: Settings) -> Metrics | None:
    if settings.metrics_port is None:
        return None
    try:
        from slurm_ones.service.metrics import serve
    except ImportError:
        raise ConfigError("metrics_port: prometheus-client is not installed: pip install prometheus-client") from None
    return serve(settings.metrics_address, settings.metrics_port)


class _Service:
    """Process of the companion: its signals, reloads, and retries while controller or database does not answer."""

    def __init__(self, notifier: Notifier, read: Callable[[], Settings], last: logs.LastErrorHandler) -> None:
        self.notifier = notifier
        self.current = ReloadableSettings(read)
        self.health = Health(self.notifier, last, metrics=_metrics(self.current.settings))
        self.stop = SignalStop()
        self.publisher: Publisher | None = None
        self.notifications = Notifications({}, "")
        self._reload_asked = False

    def publish(self, cluster: str, settings: Settings) -> None:
        """Start to publish a file for each user, if the settings name a folder for them."""
        self.publish_no_more()
        if settings.views_folder is not None:
            self.publisher = Publisher(settings.database_url, cluster, settings.views_folder)
            self.publisher.start()

    def notify(self, cluster: str, settings: Settings) -> None:
        self.notifications.close()
        self.notifications = Notifications(settings.notify, cluster, settings.mode)

    def publish_no_more(self) -> None:
        """Publish the users' files one last time, then stop publishing."""
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = None

    def handle_signals(self) -> None:
        """Install handlers for SIGINT, SIGTERM and SIGHUP. They take no lock, since the main thread may hold it."""
        self.stop.wake_at_signals()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        # A terminal that is closed is gone; a service has none.
        signal.signal(signal.SIGHUP, self._stop if errors.is_terminal else self._ask_reload)

    def _ask_reload(self, *_: object) -> None:
        self._reload_asked = True

    def _stop(self, *_: object) -> None:
        settings = self.current.settings
        seconds = settings.resize.leave_s + 2 * settings.timeout_s + SPARE_S
        if not self.stop.is_set():
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
        self.stop.set()
        self.notifier.stopping("stops, and releases what it holds", seconds)

    def retried(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. A service repeats it until controller and database answer."""
        while True:
            try:
                return call()
            except (Unreachable, StoreBusy, StoreLost) as error:
                if not self.notifier.listens:
                    raise
                log.error("%s; starting again in %.0f s", error, RETRY_S)
                self.notifier.status(f"waits: {error}")
                self._wait(RETRY_S * jitter())
                if self.stop.is_set():
                    raise typer.Exit from None

    def _wait(self, seconds: float) -> None:
        while seconds > 0 and not self.stop.is_set():
            self.notifier.alive()
            self.stop.wait(min(seconds, 10.0))
            seconds -= 10.0

    def watchdog_ping(self, store: Store, daemon: Daemon) -> None:
        """Ping the watchdog, and reload the settings if a signal requested it."""
        if self._reload_asked:
            self._reload_asked = False
            self._reload(store, daemon)
        self.health.watchdog_ping()

    def _reload(self, store: Store, daemon: Daemon) -> None:
        self.notifier.reloading()
        try:
            changed = self.current.reload()
        except ConfigError as error:
            detail = "; ".join(str(error).splitlines())
            log.error("new settings refused, the old ones stay in force: %s", detail)
            _record(store, "reload refused", detail)
        else:
            detail = f"changed: {', '.join(changed)}" if changed else "nothing changed"
            log.warning("settings read again; %s", detail)
            _record(store, "reload", detail)
            if changed:
                daemon.reload()
        self.notifier.ready("settings read again")


def _record(store: Store, action: str, detail: str = "") -> None:
    try:
        record_action(store, action, detail)
    except StoreError as error:
        log.warning("%s: not recorded: %s", action, error)


@command
def run(
    config: ConfigOption = None,
    database: DatabaseOption = "",
    act: Annotated[
        bool | None, typer.Option("--act/--advise", help="Resize jobs, or only print commands (default: settings).")
    ] = None,
    own: Annotated[bool, typer.Option("--own", help="User mode: your own jobs only.")] = False,
    ticks: Annotated[
        int, typer.Option(min=0, help="For cron: end after N ticks, once no resize needs the companion; 0: never.")
    ] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each step of each resize.")] = False,
) -> None:
    """Run the companion until SIGINT or SIGTERM: observe, learn, decide and, with --act, resize.

    SIGHUP reloads the settings. If the settings are refused at the start of a service, the exit code is 78.
    """
    last = logs.begin(errors, verbose=verbose)
    notifier = Notifier()
    try:
        service = _Service(notifier, lambda: _read_settings(config, database, act, own), last)
    except ConfigError as error:
        if not notifier.listens:
            raise
        complain(str(error))
        raise typer.Exit(REFUSED) from None
    service.handle_signals()
    if service.notifier.listens:
        # Killed by the watchdog, it prints in which calls it hung.
        faulthandler.enable()
    settings = service.current.settings
    client = connect(settings, notifier.alive)
    settings = paced(settings, client)
    service.notifier.ready("starts")
    cluster = settings.cluster or service.retried(client.config).get("ClusterName", "cluster")
    store = service.retried(lambda: own_store(settings, cluster))
    lock = service.retried(lambda: LeaderLock(settings.database_url, cluster))

    def on_leader(line: str) -> None:
        say(f"companion {lock.holder} {line}")
        service.notifier.status(line)

    lead = Leadership(lock, settings.takeover_s or settings.interval_s, say=on_leader)

    def make() -> Companion:
        now = paced(service.current.settings, client)
        mine = Store.open(now.database_url, cluster, term=lead.term)
        service.health.leads(mine, now)
        service.publish(cluster, now)
        service.notify(cluster, now)
        waking.use(now)
        # One tick may wait for many answers of a slow controller: each feeds the watchdog.
        return Companion(now, connect(now, notifier.alive), mine, say=say, check=lead.check)

    say(
        f"cluster {cluster} through {client.name}, policy {settings.policy}, mode {settings.mode}, "
        f"a tick every {settings.interval_s:.0f} s; Ctrl-C stops"
    )
    _record(store, f"run --{settings.mode}", f"policy {settings.policy}, scope {settings.scope}, through {client.name}")

    def on_tick(tick: Tick) -> None:
        # systemd shows the last one; the journal needs only those that did something.
        if verbose or tick.begun or not service.notifier.listens:
            say(summary(tick))
        service.health.ticked(tick)
        service.notifications.ticked(tick)
        if service.publisher is not None:
            service.publisher.ticked()

    files, waking = FileChild().start(), Waking().start()
    with lock, closing(files), closing(waking), run_by(files.run):
        daemon = Daemon(
            make,
            lead=lead,
            watchdog_ping=lambda: service.watchdog_ping(store, daemon),
            jitter=jitter,
            waking=waking,
        )
        daemon.run(service.stop, on_tick, ticks=ticks)
    service.publish_no_more()
    service.notifications.close(CLOSE_S)
    _record(store, "run ends")
    leader, open_resizes = store.leader(), store.open_resizes()
    if open_resizes and not (leader and leader.holder):
        say(f"stopped with {len(open_resizes)} resizes under way; the next start finishes them")
