"""Functions for several commands: settings, store, output, errors, and times."""

from __future__ import annotations

import datetime
import functools
import getpass
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from ones_db import ActionRecord, Store, StoreError, migrate
from ones_db.engine import backend_of, names_password
from slurm_ones.config import SITE_VIEW, ConfigError, Settings, load, view_name
from slurm_ones.plugin.build import PluginError
from slurm_ones.show.columns import to_json
from slurm_ones.show.live import NotSeenYet
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import SlurmError
from slurm_ones.text import plain

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

P = ParamSpec("P")
R = TypeVar("R")


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a standard stream is a terminal. A closed stream is None in Python."""
    return stream is not None and stream.isatty()


# A pipe has no width: wide enough for the tables. A user's ":x:" is no picture.
console = Console(highlight=False, emoji=False, width=None if is_terminal(sys.stdout) else 160)
errors = Console(stderr=True, highlight=False, emoji=False)

_FILES = "~/.config/slurm-ones/config.toml, else /etc/slurm-ones/config.toml"
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help=f"Settings file (default: {_FILES}).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DatabaseOption = Annotated[str, typer.Option("--database", help="Database URL, in place of the one in the settings.")]


def say(line: str, width: int = 10_000) -> None:
    """Print a line, with control characters replaced."""
    console.print(plain(line, width), markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print an error on stderr."""
    for line in text.splitlines():
        errors.print(f"slurm-ones: {plain(line, 2000)}", markup=False, soft_wrap=True)


def bars(*columns: ProgressColumn) -> Progress:
    """Return progress bars on stderr with a description, a bar and these columns. They vanish when they end."""
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=errors, transient=True)


def grid(*titles: str, right: Collection[str] = (), **options: Any) -> Table:
    """Return an empty table with these column titles. Columns named in `right` are right-aligned."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", **options)
    return table


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    Only the first signal counts, since a closing terminal sends several. Under nohup, SIGHUP stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]

    def end(*_: object) -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, handlers[number])


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: an expected error is printed in one line, and the exit code is 2, or 1 for `NotSeenYet`."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (BadInput, ConfigError, NotSeenYet, PluginError, SlurmError, StoreError) as error:
            complain(str(error))
            raise typer.Exit(1 if isinstance(error, NotSeenYet) else 2) from None

    return wrapped


def check_outputs(figures: Path | None, html: Path | None) -> None:
    """Raise `BadInput` if the output files cannot be written, so that a long command fails at its start."""
    for option, path in (("--figures", figures), ("--html", html)):
        if path is not None and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            raise BadInput(f"{option}: {path} cannot be written")
    if html is not None and find_spec("jinja2") is None:
        raise BadInput("--html needs jinja2: pip install 'slurm-ones[report]'")


def job_number(text: str) -> int:
    """Return the job id in a text; for a task such as 4711_3, the array's id."""
    match = re.fullmatch(r"([0-9]{1,15})(?:_[0-9]{1,9})?", text)
    if match is None:
        raise typer.BadParameter(f"{plain(text, 40)!r} is no job id")
    return int(match[1])


def settings_of(config: Path | None, database: str = "") -> Settings:
    """Return the settings in a file. `database`, from the command line, replaces the URL in it."""
    settings = load(config)
    if not database:
        return settings
    return settings.model_copy(update={"database": without_password(database), "database_url_file": None})


def without_password(url: str) -> str:
    """Return the URL. Raises `ConfigError` if it has a password, since any user can see a process's command line."""
    if names_password(url):
        raise ConfigError(
            "a password on the command line can be read by every user of this machine: leave it out of the URL, and "
            "keep it in ~/.pgpass, PGPASSWORD or a service file"
        )
    return url


def reading_store(settings: Settings) -> Store:
    """Open the job database for reading. Without a cluster in the settings it must have only one cluster."""
    return Store.open(settings.database_url, settings.cluster, read_only=True)


def own_store(settings: Settings, cluster: str) -> Store:
    """Open the job database for writing, and create it if it does not exist. Its schema is not upgraded."""
    if migrate.current(settings.database_url) is None:
        if settings.scope == "own" and settings.database_url.startswith("sqlite"):
            backend = backend_of(settings.database_url)
            backend.prepare()
            # Before anything is in it: who has it open could read on. The upgrade says what is wrong.
            with suppress(OSError):
                Path(backend.place).touch(mode=0o600)
                Path(backend.place).chmod(0o600)  # also one that was there, without a table
        migrate.upgrade(settings.database_url)
    return Store.open(settings.database_url, cluster)


def published_for(settings: Settings) -> Path | None:
    """Return the folder with the users' published jobs; None without one, or if this user may read the database."""
    folder, uid = settings.views_folder, os.geteuid()
    if folder is None or uid == 0:
        return None
    try:
        if folder.stat().st_uid == uid:
            return None
    except OSError:
        return None
    url = settings.database
    return None if url and url.startswith("sqlite") and os.access(backend_of(url).place, os.R_OK) else folder


