"""A tree of cgroups (version 2) of a box's own, below one group of ours. Standard library only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from . import linux

PREFIX = "slurm-ones-"
SAFE = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC


def own(place: Path, name: str) -> None:
    """Put this process into a new group, and mount what is below it, as if it were all, at `place`."""
    linux.mount("cgroup2", str(place), "cgroup2", SAFE)
    group = place / (PREFIX + name)
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text("0")
    linux.unshare(linux.CLONE_NEWCGROUP)
    linux.detach(str(place))
    linux.mount("cgroup2", str(place), "cgroup2", SAFE)


def group(name: str) -> Path | None:
    """The group of a box as this machine shows it, if it shows such at all."""
    for mount in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = mount.split()
        if kind == "cgroup2" and Path(place, PREFIX + name).is_dir():
            return Path(place, PREFIX + name)
    return None


def remove(name: str) -> None:
    """Remove the group of a box that has ended."""
    top = group(name)
    for folder, _, _ in os.walk(top, topdown=False) if top else ():
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
