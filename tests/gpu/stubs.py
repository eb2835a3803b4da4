"""Checks that stand for those of a card: one of each kind of end."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.gpu.harness import Check, Lab, SkipCheck


def passes(lab: Lab, most: float = 2.0) -> None:
    lab.require("GPUs", lab.gpus, 1)
    lab.measure("s", 1.5, most=most)


def raises(lab: Lab) -> None:
    raise RuntimeError("CUDA error: stubbed")


def hangs(lab: Lab, note: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(note).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def crashes(lab: Lab) -> None:
    os.abort()


def skips(lab: Lab) -> None:
    raise SkipCheck("this card has no second copy engine")


def _stub(name: str, process: str = "one", **more: object) -> Check:
    return Check(name, process, name, "", f"tests.gpu.stubs:{name}", **more)  # type: ignore[arg-type]


def table(note: Path) -> tuple[Check, ...]:
    """Two processes; `note` is written by the one that hangs."""
    return (
        _stub("passes"),
        _stub("crashes"),
        _stub("raises"),
        _stub("skips", "two"),
        _stub("hangs", options={"note": str(note)}, limit_s=3.0),
        Check("slow", "one", "", "", "tests.gpu.stubs:passes", options={"most": 1.0}),
        Check("last", "one", "", "", "tests.gpu.stubs:passes"),
        Check("several", "two", "", "", "tests.gpu.stubs:passes", gpus=2),
        Check("people", "two", "", "", by_hand="it takes two networks"),
    )


TABLE = table(Path(os.environ.get("ONES_STUB_NOTE", "/dev/null")))
