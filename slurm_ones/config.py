"""Settings of the companion: one typed object, read from a TOML file and reloadable at run time.

Every error names the file, the key, the given value and the accepted ones.
"""

from __future__ import annotations

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
from ones_wrapper.protocol.choices import near

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FIXED_KEYS = ("cluster", "database", "database_url_file", "client", "takeover_s", "metrics_port", "metrics_address")
"""Settings that cannot change while the companion runs: open connections and the leader's lock depend on them."""


SITE_VIEW = "site.sqlite"
"""Name of the file in the views folder that shows the companion's state to all users."""


def view_name(uid: int) -> str:
    """Return the name of the file in the views folder that shows one user's jobs."""
    return f"{uid}.sqlite"


class ConfigError(Exception):
    """The settings file is missing, unreadable or has an invalid value."""


ADDRESS = re.compile(r"(https?://[\w.-]+(:\d{1,5})?/[\w./~=&?+-]*|smtp://[\w.-]+(:\d{1,5})?)", re.ASCII)
"""Pattern of accepted addresses for messages. It is narrow, so that all parsers read the same host from an address."""
YEAR_S = 365 * 86400.0
"""Largest number of seconds that a setting accepts. The present time plus this number is still a valid date."""
Seconds = Annotated[float, Field(le=YEAR_S)]
Days = Annotated[float, Field(le=100 * 365)]


def _absolute(path: Path) -> Path:
    # With a relative path each process would find another file, such as another stop file.
    if not path.is_absolute():
        raise ValueError("write the whole path, from /")
    return path


File = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]


class _Section(BaseModel):
    # Strict: pydantic would otherwise accept "no" as a truth value, and true as a number of seconds.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class ResizeSettings(_Section):
    """Limits on what may be done to a job. Times are in seconds."""

    dwell_s: Seconds | None = Field(None, ge=0)
    """least time between two resizes of a job, and from its start to its first resize. Without a value: four times the
    pause of a resize, at most half an hour"""
    blocks_dwell_s: Seconds = Field(0, ge=0)
    """least time between two changes of a running job of blocks. If 20 times the pause of such a change is longer, that
    counts, up to dwell_s (without it: half an hour)"""
    max_wait_s: Seconds = Field(300, gt=0)
    """longest time that a resized job may wait to start; then it gets its old shape back"""
    blocks_wait_s: Seconds = Field(60, gt=0)
    """longest time that a new block may wait to join its job; then the change is rolled back"""
    drain_timeout_s: Seconds = Field(300, gt=0)
    """longest time from the order to drain until the job has written its checkpoint; then the resize is given up"""
    start_timeout_s: Seconds = Field(300, gt=0)
    """longest time from a run's start to its first report"""
    max_open: int = Field(16, ge=1)
    """largest number of open resizes, not counting changes of blocks in running jobs"""
    max_open_blocks: int = Field(32, ge=1)
    """largest number of open changes of blocks in running jobs"""
    start_now: bool = True
    """true: start requeued jobs without Slurm's delay (StartTime=now)"""
    settle_s: Seconds = Field(2.0, ge=0)
    """with start_now, time that a requeued job waits for its release: Slurm may still be killing processes of its last
    run"""
    advance_s: Seconds = Field(1.0, gt=0)
    """time between two attempts to advance open resizes while no tick is due"""
    leave_s: Seconds = Field(60, ge=0)
    """time that a companion takes at most, when it stops, to release the jobs that it holds"""
    shrink: bool = True
    """true: running jobs may lose GPUs so that others can start or grow"""
    preempt: bool = True
    """true: running jobs may lose all GPUs if the policy asks for it; the default policy never does"""
    preempted_s: Seconds = Field(60, ge=0)
    """time for which a job does not grow after Slurm preempted one of its blocks. It doubles with each preemption that
    soon follows, up to half an hour"""
    park_lease_s: Seconds = Field(900, gt=0)
    """time after which a deferred job starts by itself if the companion has not renewed its deferral; at least three
    ticks"""


Count = Annotated[int, Field(ge=0)]


