"""A real Slurm: one of the sites, running in a box."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import accounting, interpreter, paths, pyslurm_build, root, slurm_conf
from .box import Box
from .errors import ClusterError
from .pyslurm_build import PySlurm
from .report import Report, Silent
from .sites import SITES, USERS, Site
from .spec import Bind

STATE = "cluster.json"
NODES_SECONDS = 120.0
CONTROLLER = "slurmctld(-wlm)?"
"""The controller's name as the system has it, a pattern: on Debian, 26.05 has the second one once it was reconfigured.
"""
# Every slurmd puts the socket of auth/slurm at /run/slurm, and of two that start at once one may find it
# taken and die. So each has a /run/slurm of its own, as on a real node; all but the first, whose socket
# serves the commands that users type.
START_NODES = """
mkdir -p /run/slurm
first=$1; shift
for node in "$@"; do
    if [ "$node" = "$first" ]; then
        slurmd -N "$node" &
    else
        unshare --mount sh -c 'mount -t tmpfs tmpfs /run/slurm; exec slurmd -N "$1"' sh "$node" &
    fi
    ids="$ids $!"
done
for id in $ids; do wait $id; done
"""
SLURM_UID = 64030  # fixed by Debian
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""By these PyTorch chooses its instructions: jobs compute as the process that compares their figures with its own."""


def build(site: Site, report: Report | None = None, again: bool = False) -> None:
    """Build all that a site needs, unless it is there: the root, then PySlurm for this Python."""
    report = report or Silent()
    root.build(site, report)
    pyslurm_build.build(site, report, again)


