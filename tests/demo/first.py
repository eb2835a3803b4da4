"""`python -m tests.demo.first`: makes the root of the demo's Slurm. It needs no package, so it runs beside pip."""

from __future__ import annotations

import sys

from tests.cluster import root
from tests.cluster.errors import ClusterError
from tests.cluster.report import Silent
from tests.cluster.sites import SITES


class Lines(Silent):
    def note(self, text: str) -> None:
        print(text, flush=True)


def main() -> int:
    """Make it, unless it is there; says so before and after."""
    site = SITES["gres"]
    if root.is_built(site):
        return 0
    print("Making a small Debian with Slurm, once: about 90 s, and its download …", flush=True)
    try:
        root.build(site, Lines())
    except ClusterError as error:
        print(f"make demo: {error}", file=sys.stderr)
        return 2
    print("The Debian with Slurm is made", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
