"""Where things lie on the host: the cache of built roots and the folders of running clusters.

<cache>/debs/                packages as downloaded, so that a build begun again is quick
<cache>/roots/<site>-<hash>/ a built root, never written to again
<cache>/pyslurm/<key>/       PySlurm for one Slurm and one Python, or why there is none
<cache>/clusters/<name>/     what a running cluster shows the host: home/, scratch/, log/
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def cache() -> Path:
    """The cache's top: $SLURM_ONES_CACHE, else `slurm-ones` in the user's cache folder."""
    chosen = os.environ.get("SLURM_ONES_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "slurm-ones"


def debs() -> Path:
    return cache() / "debs"


def roots() -> Path:
    return cache() / "roots"


def pyslurm() -> Path:
    return cache() / "pyslurm"


def clusters() -> Path:
    return cache() / "clusters"