class LimitSettings(_Section):
    """Limits that protect people from each other's elastic jobs. They bind the companion, not requests that users make
    to Slurm."""

    share: float = Field(1.0, gt=0, le=1)
    """fraction of a partition's GPUs up to which its elastic jobs may grow together"""
    gpus_per_user: Count | None = None
    """GPUs up to which the elastic jobs of one user may grow together; none: no limit"""
    gpus_per_account: Count | None = None
    """GPUs up to which the elastic jobs of one account may grow together; none: no limit"""
    gpus_of_user: dict[str, Count] = {}
    """limits of single users, in place of gpus_per_user"""
    gpus_of_account: dict[str, Count] = {}
    """limits of single accounts, in place of gpus_per_account"""
    growth_cost: float = Field(1.1, ge=1)
    """most GPU-hours that a job may use if its growth is charged, as a multiple of its GPU-hours at the requested size.
    `cost=` in the job's comment replaces it"""
    resizes_per_hour: Count | None = None
    """largest number of resizes per hour that interrupt one job; none: as many as the dwell time allows"""
    resizes_per_job: Count | None = None
    """largest number of resizes in a job's life that interrupt it; none: no limit"""
    near_end_s: Seconds | None = Field(None, ge=0)
    """a job that is expected to end within this time is not resized. Without a value: twice the pause of a resize, at
    most half an hour; for a job of blocks, the time that new blocks take to join"""
    near_limit_s: Seconds = Field(300, ge=0)
    """a job is not resized if its time limit ends it within this time, or within half of the limit if that is less"""
    idle_use: float = Field(0, ge=0, le=1)
    """fraction of the time: GPUs that are in use for less of it are idle. A job with idle GPUs does not grow, and gives
    its growth back; 0: none are idle"""
    idle_s: Seconds = Field(1800, gt=0)
    """time over which the use of a job's GPUs is measured for idle_use"""


Lower = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[\w.@-]*$")]


class GuestSettings(_Section):
    """Queue of guests. Guests are a job's blocks beyond the GPUs that its user asked for; Slurm preempts them for any
    other job. An empty field keeps the value of the user's own queue. Nothing that a user writes chooses this queue."""

    qos: Lower = ""
    """QOS that Slurm preempts (preempt/qos). With an operator's companion, users need no access to it"""
    partition: Annotated[str, StringConstraints(pattern=r"^[\w.-]*$")] = ""
    """partition that has the same nodes and that Slurm preempts (preempt/partition_prio). Users must have access to
    it"""
    account: Lower = ""
    """account to which guests are charged, so that they do not use up the user's own limits. Each user needs an
    association with it"""
    charged: bool = True
    """false: GPU-hours of guests cost nothing. For a QOS, Slurm itself shows this by UsageFactor 0"""

    most: int = Field(8, ge=1)
    """number of guests among which all growth of a job is divided. A guest has one GPU if that is enough, otherwise
    more, up to a whole node; growth beyond that takes more guests. Guests are also larger if the array has too few
    tasks. If Slurm allocates whole nodes, or device cgroups hide GPUs, each guest has a node"""
    grace_s: Seconds = Field(0, ge=0)
    """GraceTime of the QOS. If a job's changes restart it from a checkpoint, and take longer than this, the job is
    expected to lose work with each preempted guest"""

    @model_validator(mode="after")
    def _named(self) -> GuestSettings:
        if not (self.qos or self.partition):
            raise ValueError("name a qos or a partition that Slurm preempts")
        return self


EventKind = Literal["resized", "taken", "held_back", "cannot_resize", "limited", "slow_node", "companion"]
"""Kinds of events about which people are notified."""


