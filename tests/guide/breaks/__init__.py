"""What can be broken: for each row of the guide's table who breaks it so, and looks for what the row says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tests.guide.service import ObservedService

Work = Callable[[ObservedService], None]


@dataclass(frozen=True)
class Break:
    """One way to break it. A row may have several."""

    row: str
    """The first cell of the guide's row."""
    way: str
    work: Work
    standby: bool
    """Whether there has to be a second companion."""


ROWS: list[Break] = []


def row(name: str, way: str = "", *, standby: bool = False) -> Callable[[Work], Work]:
    """The decorated function breaks what the guide calls so."""

    def known(work: Work) -> Work:
        ROWS.append(Break(name, way, work, standby))
        return work

    return known


# They register their rows above.
for module in ("companion", "slurm", "disks", "people", "settings", "standby"):
    import_module(f"{__name__}.{module}")
