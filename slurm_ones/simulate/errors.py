"""What is wrong with what a simulation was given."""

from __future__ import annotations


class BadInput(Exception):
    """A workload, profile or option that cannot be used; of a file, the message names file, line and column."""
