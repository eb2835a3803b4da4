"""A process of checks: `python -m benchmarks.gpu.process TABLE OUT GPUS REHEARSAL NAME…`, as the harness starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.gpu.harness import load, run_here
from ones_wrapper.devices.defaults import set_defaults


def main(table: str, out: str, gpus: str, rehearsal: str, *names: str) -> None:
    set_defaults(os.environ)  # before torch: it is forked by checks, and must not have asked for CUDA
    checks = {check.name: check for check in load(table)}
    run_here([checks[name] for name in names], int(gpus), rehearsal == "1", Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
