"""A PostgreSQL of the tests' own: installed from Debian where it is absent, on a socket in a directory of its own."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

ADMIN = "ones"
"""Superuser of the server, which asks it for no password; the role `locked` has to give one."""


SMALL = 32 << 20
"""Bytes of the disk that is soon full."""

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
"""Bytes that must be free in memory: a server takes some hundred million of them, and each worker has one."""


class NoServer(Exception):
    """PostgreSQL is not here and cannot be installed; the message says why."""


def binaries() -> Path:
    """The directory of the newest PostgreSQL, installed first where that can be done."""
    with _alone():
        return _installed() or _install()


@contextmanager
def _alone() -> Iterator[None]:
    """While no other process of the tests is in here."""
    here = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(here, fcntl.LOCK_EX)
        yield
    finally:
        os.close(here)


def _install() -> Path:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoServer("PostgreSQL is not installed, and only root on Debian can: apt-get install postgresql")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Said beforehand, Debian's package makes and starts no server of its own.
    settings = Path("/etc/postgresql-common/createcluster.conf")
    if not settings.exists():
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text("create_main_cluster = false\n")
    keep = ["-o", "Dpkg::Options::=--force-confold"]
    install = ["install", "-y", "--no-install-recommends", *keep, "postgresql"]
    # A machine whose package lists are missing or old needs the update first.
    for command in (install, ["update"], install):
        done = subprocess.run(["apt-get", "-q", *command], env=environment, capture_output=True, text=True, check=False)
        found = _installed()
        if found is not None:
            return found
    raise NoServer(f"apt-get cannot install PostgreSQL: {done.stderr.strip()}")


def _installed() -> Path | None:
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if known:
        return known[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class Server:
    """A server over its own data, with fsync on, as an ordinary user."""

    def __init__(self, in_memory: bool = False) -> None:
        """`in_memory` has its files lie there, where there is room; a cluster of the tests does not see them."""
        self.bin = binaries()
        self._as: list[str] = []
        # Not among pytest's directories: they are closed to other users, and too long for a socket's path.
        memory = in_memory and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM
        self.place = Path(tempfile.mkdtemp(prefix="ones-pg-", dir=_MEMORY if memory else None))
        remove_left(self.place.parent)
        self._lock = lock(self.place)
        self.place.chmod(0o755)
        if os.geteuid() == 0:
            user = next(known for name in ("postgres", "nobody") if (known := _user(name)) is not None)
            os.chown(self.place, user.pw_uid, user.pw_gid)
            self._as = ["setpriv", "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
        self.small = self.place / "small"
        """Where there is room for `SMALL` bytes, if `has_small`: root may make namespaces here."""
        self.has_small = os.geteuid() == 0 and may_unshare()
        self.data, self.log = self.place / "data", self.place / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def create(self) -> None:
        """Make the data directory, and start."""
        options = ["--username", ADMIN, "--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"]
        self._run([str(self.bin / "initdb"), "-D", str(self.data), *options])
        hba = self.data / "pg_hba.conf"
        hba.write_text(f"local all locked scram-sha-256\n{hba.read_text()}")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(
                f"listen_addresses = ''\nunix_socket_directories = '{self.place}'\nfsync = on\n"
                "shared_buffers = 64MB\nmax_wal_size = 256MB\nmax_connections = 120\n"
            )
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        # It ends with the tests, however they end.
        command = ["setpriv", "--pdeathsig", "INT", *self._as[1:], str(self.bin / "postgres"), "-D", str(self.data)]
        if self.has_small:
            # A disk of its own that is soon full, in a namespace that nobody else sees.
            self.small.mkdir(exist_ok=True)
            mount = f"mount -t tmpfs -o size={SMALL},mode=700,uid={self._as[2]},gid={self._as[4]} tmpfs {self.small}"
            command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.place)
        ready = [str(self.bin / "pg_isready"), "-q", "-h", str(self.place)]
        until = time.monotonic() + 60
        while subprocess.run(ready, check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT after what is under way was undone, SIGQUIT at once as in a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        """Stop it and leave nothing behind."""
        self.stop()
        shutil.rmtree(self.place)
        os.close(self._lock)

    def url(self, database: str, user: str = ADMIN) -> str:
        return f"postgresql://{user}@/{quote(database)}?host={self.place}"

    def fresh(self, template: str = "template1", options: str = "") -> str:
        """A new database; returns its name."""
        self._count += 1
        name = f"ones 100% {self._count}"
        self._ask(f'CREATE DATABASE "{name}" TEMPLATE "{template}" {options}')
        return name

    def drop(self, database: str) -> None:
        """End its sessions, and drop it."""
        self._ask(f'DROP DATABASE "{database}" WITH (FORCE)')

    def _ask(self, sql: str) -> None:
        """As `psql`, without a process: each test does so twice."""
        import psycopg  # which not every environment of ours has

        with psycopg.connect(f"host={self.place} user={ADMIN} dbname=postgres", autocommit=True) as session:
            session.execute(sql)

    def psql(self, sql: str, database: str = "postgres") -> str:
        """What psql prints for SQL, or for a script."""
        command = [str(self.bin / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", str(self.place)]
        done = subprocess.run(
            [*command, "-U", ADMIN, "-d", database], input=sql, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def dump(self, database: str, *options: str) -> str:
        """The database as pg_dump writes it, without what changes from one dump to the next."""
        command = [str(self.bin / "pg_dump"), "-h", str(self.place), "-U", ADMIN, "--no-owner", *options, database]
        dumped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        noise = ("--", "SET ", "SELECT pg_catalog.set_config", "\\restrict", "\\unrestrict")
        return "\n".join(line for line in dumped.splitlines() if line and not line.startswith(noise)) + "\n"

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run([*self._as, *command], capture_output=True, text=True, check=False, cwd=self.place)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]}: {done.stderr or done.stdout}")


def lock(place: Path) -> int:
    """Say that a process uses the place, for as long as it keeps this descriptor open."""
    handle = os.open(place / "locking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    # Under this name it is looked for, so that nobody finds it unlocked.
    (place / "locking").rename(place / "lock")
    return handle


def remove_left(folder: Path) -> None:
    """Remove the places of processes that were killed: in memory they would take room until the next boot."""
    for found in folder.glob("ones-pg-*/lock"):
        with suppress(OSError):
            handle = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found.parent)
            finally:
                os.close(handle)


def may_unshare() -> bool:
    """Whether mounts can be made that nobody else sees."""
    return bool(shutil.which("unshare")) and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def _user(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None
