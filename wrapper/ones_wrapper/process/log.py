"""The job's log on stderr."""

from __future__ import annotations

import sys

TORCH_MISSING = (
    "torch is not installed in this environment: pip install 'ones-wrapper[torch]', or load your site's module"
)


def log(text: str, source: str = "ones") -> None:
    """Write a line to the job's log; `source` is the program that writes it."""
    # In one piece: other ranks write to the same log.
    sys.stderr.write(f"{source}: {' '.join(text.splitlines())}\n")
    sys.stderr.flush()
