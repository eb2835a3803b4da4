"""What can be broken: for each row of the guide's table who breaks it so, and looks for what the row says."""

from __future__ import annotations

from importlib import import_module

from tests.guide.breaks.known import ROWS, Break

for room in ("companion", "slurm", "disks", "people", "settings", "standby"):
    import_module(f"{__name__}.{room}")

__all__ = ["ROWS", "Break"]
