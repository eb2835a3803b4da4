"""Simulator of a cluster and its jobs in virtual time, on which the real companion runs with any policy."""


class BadInput(Exception):
    """Error: a workload, profile or option cannot be used. The message names file, line and column if there are any."""