class NotifySettings(_Section):
    """One way to notify people: a program, a web hook, a mail server, or addresses that users name."""

    command: str = ""
    """program with arguments that gets each message on its standard input. It runs without a shell, as the companion's
    account"""
    url: str = ""
    """address to which messages are sent: http:// or https://, or smtp://HOST:PORT for mail"""
    url_file: File | None = None
    """file that holds url, if it is a secret; only the companion's account may read it (mode 600)"""
    own: list[str] = []
    """beginnings of addresses that users may name themselves (`notify=URL` in a job's comment), such as
    https://hooks.example.org/services/. Only messages about the user's own jobs are sent there"""
    form: Literal["json", "slack", "mail"] = "json"
    """json: an object with all events; slack: a text for Slack and services with the same web hooks; mail: a mail to
    each job's owner"""
    events: list[EventKind] = []
    """kinds of events that are sent; empty: all"""
    users: list[str] = []
    """users about whose jobs messages are sent; empty: all users, and events of the site"""
    to: str = Field("", pattern=r"^[\w.+@-]*$")
    """for mail: address that gets all messages; empty: each job's owner, and for events of the site nobody"""
    sender: str = Field("slurm-ones", pattern=r"^[\w.+@-]+$")
    """for mail: address of the sender"""
    every_s: Seconds = Field(60, ge=0)
    """least time between two messages to one address; events in between come in one message"""

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
        """Command and arguments as a list of words."""
        try:
            return shlex.split(self.command) or [""]
        except ValueError as error:
            raise ValueError(f"command: {error}") from None

    @property
    def address(self) -> str:
        """Address to which messages are sent; empty if there is a command, or if users name addresses. Raises
        `ConfigError` if `url_file` is unreadable or unsafe."""
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
    """age from which one throughput sample a minute is kept"""
    hours_after_days: Days = Field(30, ge=0)
    """age from which one throughput sample an hour is kept"""
    forget_after_days: Days | None = Field(None, ge=0)
    """age at which decisions without effect and the steps of resizes are deleted; without a value they stay"""


