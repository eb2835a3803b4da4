"""Values that a shell completes: each list is the one by which the command itself goes."""

from __future__ import annotations

from collections.abc import Iterable


def job(incomplete: str) -> Iterable[tuple[str, str]]:
    """Ids of the jobs that the reader may see and that have not ended."""
    from slurm_ones.cli.common import settings_of, store_of_reader
    from slurm_ones.text import plain

    try:
        with store_of_reader(settings_of(None)) as store:
            found = store.job_summaries(ended=0)
    # A shell that completes nothing is better than one that prints an error amid a line.
    except Exception:
        return []
    return [(str(one.job_id), plain(one.name, 40)) for one in found if str(one.job_id).startswith(incomplete)]


def policy(incomplete: str) -> Iterable[str]:
    """Names of policies."""
    from slurm_ones.policies import POLICIES

    return [name for name in POLICIES if name.startswith(incomplete)]


def view(incomplete: str) -> Iterable[str]:
    """Views and saved queries."""
    from ones_db.query import saved_queries
    from ones_db.views import VIEWS

    return [name for name in (*VIEWS, *saved_queries()) if name.startswith(incomplete)]