class Cluster:
    """One running Slurm. As a context manager it is gone at the end of the block; it is gone as well
    when the process that started it ends in any other way.

    `site` is "gres" or "old". Several may run at once, of one site too, under different names. With `compile` off,
    PySlurm is used where an earlier cluster has compiled it, and not compiled here.
    """

    def __init__(
        self, site: str | Site, name: str | None = None, report: Report | None = None, *, compile: bool = True
    ):
        self.site = SITES[site] if isinstance(site, str) else site
        self.name = name or f"{self.site.name}-{os.getpid()}-{secrets.token_hex(2)}"
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", self.name):
            raise ClusterError(
                f"{self.name!r} cannot be a cluster's name (it is a host name, too): use up to 31 "
                "lower-case letters, digits and '-', a letter first"
            )
        self.box = Box(paths.clusters() / self.name)
        self.python = sys.executable
        """The interpreter that jobs should use: the one that runs now, at the same path inside."""
        self.pyslurm = False
        """Whether `import pyslurm` works inside."""
        self.pyslurm_why = "not started"
        """If not, why."""
        self.accounting = False
        """Whether Slurm keeps accounts, and the user `ops` is an operator of it."""
        self.accounting_why = "not started"
        """If not, why."""
        self._report = report or Silent()
        self._compile = compile

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """The running cluster of that name, whoever started it."""
        box = Box(paths.clusters() / name)
        if not box.alive:
            raise ClusterError(f"no cluster {name!r} is running")
        state = json.loads((box.folder / STATE).read_text())
        cluster = cls(state["site"], name)
        cluster.python = state["python"]
        cluster.pyslurm = state["pyslurm"]
        cluster.pyslurm_why = state["pyslurm_why"]
        cluster.accounting = state["accounting"]
        cluster.accounting_why = state["accounting_why"]
        return cluster

    @property
    def alive(self) -> bool:
        return self.box.alive

    @property
    def root(self) -> Path:
        """The cluster's / as the host sees it while it runs."""
        return self.box.root

    def home(self, user: str) -> Path:
        """The host's name of a user's home, which inside is /home/<user>."""
        return self.box.folder / "home" / user

    @property
    def scratch(self) -> Path:
        """The host's name of /scratch, which everybody may write to."""
        return self.box.folder / "scratch"

    @property
    def logs(self) -> Path:
        """The logs of slurmctld and of every slurmd."""
        return self.box.folder / "log"

    def start(self, binds: Sequence[Bind] = (), stay: bool = False) -> Cluster:
        """Build what is missing, start Slurm, and return when every node is idle.

        `binds` shows more of the host inside. With `stay` the cluster outlives this process.
        """
        if self.alive:
            raise ClusterError(f"{self.name} is already running")
        root.build(self.site, self._report)
        if self._compile:
            pyslurm = pyslurm_build.build(self.site, self._report)
        else:
            pyslurm = pyslurm_build.find(self.site) or PySlurm(None, "PySlurm is not compiled")
        self.box.remove()  # whatever a cluster of this name, ended hard, may have left
        shown = [*self._folders(), *interpreter.environment_binds(), *binds]
        if pyslurm.folder:
            shown.append(Bind(str(pyslurm.folder), pyslurm_build.INSIDE))
        self.pyslurm, self.pyslurm_why = pyslurm.folder is not None, pyslurm.why
        self._write_state()  # so that even a cluster whose start was cut short can be taken down
        owner = None if stay else os.getpid()
        self.box.start(root.folder(self.site), shown, slurm_conf.devices(self.site), owner)
        try:
            self._configure()
            self._start_accounting()
            self._write_state()
            self._start_daemons()
            self.await_nodes()
        except BaseException as why:
            # Read before the logs go away with the cluster.
            words = self._last_words()
            self.stop()
            if isinstance(why, ClusterError):
                raise ClusterError(f"{self.name}: {why}\n{words}") from why
            raise
        return self

    def _write_state(self) -> None:
        """Leave for `attach` what cannot be seen from outside."""
        names = ("python", "pyslurm", "pyslurm_why", "accounting", "accounting_why")
        state = {"site": self.site.name, **{name: getattr(self, name) for name in names}}
        (self.box.folder / STATE).write_text(json.dumps(state))

    def _folders(self) -> list[Bind]:
        """Make the folders that cluster and host share."""
        made: list[tuple[Path, str, int, int]] = [
            (self.home(user), f"/home/{user}", uid, 0o755) for user, uid in USERS.items()
        ]
        made.append((self.scratch, "/scratch", 0, 0o1777))
        made.append((self.logs, slurm_conf.LOGS, SLURM_UID, 0o755))
        for folder, _, uid, mode in made:
            folder.mkdir(parents=True)
            folder.chmod(mode)
            os.chown(folder, uid, uid)
        return [Bind(str(folder), inside, writable=True) for folder, inside, _, _ in made]

    def _configure(self) -> None:
        etc = self.root / "etc"
        (etc / "hosts").write_text(slurm_conf.hosts(self.site, self.name))
        (etc / "hostname").write_text(self.name + "\n")
        slurm = etc / "slurm"
        self._configure_slurm(self.site.accounting)
        (slurm / "gres.conf").write_text(slurm_conf.gres_conf(self.site))
        (slurm / "cgroup.conf").write_text(slurm_conf.cgroup_conf(self.site))
        # Both kinds of key are random bytes that only their daemon may read.
        if self.site.auth == "slurm":
            self._secret(slurm / "slurm.key", "slurm")
        else:
            self._secret(etc / "munge/munge.key", "munge")
        # 26.05 wants /run/slurmctld for slurmctld and refuses a /run/slurm that is not root's.
        for folder in ("run/slurmctld", slurm_conf.STATE.lstrip("/")):
            self._own_folder(folder, "slurm")
        self._own_folder("run/munge", "munge")

    def _configure_slurm(self, accounting: bool) -> None:
        text = slurm_conf.slurm_conf(self.site, self.name, accounting)
        (self.root / "etc/slurm/slurm.conf").write_text(text)

    def _secret(self, path: Path, owner: str) -> None:
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(secrets.token_bytes(1024))
        uid, gid = self.box.ids(owner)
        os.chown(path, uid, gid)

    def _own_folder(self, inside: str, owner: str) -> None:
        folder = self.root / inside
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        uid, gid = self.box.ids(owner)
        os.chown(folder, uid, gid)

    def _start_accounting(self) -> None:
        """Start accounting where the site has it; where it does not start, go on without."""
        self.accounting, self.accounting_why = False, f"the site {self.site.name} has none"
        if not self.site.accounting:
            return
        try:
            accounting.start(self.box, self.name, self._environment("root"), self.site.accounts)
        except ClusterError as why:
            self.accounting_why = str(why)
            self._report.note(f"no accounting, and no operator: {why}")
            self._configure_slurm(accounting=False)
            return
        self.accounting, self.accounting_why = True, ""

    def _start_daemons(self) -> None:
        if self.site.auth == "munge":
            self.box.run(["munged"], user="munge", env=self._environment("root"))
        self.start_slurmctld()
        self.start_slurmds(*self.nodes)

    def await_nodes(self) -> None:
        """Wait until every node is idle; Slurm needs a few seconds to hear from all of them."""
        began = time.monotonic()
        shown = "slurmctld does not answer"
        # Reconfigured, slurmctld is replaced by a new process.
        while (waited := time.monotonic() - began) < NODES_SECONDS and (waited < 5 or self.controller_lives()):
            answer = self.run(["sinfo", "-hN", "-o", "%N %T"], user="root", check=False)
            if answer.returncode == 0:
                shown = answer.stdout
                states = {line.split()[1] for line in shown.splitlines()}
                if states == {"idle"}:
                    return
            time.sleep(0.1)
        raise ClusterError(f"the nodes do not come up: {shown}")

    def _last_words(self) -> str:
        ends = []
        for log in sorted(self.logs.glob("*.log")):
            ends += [f"{log.name}:", *log.read_text().splitlines()[-12:]]
        return "\n".join(ends)

    def start_slurmctld(self) -> None:
        """Start the controller, which goes on from its saved state."""
        # With accounting, slurmctld is slow to save what associations have used, and one killed before its first
        # save would not start again ("fatal: No Assoc usage file"). -i has it go on without.
        options = ["-i"] if self.accounting else []
        self.box.run(["slurmctld", *options], user="slurm", env=self._environment("root"))

    def kill_slurmctld(self) -> None:
        """Kill the controller as a crash would: no word to anybody, no last save of its state."""
        self.signal_slurmctld("KILL")
        while self.controller_lives():
            time.sleep(0.02)

    def signal_slurmctld(self, name: str) -> None:
        """Send the controller a signal, such as STOP."""
        self.box.run(["pkill", f"-{name}", "-x", CONTROLLER])

    @property
    def nodes(self) -> list[str]:
        return [name for partition in self.site.partitions for name in partition.names]

    def start_slurmds(self, *nodes: str) -> None:
        """Start the daemons of these nodes, which find again the jobs that they had."""
        self.box.run(["sh", "-ec", START_NODES, "sh", self.nodes[0], *nodes], env=self._environment("root"))

    def kill_slurmds(self, *nodes: str) -> None:
        """Kill the daemons of these nodes; their jobs' processes live on."""
        self.signal_slurmds("KILL", *nodes)
        while any(self._node_lives(node) for node in nodes):
            time.sleep(0.02)

    def signal_slurmds(self, name: str, *nodes: str) -> None:
        """Send these nodes' daemons a signal, such as STOP."""
        for node in nodes:
            self.box.run(["pkill", f"-{name}", "-f", f"^slurmd -N {node}$"], check=False)

    def _node_lives(self, node: str) -> bool:
        return self.box.run(["pgrep", "-f", f"^slurmd -N {node}$"], check=False).returncode == 0

    def controller_lives(self) -> bool:
        """Whether there is a process of the controller."""
        return self.box.run(["pgrep", "-x", CONTROLLER], check=False).returncode == 0

    def stop(self) -> None:
        """End the cluster: every process, every mount, and (unless kept) every file."""
        self.box.stop()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _environment(self, user: str) -> dict[str, str]:
        system = "/usr/local/bin:/usr/bin:/bin"
        if user == "root":
            system += ":/usr/local/sbin:/usr/sbin:/sbin"
        environment = {"LANG": "C.UTF-8", "PATH": f"{Path(self.python).parent}:{system}"}
        environment |= {name: os.environ[name] for name in ARITHMETIC if name in os.environ}
        if self.pyslurm:
            environment["PYTHONPATH"] = pyslurm_build.INSIDE
        return environment

    def run(
        self, argv: Sequence[str], *, user: str = "alice", env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster as `user`, in the user's home unless `cwd` says otherwise: see `Box.run`.

        With `check`, failure raises ClusterError with the command's own words. At the time limit
        the command and its children are killed and subprocess.TimeoutExpired is raised.
        """
        return self.box.run(argv, user=user, env={**self._environment(user), **(env or {})}, **options)

    def popen(
        self, argv: Sequence[str], *, user: str = "alice", env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in the cluster; signals, exit status and files pass through: see `Box.popen`."""
        return self.box.popen(argv, user=user, env={**self._environment(user), **(env or {})}, **options)

    def command(
        self, argv: Sequence[str], *, user: str = "alice", env: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[list[str], dict[str, str]]:
        """The same as a command of this machine: see `Box.command`."""
        return self.box.command(argv, user=user, env={**self._environment(user), **(env or {})}, **options)
