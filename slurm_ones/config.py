"""Settings of the companion: one typed object, read from a TOML file and reloadable at run time.

Every error names the file, the key, the given value and the accepted ones.
"""

from __future__ import annotations

import difflib
import getpass
import ipaddress
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from ones_db.engine import names_password

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FIXED_KEYS = ("cluster", "database", "database_url_file", "client", "takeover_s", "metrics_port", "metrics_address")
"""Settings that cannot change at run time: the leader's lock, the store and open connections depend on them."""


SITE_VIEW = "site.sqlite"
"""Name of the file in the views folder with the companion's state, readable by everybody."""


def view_name(uid: int) -> str:
    """Name of the file in the views folder with one user's jobs."""
    return f"{uid}.sqlite"


class ConfigError(Exception):
    """The settings file is missing, unreadable or has an invalid value."""


ADDRESS = re.compile(r"(https?://[\w.-]+(:\d{1,5})?/[\w./~=&?+-]*|smtp://[\w.-]+(:\d{1,5})?)", re.ASCII)
"""Accepted addresses for messages, restricted so that no parser can find another host in one."""
YEAR_S = 365 * 86400.0
"""Largest time that a setting accepts, s; sums with clock times then remain valid dates."""
Seconds = Annotated[float, Field(le=YEAR_S)]
Days = Annotated[float, Field(le=100 * 365)]


def _absolute(path: Path) -> Path:
    # Each process would find another file; a stop file that the companion does not find stops nothing.
    if not path.is_absolute():
        raise ValueError("write the whole path, from /")
    return path


File = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]


class _Section(BaseModel):
    # Strict: "no" is no truth value and true no number of seconds, though pydantic would take both.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class ResizeSettings(_Section):
    """Limits on what may be done to a job. Times in seconds."""

    dwell_s: Seconds | None = Field(None, ge=0)
    """least time between two resizes of a job, and after its start; none: four times as long as a resize interrupts
    it, and at most half an hour"""
    blocks_dwell_s: Seconds = Field(0, ge=0)
    """the same for a job of blocks that runs, but for its start. It is at least 20 times as long as a change of its
    blocks interrupts it, and at most dwell_s, or half an hour without one"""
    max_wait_s: Seconds = Field(300, gt=0)
    """a resized job that waits longer gets its old shape back"""
    blocks_wait_s: Seconds = Field(60, gt=0)
    """a block that waits longer before it joins is taken back"""
    drain_timeout_s: Seconds = Field(300, gt=0)
    """longest time from an order to drain to its checkpoint; then the job is left alone"""
    start_timeout_s: Seconds = Field(300, gt=0)
    """longest time from a run's start to its first report"""
    max_open: int = Field(16, ge=1)
    """resizes under way at once that requeue a job, or change a waiting one"""
    max_open_blocks: int = Field(32, ge=1)
    """changes of blocks under way at once"""
    start_now: bool = True
    """skip Slurm's delay after a requeue (StartTime=now)"""
    settle_s: Seconds = Field(2.0, ge=0)
    """with start_now, a requeued job is released this long after its last run ended, since Slurm may still be ending
    that run"""
    advance_s: Seconds = Field(1.0, gt=0)
    """how often resizes under way are advanced between ticks"""
    leave_s: Seconds = Field(60, ge=0)
    """longest time that a companion takes to release the jobs in its hold when it is stopped"""
    shrink: bool = True
    """running jobs may be shrunk so that others can start or grow"""
    preempt: bool = True
    """running jobs may be taken to zero GPUs if a policy asks for it; the default policy never does"""
    preempted_s: Seconds = Field(60, ge=0)
    """a job does not grow for this long after Slurm preempted a block of it. Each time in a row doubles it, up to half
    an hour"""
    park_lease_s: Seconds = Field(900, gt=0)
    """length of a deferral: a deferred job starts by itself this long after the companion last renewed it; at least
    three ticks"""


Count = Annotated[int, Field(ge=0)]


