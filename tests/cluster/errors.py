"""The one exception of this package."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """Something that the reader of the message can act upon; shown without a traceback."""
