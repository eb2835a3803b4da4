"""A host with systemd as its first process, in the network of a test cluster."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, ClusterError, cgroups, root, unavailable
from tests.cluster.box import Box
from tests.cluster.spec import Bind
from tests.guide.site import HOST

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 60.0


def why_no_systemd() -> str:
    """Why no host can be started on this machine, empty where one can."""
    why = unavailable()
    if why is None and "cgroup2" not in Path("/proc/filesystems").read_text():
        return "This machine's kernel has no cgroups of version 2, which systemd needs."
    return why or ""


class Host:
    """One machine of the site. Made by `boot`, ended by `stop` or with this process."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.box = Box(cluster.box.folder.with_name(f"{cluster.name}-{name}"))

    def boot(self, binds: Sequence[Bind], owner: int | None) -> None:
        """Start it, and wait until its systemd has started all that it is to start."""
        self.box.remove()
        self.box.start(root.folder(HOST), binds, owner=owner, network=self.cluster.box.init, boots=True)
        self.until(lambda: self._state() in ("running", "degraded"), "systemd has started", BOOT_S)

    def _state(self) -> str:
        return self.sh("systemctl is-system-running", check=False).strip()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.box.alive

    @property
    def full_name(self) -> str:
        return self.box.name

    @property
    def root(self) -> Path:
        """Its / as this process sees it."""
        return self.box.root

    def sh(self, command: str, *, check: bool = True, **options: Any) -> str:
        """What a line typed at a shell prints."""
        return self.ask(command, check=check, **options).stdout

    def ask(
        self,
        command: str,
        *,
        user: str = "root",
        check: bool = False,
        timeout: float = 120.0,
        input: str | None = None,
        cwd: str = "/root",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A line typed at a shell, with its exit status."""
        environment = {"PATH": PATH, "LANG": "C.UTF-8", **(env or {})}
        return self.box.run(
            ["bash", "-c", command], user=user, cwd=cwd, env=environment, input=input, timeout=timeout, check=check
        )

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> float:
        """Wait until that holds; the seconds it took."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > timeout_s:
                raise ClusterError(f"{self.name}: not within {timeout_s:.0f} s: {what}")
            time.sleep(0.2)
        return time.monotonic() - began

    def freeze(self) -> None:
        """As a virtual machine that is paused, systemd included."""
        self._frozen("1")

    def thaw(self) -> None:
        """It goes on, and knows of nothing."""
        self._frozen("0")

    def _frozen(self, value: str) -> None:
        group = cgroups.group(self.full_name)
        if group is None:
            raise ClusterError("this machine shows no cgroups, so no host can be frozen")
        (group / "cgroup.freeze").write_text(value)
        self.until(lambda: f"frozen {value}" in (group / "cgroup.events").read_text(), "frozen or not")

    def stop(self) -> None:
        """As if it lost its power."""
        self.box.stop()
