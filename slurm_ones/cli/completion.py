"""Shell completion of values, from the same lists that the commands use."""

from __future__ import annotations

from collections.abc import Iterable


def policy(incomplete: str) -> Iterable[str]:
    """Names of policies that begin with `incomplete`."""
    from slurm_ones.policies import POLICIES

    return [name for name in POLICIES if name.startswith(incomplete)]


def view(incomplete: str) -> Iterable[str]:
    """Names of views and saved queries that begin with `incomplete`."""
    from ones_db.query import saved_queries
    from ones_db.views import VIEWS

    return [name for name in (*VIEWS, *saved_queries()) if name.startswith(incomplete)]