class LimitSettings(_Section):
    """Limits that protect people from each other's elastic jobs. They bound only what the companion does: Slurm decides
    on what a user asked it for."""

    share: float = Field(1.0, gt=0, le=1)
    """share of a partition's GPUs up to which its elastic jobs may grow together"""
    gpus_per_user: Count | None = None
    """GPUs up to which the elastic jobs of one user may grow together; none: no cap"""
    gpus_per_account: Count | None = None
    """the same for one account"""
    gpus_of_user: dict[str, Count] = {}
    """caps of single users, in place of gpus_per_user"""
    gpus_of_account: dict[str, Count] = {}
    """caps of single accounts, in place of gpus_per_account"""
    growth_cost: float = Field(1.1, ge=1)
    """most GPU-hours of a job that grows, in multiples of those at the size asked for, if growth is charged. `cost=` in
    a job's comment takes its place"""
    resizes_per_hour: Count | None = None
    """most interrupting resizes of one job begun within an hour; none: as many as the dwell time allows"""
    resizes_per_job: Count | None = None
    """the same over the job's life; none: no limit"""
    near_end_s: Seconds | None = Field(None, ge=0)
    """a job that is expected to end within this many seconds is not resized. Without a value: twice as long as a resize
    would interrupt it, and at most half an hour. Of a job of blocks: as long as others take to join"""
    near_limit_s: Seconds = Field(300, ge=0)
    """a job that reaches its time limit within this many seconds is not resized"""
    idle_use: float = Field(0, ge=0, le=1)
    """share of time in which a job's GPUs are in use, below which it gives back what it grew by and does not grow;
    0: no job does"""
    idle_s: Seconds = Field(1800, gt=0)
    """for how long that is so before the job is idle"""


Lower = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[\w.@-]*$")]


class GuestSettings(_Section):
    """The queue of guests, which are the blocks beyond the GPUs that a user asked for: Slurm preempts it for anybody's
    job. What is empty stays as the user's own; nothing that a user writes can choose it."""

    qos: Lower = ""
    """QOS that is preempted (preempt/qos); users of an operator's companion need not have it"""
    partition: Annotated[str, StringConstraints(pattern=r"^[\w.-]*$")] = ""
    """partition of the same nodes that is preempted (preempt/partition_prio); users must be allowed in it"""
    account: Lower = ""
    """account that guests are charged to, so that they use up no limit of the user's own; each user needs an
    association with it"""
    charged: bool = True
    """false: GPU-hours of guests count nothing, which Slurm shows only of a QOS (UsageFactor 0)"""

    most: int = Field(8, ge=1)
    """guests of one job up to which each has one GPU; more GPUs make them larger, up to a node. So do too few tasks of
    its array. If nodes are whole, or device cgroups hide GPUs, each is a node"""
    grace_s: Seconds = Field(0, ge=0)
    """GraceTime of that queue, if it is a QOS: a job whose changes go by a checkpoint and take longer is expected to do
    work again for each guest that it loses"""

    @model_validator(mode="after")
    def _named(self) -> GuestSettings:
        if not (self.qos or self.partition):
            raise ValueError("name a qos or a partition that Slurm preempts")
        return self


EventKind = Literal["resized", "taken", "held_back", "cannot_resize", "limited", "slow_node", "companion"]
"""Events that people are notified of."""


