"""The site that the guide is followed at: a real Slurm, and hosts of the database, the companion and its standby."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import Cluster, paths, root
from tests.cluster.spec import Bind
from tests.guide import mirror
from tests.guide.host import Host
from tests.guide.site import HOST

ACCOUNT, NUMBER = "slurm-ones", 2100
"""The companion's account, and its number everywhere."""
DATABASE_HOST = "db.example.org"
CHECKOUT = "/root/slurm-ones"
SHARED = "/shared"
"""The shared file system on which the spool is."""
SMALL = {"/spool": "8m", "/full": "2m", "/tables": "96m", "/state": "48m"}
"""Disks that are soon full: of the spool, of a job, of the database, of the companion's state."""
SLURM_UID = 64030


class Place:
    """A cluster with its service hosts, all in one network."""

    def __init__(self, name: str, disks: Mapping[str, Path]) -> None:
        """`disks` are those of `SMALL`, by their names inside."""
        self.cluster = Cluster("gres", name)
        self.folder = paths.clusters() / f"{name}-site"
        self._disks = disks
        self.db = Host(self.cluster, "db")
        self.one, self.other = Host(self.cluster, "one"), Host(self.cluster, "other")

    @property
    def hosts(self) -> tuple[Host, Host]:
        """Those of the companion and of its standby."""
        return self.one, self.other

    def start(self) -> None:
        """Start Slurm and the database's host."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("spool", "slurm", "checkout", "sockets"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "sockets").chmod(0o777)
        self._copy_checkout()
        self.cluster.start([self._spool(), *self._small("/full")])
        self._know_account()
        self._settings_of_slurm()
        self.boot(self.db)

    def _copy_checkout(self) -> None:
        """The working tree as it is, without what git ignores."""
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=paths.REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            source, target = paths.REPOSITORY / name, self.folder / "checkout" / name
            if source.is_file() or source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target, follow_symlinks=False)

    def _small(self, *names: str) -> list[Bind]:
        return [Bind(str(self._disks[name]), name, writable=True) for name in names if name in self._disks]

    def _spool(self) -> Bind:
        """The shared file system: a small disk where there are such."""
        return Bind(str(self._disks.get("/spool", self.folder / "spool")), SHARED, writable=True)

    def has(self, name: str) -> bool:
        """Whether that disk is a small one here."""
        return name in self._disks

    def disk(self, name: str) -> Path:
        """This machine's name of one of the small disks."""
        return self._disks[name]

    def _know_account(self) -> None:
        """The account where the controller looks people up, as the site's directory would have it."""
        etc = self.cluster.root / "etc"
        with (etc / "passwd").open("a") as passwd, (etc / "group").open("a") as group:
            passwd.write(f"{ACCOUNT}:x:{NUMBER}:{NUMBER}::/var/lib/{ACCOUNT}:/usr/sbin/nologin\n")
            group.write(f"{ACCOUNT}:x:{NUMBER}:\n")

    def _settings_of_slurm(self) -> None:
        """A copy of /etc/slurm for the hosts, with the key that their sackd signs with."""
        source, target = self.cluster.root / "etc/slurm", self.folder / "slurm"
        for name in ("slurm.conf", "slurm.key"):
            shutil.copy(source / name, target / name)
        (target / "slurm.key").chmod(0o600)
        os.chown(target / "slurm.key", SLURM_UID, SLURM_UID)
        names = "\n".join(f"127.0.0.1 {self.cluster.name}-{host}" for host in ("db", "one", "other"))
        hosts = (self.cluster.root / "etc/hosts").read_text()
        (self.folder / "hosts").write_text(f"{hosts}127.0.0.1 {DATABASE_HOST}\n{names}\n")
        (self.folder / "pip.conf").write_text(mirror.PIP_CONF)
        (self.folder / "start.conf").write_text("disabled\n")

    def boot(self, host: Host) -> None:
        """Start a host as it was when it was new."""
        folder = self.folder
        binds = [
            Bind(str(folder / "slurm"), "/etc/slurm"),
            Bind(str(folder / "hosts"), "/etc/hosts"),
            self._spool(),
            Bind(str(self.cluster.scratch), "/scratch", writable=True),
            *(Bind(str(self.cluster.home(user)), f"/home/{user}", writable=True) for user in ("alice", "bob")),
        ]
        if host is self.db:
            binds += [Bind(str(folder / "sockets"), "/sockets", writable=True), *self._small("/tables")]
        else:
            binds += [Bind(str(folder / "pip.conf"), "/etc/pip.conf"), Bind(str(mirror.folder()), mirror.INSIDE)]
            binds += [Bind(str(folder / "checkout"), "/checkout"), *self._small("/full")]
            # One network, and one PostgreSQL in it.
            here = root.folder(HOST)
            for path in here.glob("etc/postgresql/*/main/start.conf"):
                binds.append(Bind(str(folder / "start.conf"), f"/{path.relative_to(here)}"))
        (folder / host.name).write_text(f"{self.cluster.name}-{host.name}\n")
        host.boot([*binds, Bind(str(folder / host.name), "/etc/hostname")], os.getpid())
        if host is not self.db:
            host.sh(f"cp -r /checkout {CHECKOUT}")
            if mirror.ready().is_dir():
                # What pip would install again, which takes most of a minute.
                host.sh(f"cp -r {mirror.INSIDE}/{mirror.ready().name} /opt/slurm-ones")

    def keep_environment(self, host: Host) -> None:
        """Keep what pip has installed there, for hosts to come."""
        if not mirror.ready().is_dir():
            partial = mirror.ready().with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(host.root / "opt/slurm-ones", partial, symlinks=True)
            partial.rename(mirror.ready())

    def database(self, what: str) -> None:
        (version,) = (self.db.root / "etc/postgresql").iterdir()
        self.db.sh(f"systemctl {what} postgresql@{version.name}-main", timeout=60)

    def stop(self) -> None:
        """End everything."""
        for host in (*self.hosts, self.db):
            host.stop()
        self.cluster.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
