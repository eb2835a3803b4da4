"""Values that a shell completes: each list is the one by which the command itself goes."""

from __future__ import annotations

from collections.abc import Iterable


def policy(incomplete: str) -> Iterable[str]:
    """Names of policies."""
    from slurm_ones.policies import POLICIES

    return [name for name in POLICIES if name.startswith(incomplete)]


def view(incomplete: str) -> Iterable[str]:
    """Views and saved queries."""
    from ones_db.query import saved_queries
    from ones_db.views import VIEWS

    return [name for name in (*VIEWS, *saved_queries()) if name.startswith(incomplete)]