class Settings(_Section):
    """All settings of the companion. The defaults suit an operator's daemon that only advises."""

    cluster: str = ""
    """name of the cluster in the database; empty: Slurm's ClusterName"""
    database: str = ""
    """sqlite:///PATH or postgresql://USER@HOST/DATABASE; empty: ~/.local/share/slurm-ones/ones.sqlite. A password
    belongs in ~/.pgpass, PGPASSWORD, a service file or database_url_file; here only if nobody else may read this
    file"""
    database_url_file: File | None = None
    """file that holds `database`, if the URL has a password; only the companion's account may read it (mode 600)"""
    mode: Literal["advise", "act"] = "advise"
    """advise: print the commands and change nothing; act: change jobs"""
    scope: Literal["all", "own"] = "all"
    """all: all users' jobs, for an operator; own: the user's own jobs"""
    client: str = Field("auto", pattern=r"^(auto|pyslurm|command|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """client for Slurm: auto, pyslurm, command, or `package.module:Class`"""
    tick_s: Seconds | None = Field(None, gt=0)
    """seconds between ticks. Without a value: 60, or for a user's own companion 30, or 180 if slurmctld limits RPCs or
    answers them slowly"""
    takeover_s: Seconds | None = Field(None, gt=0)
    """time without a heartbeat of the leader after which a standby takes the lead (PostgreSQL). Without a value:
    tick_s"""
    timeout_s: Seconds = Field(30, gt=0)
    """longest time to wait for one answer of Slurm"""
    metrics_port: int | None = Field(None, ge=1, le=65535)
    """port at which Prometheus reads metrics; without a value there is none"""
    metrics_address: str = "127.0.0.1"
    """address of this machine at which metrics_port is opened. Everybody who can reach it can read the metrics. Put a
    proxy or a firewall before any address but localhost"""
    policy: str = "ones"
    """name of the policy, or `package.module:Class`"""
    policy_options: dict[str, float | int | bool | str] = {}
    """options of the policy, below"""
    seed: int = 0
    """seed of the policy's random numbers"""
    stop_file: File = Path("/etc/slurm-ones/stop")
    """while this file exists, no resize begins and drains are cancelled"""
    spool: File | None = None
    """shared directory for orders, if the companion may not write into jobs' directories"""
    views: File | None = None
    """folder in which the companion shows each user his own jobs (operator mode only). Users must see it where they log
    in, on a file system with POSIX ACLs. Without a value: `views` in the spool; without a spool none"""
    whole_node_gpus: dict[str, Annotated[int, Field(ge=1)]] = {}
    """GPUs per node of partitions whose nodes have no GRES in Slurm"""
    taper: float = Field(1.0, ge=1)
    """time of a gradient exchange across leaf switches, as a multiple of its time below one switch. If it is above 1
    and Slurm knows the topology, policies take it into account, and Slurm is asked to use few switches"""
    gpu_speeds: dict[str, Annotated[float, Field(gt=0)]] = {}
    """guess of the compute speed of each Slurm GPU type, relative to the others. It is used until jobs have shown it"""
    guests: dict[str, Annotated[GuestSettings, Field(strict=False)]] = {}
    """queue of guests in each partition, below. In a partition without one, jobs do not grow by guests"""
    notify: dict[str, Annotated[NotifySettings, Field(strict=False)]] = {}
    """ways in which people are notified, below; none: nobody is"""
    resize: ResizeSettings = Field(ResizeSettings(), strict=False)
    limits: LimitSettings = Field(LimitSettings(), strict=False)
    """limits on elastic jobs, below"""
    retention: RetentionSettings = Field(RetentionSettings(), strict=False)
    """ages at which `slurm-ones db maintain` reduces old rows, below"""

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
        """True if the stop file exists, or if its file system does not answer."""
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
        """Length of a deferral in seconds. The companion renews a deferral once half of it is over."""
        return max(self.resize.park_lease_s, 3 * self.interval_s)

    @property
    def views_folder(self) -> Path | None:
        """Folder in which an operator's companion shows each user his own jobs; None if it shows none."""
        if self.scope != "all":
            return None
        return self.views or (self.spool / "views" if self.spool is not None else None)

    @property
    def wake_folder(self) -> Path | None:
        """Directory that users touch to cause the next tick; None if there is no directory that users can reach."""
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
    """Read the only line of a file that nobody else may read."""
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
        if fields is None:  # a table with a section for each name
            section = get_args(get_args(section)[-1])[0] if get_args(section) else section
        elif str(part) in fields:
            section = fields[str(part)].annotation
    return sorted(section.model_fields) if hasattr(section, "model_fields") else []


def _explain(error: Any) -> str:
    location = error["loc"]
    key = ".".join(f"{part!s:.80}" for part in location) or "the file"
    if error["type"] == "extra_forbidden":
        accepted = _accepted(location)
        return f"unknown key {key}{near(str(location[-1]), accepted)}; accepted here: {', '.join(accepted)}"
    if not location:
        # The message must not show the file's content, which may include a password.
        return str(error["msg"])
    return f"{key}: {error['msg']}, not {error['input']!r:.80}"


def parse(text: str, name: str = "config") -> Settings:
    """Parse settings from TOML text. Raises `ConfigError`, with a line for each key that is not valid."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # limits of numbers and of nesting, too
        raise ConfigError(f"{name}: not TOML: {error}") from None
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors()]
        raise ConfigError("\n".join(f"{name}: {line}" for line in lines)) from None


def default_path() -> Path:
    """Return the path of the default settings file: the user's own if it exists, else the site's."""
    own = Path.home() / ".config/slurm-ones/config.toml"
    # After sudo the home may be another user's, and unreadable.
    return own if os.access(own, os.F_OK) else Path("/etc/slurm-ones/config.toml")


def load(path: Path | None = None) -> Settings:
    """Read settings from a file, by default the default file. If that is missing, return the default settings."""
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
            # Without any file, an ordinary user's companion handles only that user's jobs.
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
    """Present settings; `reload` replaces all of them, or none."""

    def __init__(self, read: Callable[[], Settings]) -> None:
        """Read the settings by calling `read`; its `ConfigError` is passed on."""
        self._read = read
        self.settings = read()

    def reload(self) -> list[str]:
        """Read the settings again; return the keys that changed, such as `tick_s` or `resize.dwell_s`.

        Raises `ConfigError`, with a line for each rejected key. The earlier settings then stay.
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