class NotifySettings(_Section):
    """One way to notify people: by a program, a web hook, a mail server, or at addresses that users name."""

    command: str = ""
    """program and arguments, without a shell, which gets each message on its standard input; it runs as the
    companion's account"""
    url: str = ""
    """http:// or https:// address that messages are posted to, or smtp://HOST:PORT for mail"""
    url_file: File | None = None
    """file with that address, if it is a secret; nobody but the companion's account may read it (mode 600)"""
    own: list[str] = []
    """users name an address themselves (`notify=URL` in a job's comment), which begins with one of these, such as
    https://hooks.example.org/services/; of other jobs nothing is sent there"""
    form: Literal["json", "slack", "mail"] = "json"
    """json: an object with all events; slack: a text for Slack and what takes its web hooks; mail: a message with
    headers, to each job's owner"""
    events: list[EventKind] = []
    """those that are sent; empty: all"""
    users: list[str] = []
    """whose jobs; empty: everybody's, and what concerns the site"""
    to: str = Field("", pattern=r"^[\w.+@-]*$")
    """of mail: the address that gets all; empty: each job's owner, and what concerns the site nobody"""
    sender: str = Field("slurm-ones", pattern=r"^[\w.+@-]+$")
    """of mail: who sends it"""
    every_s: Seconds = Field(60, ge=0)
    """between two messages to one address: what happens meanwhile comes together"""

    @model_validator(mode="after")
    def _one_way(self) -> NotifySettings:
        if sum(map(bool, (self.command, self.url, self.url_file, self.own))) != 1:
            raise ValueError("name one of command, url, url_file and own")
        if self.command and not Path(self.argv[0]).is_absolute():
            raise ValueError("command: begin with the program's whole path")
        for address in [*self.own, *([self.url] if self.url else [])]:
            self._check(address)
        if not all(one.endswith("/") for one in self.own):
            raise ValueError("own: write addresses that end with /")
        return self

    def _check(self, address: str) -> None:
        if ADDRESS.fullmatch(address) is None:
            raise ValueError("write an address such as https://HOST/PATH, or smtp://HOST:25")
        if (self.form == "mail") != address.startswith("smtp:"):
            raise ValueError('form = "mail" goes with smtp:// addresses, or with a command')

    @property
    def argv(self) -> list[str]:
        """Command and arguments as separate words."""
        try:
            return shlex.split(self.command) or [""]
        except ValueError as error:
            raise ValueError(f"command: {error}") from None

    @property
    def address(self) -> str:
        """Address for messages; empty for a command, or if users name the address. Raises `ConfigError` for an
        unreadable or unsafe `url_file`."""
        if self.url_file is None:
            return self.url
        address = _secret(self.url_file, "url_file", "https://HOST/PATH")
        try:
            self._check(address)
        except ValueError as error:
            raise ConfigError(f"{self.url_file} (url_file): {error}") from None
        return address


class RetentionSettings(_Section):
    """Ages at which `slurm-ones db maintain` reduces a job's rows, in days after the job's end."""

    minutes_after_days: Days = Field(7, ge=0)
    """then its throughput samples are reduced to one a minute"""
    hours_after_days: Days = Field(30, ge=0)
    """then its throughput samples are reduced to one an hour"""
    forget_after_days: Days | None = Field(None, ge=0)
    """then decisions without effect and the steps of its resizes are deleted; without a value they stay"""


