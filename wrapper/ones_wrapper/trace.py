"""A record of which samples were used, for tests: one file a rank, one JSON line a completed step.

Switched on by ONES_TRACE, a path in which {restart} and {rank} are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Trace:
    """Writes lines `{"restart", "attempt", "rank", "world", "begin": step}` and `{…, "epoch", "step", "samples":
    [indices]}`.
    """

    def __init__(self, path: Path, common: dict[str, int]) -> None:
        self._path = path
        self._common = common

    @classmethod
    def of(cls, env: Mapping[str, str], restart: int, rank: int, world: int) -> Trace | None:
        """The trace that the environment asks for, if it does."""
        pattern = env.get("ONES_TRACE")
        if not pattern:
            return None
        path = pattern.replace("{restart}", str(restart)).replace("{rank}", str(rank))
        attempt = int(env.get("ONES_ATTEMPT") or 0)
        return cls(Path(path), {"restart": restart, "attempt": attempt, "rank": rank, "world": world})

    def begin(self, step: int) -> None:
        """The run goes on from this step: what earlier runs did from there on is undone."""
        self._write({"begin": step})

    def step(self, epoch: int, step: int, samples: list[int]) -> None:
        """This rank used these dataset indices in a step."""
        self._write({"epoch": epoch, "step": step, "samples": samples})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**self._common, **line}) + "\n")
