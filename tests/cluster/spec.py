"""What a box is to be: written by the process that wants one, read by the process that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

LOCK = "lock"
"""Held as long as a box lives, by its keeper and its first process: how one tells who is alive."""
PIDS = "pids.json"
"""The two processes by which a box is reached, as the host numbers them."""
SPEC = "spec.json"


@dataclass(frozen=True)
class Bind:
    """A folder or file of the host shown inside at `inside` (by default at the same path)."""

    host: str
    inside: str
    writable: bool = False


@dataclass(frozen=True)
class Spec:
    """A box: a root, what is shown in it, and who has to live for it to live."""

    name: str
    folder: str
    """The box's folder on the host; holds its lock and whatever the host is to see."""
    root: str
    """The built root, used as the read-only lower layer."""
    binds: list[Bind] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    """Extra device files, each another name of /dev/null."""
    owner: int | None = None
    """The process (pid on the host) with which the box ends; None: it stays until taken down."""
    network: int | None = None
    """The process (pid on the host) whose network the box shares; None: it has one of its own."""
    boots: bool = False
    """Whether the root's own init is the first process, over a tree of cgroups of its own."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Spec:
        raw = json.loads(path.read_text())
        raw["binds"] = [Bind(**bind) for bind in raw["binds"]]
        return cls(**raw)