class Settings(_Section):
    """All settings of the companion. The defaults suit an operator's daemon that only advises."""

    cluster: str = ""
    """name in the database; empty takes Slurm's ClusterName"""
    database: str = ""
    """sqlite:///PATH or postgresql://USER@HOST/DATABASE; empty takes ~/.local/share/slurm-ones/ones.sqlite. Put a
    password in ~/.pgpass, PGPASSWORD, a service file or database_url_file; here only if nobody else may read this
    file"""
    database_url_file: File | None = None
    """file with the URL, in place of `database`: for one that holds a password. Nobody but the companion's account
    may read it (mode 600)"""
    mode: Literal["advise", "act"] = "advise"
    """advise prints the commands and changes nothing"""
    scope: Literal["all", "own"] = "all"
    """operator mode (all users' jobs) or user mode (own jobs)"""
    client: str = Field("auto", pattern=r"^(auto|pyslurm|command|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """how to talk to Slurm: auto, pyslurm, command, or `package.module:Class`"""
    tick_s: Seconds | None = Field(None, gt=0)
    """seconds between ticks; 60; in user mode 30, or 180 if slurmctld limits or is slow to answer RPCs"""
    takeover_s: Seconds | None = Field(None, gt=0)
    """a standby takes the lead from a leader without a heartbeat for this long (PostgreSQL); tick_s without a value"""
    timeout_s: Seconds = Field(30, gt=0)
    """longest wait for one answer of Slurm"""
    metrics_port: int | None = Field(None, ge=1, le=65535)
    """port with figures for Prometheus; without a value there is none"""
    metrics_address: str = "127.0.0.1"
    """address of this machine at which that port is. Whoever reaches it reads the figures: put a proxy or a firewall
    before any but localhost"""
    policy: str = "ones"
    """name of the policy, or `package.module:Class`"""
    policy_options: dict[str, float | int | bool | str] = {}
    """options of the policy, below"""
    seed: int = 0
    """seed of the policy's random numbers"""
    stop_file: File = Path("/etc/slurm-ones/stop")
    """while this file exists, no resize begins and drains are cancelled"""
    spool: File | None = None
    """shared directory for orders, for a companion that may not write into jobs' directories"""
    views: File | None = None
    """folder in which users find what concerns their own jobs, made by the companion. Users must see it where they log
    in, on a file system with POSIX ACLs. Without a value `views` in the spool, and none without a spool; operator mode
    only"""
    whole_node_gpus: dict[str, Annotated[int, Field(ge=1)]] = {}
    """GPUs per node of partitions where Slurm has no GRES"""
    taper: float = Field(1.0, ge=1)
    """how many times longer gradients take between leaf switches than below one. Above 1, if Slurm knows the topology,
    switches are weighed, and Slurm is asked for few of them"""
    gpu_speeds: dict[str, Annotated[float, Field(gt=0)]] = {}
    """how fast GPUs of each Slurm type compute, relative to each other: a guess, until jobs have shown it"""
    guests: dict[str, Annotated[GuestSettings, Field(strict=False)]] = {}
    """queue of the guests in each partition, below; none: jobs do not grow by guests there"""
    notify: dict[str, Annotated[NotifySettings, Field(strict=False)]] = {}
    """who is notified of what happens, and how, below; none: nobody"""
    resize: ResizeSettings = Field(ResizeSettings(), strict=False)
    limits: LimitSettings = Field(LimitSettings(), strict=False)
    """limits on elastic jobs, below"""
    retention: RetentionSettings = Field(RetentionSettings(), strict=False)
    """when `slurm-ones db maintain` reduces old rows, below"""

    @field_validator("metrics_address")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            raise ValueError("write an IP address of this machine, such as 127.0.0.1 or ::1") from None

    @model_validator(mode="after")
    def _one_database(self) -> Settings:
        if self.database and self.database_url_file is not None:
            raise ValueError("database and database_url_file both name a database; leave one of them out")
        return self

    @property
    def stopped(self) -> bool:
        """True if the stop file exists, or its file system does not say."""
        try:
            self.stop_file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    @property
    def interval_s(self) -> float:
        """Seconds between ticks."""
        return self.tick_s if self.tick_s is not None else (180.0 if self.scope == "own" else 60.0)

    @property
    def deferral_s(self) -> float:
        """Length of a deferral, s; the companion renews it at a tick in its second half."""
        return max(self.resize.park_lease_s, 3 * self.interval_s)

    @property
    def views_folder(self) -> Path | None:
        """Folder in which an operator's companion publishes each user's own jobs; None if nothing is published."""
        if self.scope != "all":
            return None
        return self.views or (self.spool / "views" if self.spool is not None else None)

    @property
    def wake_folder(self) -> Path | None:
        """Directory whose modification requests the companion's next tick; None if users cannot reach any."""
        if self.scope == "own":
            return Path.home() / ".local/share/slurm-ones/wake"
        return self.views_folder / "wake" if self.views_folder is not None else None

    @property
    def database_url(self) -> str:
        """URL of the job database. Raises `ConfigError` if `database_url_file` is unreadable or unsafe."""
        if self.database:
            return self.database
        if self.database_url_file is not None:
            return _secret(self.database_url_file, "database_url_file", "postgresql://USER:PASSWORD@HOST/NAME")
        return f"sqlite:///{Path.home() / '.local/share/slurm-ones/ones.sqlite'}"


def _secret(path: Path, key: str, example: str) -> str:
    """Read the single line of a file that nobody else may read."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read(10_000).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} ({key}): cannot be read: {why}") from None
    if mode & 0o077:
        raise ConfigError(f"{path} ({key}): others may read it; chmod 600 {path}")
    if not lines[0].strip() or any(line.strip() for line in lines[1:]):
        raise ConfigError(f"{path} ({key}): write one line into it, {example}")
    return lines[0].strip()


def _accepted(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Settings
    for part in location[:-1]:
        fields = getattr(section, "model_fields", None)
        if fields is None:  # a section for each name
            section = get_args(get_args(section)[-1])[0] if get_args(section) else section
        elif str(part) in fields:
            section = fields[str(part)].annotation
    return sorted(section.model_fields) if hasattr(section, "model_fields") else []


def _explain(error: Any) -> str:
    location = error["loc"]
    key = ".".join(f"{part!s:.80}" for part in location) or "the file"
    if error["type"] == "extra_forbidden":
        accepted = _accepted(location)
        near = difflib.get_close_matches(str(location[-1]), accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"unknown key {key}{hint}; accepted here: {', '.join(accepted)}"
    if not location:
        # All that the file says would be shown, and it may hold a password.
        return str(error["msg"])
    return f"{key}: {error['msg']}, not {error['input']!r:.80}"


def parse(text: str, name: str = "config") -> Settings:
    """Parse settings from TOML text; raises `ConfigError` with a line for each invalid key."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of numbers and of depth, too
        raise ConfigError(f"{name}: not TOML: {error}") from None
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors()]
        raise ConfigError("\n".join(f"{name}: {line}" for line in lines)) from None


