"""slurm-ones: training jobs on Slurm that grow and shrink with the cluster (ONES, SC21)."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036, since an installer sees to it, but a path set by hand does not
    sys.exit(f"slurm-ones needs Python 3.10 or newer; {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}")

__version__ = "0.2.0"