def store_of_reader(settings: Settings, *, named: bool = False) -> Store:
    """Open the job database for reading. For a user who may not read it, open the file published for that user.

    If the command line names the database (`named`), the file is not used. Raises `NotSeenYet` if neither exists.
    """
    folder = None if named else published_for(settings)
    if folder is None:
        return reading_store(settings)
    path = folder / view_name(os.geteuid())
    if path.exists():
        return Store.open(f"sqlite:///{path}", settings.cluster, read_only=True)
    with suppress(ConfigError, StoreError):
        return reading_store(settings)
    raise NotSeenYet(f"your jobs have not been seen yet: {not_seen(settings, folder)}")


def not_seen(settings: Settings, folder: Path) -> str:
    """Return a sentence that says why the folder of published jobs has no file for this user."""
    if not (folder / SITE_VIEW).exists():
        return f"this site's companion has published nothing in {folder} yet: is it running? Ask its operators"
    with Store.open(f"sqlite:///{folder / SITE_VIEW}", settings.cluster, read_only=True) as store:
        every_s = tick_s(settings, store)
    return f"the companion looks every {every_s:.0f} s for jobs whose comment begins with `ones:`"


def tick_s(settings: Settings, store: Store) -> float:
    """Return the seconds between two ticks of the companion, whose settings may differ from this command's."""
    health = store.health()
    return health.interval_s if health is not None else settings.interval_s


def is_view(settings: Settings, store: Store) -> bool:
    """Return True if the store is a file that was published for one user."""
    folder = settings.views_folder
    return folder is not None and Path(store.place).parent == folder


def job_ids() -> list[tuple[str, str]]:
    """Return (id, name) of the jobs that have not ended, for shell completion."""
    try:
        with store_of_reader(settings_of(None)) as store:
            found = store.job_summaries(ended=0)
    # A shell that completes nothing is better than one that prints an error amid a line.
    except Exception:
        return []
    return [(str(one.job_id), plain(one.name, 40)) for one in found]


JOB_ID: dict[str, Any] = {"parser": job_number, "metavar": "JOB", "autocompletion": job_ids}
"""Typer's options for a job id argument: its parser, its name in the help, and its completion."""
JobArgument = Annotated[int, typer.Argument(help="Job id; 4711_3 means job 4711.", **JOB_ID)]


def print_json(value: Any) -> None:
    """Print a value as JSON. Dataclasses become objects."""
    sys.stdout.write(to_json(value, indent=1) + "\n")


def person() -> str:
    """Return the login name of this process's user; after sudo both names, as in `alice as root`."""
    user, before = getpass.getuser(), os.environ.get("SUDO_USER", "")
    return f"{before} as {user}" if before and before != user else user


def record_action(store: Store, action: str, detail: str = "") -> None:
    """Record in the database that this process's user did `action`."""
    store.add_action(ActionRecord(time.time(), person(), action, detail))


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", re.ASCII)
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,9})?", re.ASCII)
TIMES = "a date, a date and time, how long ago (7d, 36h), or Unix seconds"


def length(text: str, what: str = "") -> float:
    """Return the seconds in a duration such as 36h, 7d or 2w. Raises `BadInput`; its message begins with `what`."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise _bad(text, what, "is not a duration: write a number and s, m, h, d or w, such as 7d")
    return float(found[1]) * UNITS[found[2]]


def moment(text: str, what: str = "", now: float | None = None) -> float:
    """Return a time in Unix seconds. Raises `BadInput`; its message begins with `what`.

    The text may be a date such as 2026-11-22 or 2026-11-22T18:00, in local time unless it names a time zone. It may
    also be Unix seconds, or an age such as 7d, counted back from `now`.
    """
    word = text.strip()
    if _LENGTH.fullmatch(word):
        return (time.time() if now is None else now) - length(word)
    if _SECONDS.fullmatch(word):
        return float(word)
    try:
        # Before 3.11 Python does not know Z.
        found = datetime.datetime.fromisoformat(re.sub("Z$", "+00:00", word)).timestamp()
    except (ValueError, OverflowError, OSError):
        found = math.nan
    if math.isfinite(found):
        return found
    forms = "a date such as 2026-11-22 or 2026-11-22T18:00, how long ago such as 7d, or Unix seconds"
    raise _bad(text, what, f"is no time: write {forms}")


def span(since: str, until: str) -> tuple[float, float]:
    """Return begin and end of a time span in the past; without `until` it ends now. Raises `BadInput`."""
    now = time.time()
    began, ended = moment(since, "--since", now), moment(until, "--until", now) if until else now
    if not 0 <= began < ended <= now:
        raise BadInput(f"--since: {since} is not before {until or 'now'}, or is not in the past")
    return began, ended


def _bad(text: str, what: str, why: str) -> BadInput:
    return BadInput(f"{what}: {plain(text, 40)!r} {why}" if what else f"{plain(text, 40)!r} {why}")