def default_path() -> Path:
    """Path of the default settings file: the user's own if it exists, else the site's."""
    own = Path.home() / ".config/slurm-ones/config.toml"
    # After sudo the home may be another user's, and closed.
    return own if os.access(own, os.F_OK) else Path("/etc/slurm-ones/config.toml")


def load(path: Path | None = None) -> Settings:
    """Read settings from a file. Without a path, read the default file, or return default settings if it is missing."""
    named, path = path is not None, path or default_path()
    try:
        text = path.read_text(encoding="utf-8")
    except PermissionError:
        raise ConfigError(
            f"{path}: closed to you. It holds no secret: its administrator opens it with chmod 644 {path}; or name "
            "settings of your own with --config"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError) and not named:
            # An ordinary user without any file wants only their own jobs looked after.
            return Settings(scope="all" if getpass.getuser() in ("root", "slurm") else "own")
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    settings, mode = parse(text, str(path)), path.stat().st_mode
    if stat.S_ISREG(mode) and mode & 0o002:
        raise ConfigError(
            f"{path}: everybody may write it, and so name programs that would run as you; chmod o-w {path}"
        )
    if names_password(settings.database) and mode & 0o077:
        raise ConfigError(
            f"{path}: others may read it, and database names a password; put that URL into a file of its own "
            f"(database_url_file), or chmod 600 {path}"
        )
    return settings


class ReloadableSettings:
    """Settings in force; `reload` replaces them as a whole or not at all."""

    def __init__(self, read: Callable[[], Settings]) -> None:
        """`read` reads and validates the settings; its `ConfigError` is raised."""
        self._read = read
        self.settings = read()

    def reload(self) -> list[str]:
        """Read the settings again; return the keys that changed, such as `tick_s` or `resize.dwell_s`.

        Raises `ConfigError` with a line for each rejected key; the previous settings then stay in force.
        """
        new = self._read()
        changed = _changed(self.settings, new)
        fixed = [key for key in changed if key in FIXED_KEYS]
        if fixed:
            raise ConfigError(
                "\n".join(f"{key}: cannot change while the companion runs; restart it for that" for key in fixed)
            )
        self.settings = new
        return changed


def _changed(old: Settings, new: Settings) -> list[str]:
    before, after = old.model_dump(), new.model_dump()
    changed = []
    for key, value in after.items():
        if value == before[key]:
            continue
        if key in Settings.model_fields and hasattr(Settings.model_fields[key].annotation, "model_fields"):
            changed += [f"{key}.{name}" for name, inner in value.items() if inner != before[key][name]]
        else:
            changed.append(key)
    return changed
