"""Simulator of a cluster and its jobs in virtual time, on which the real companion runs with any policy."""


class BadInput(Exception):
    """Error of a workload, profile or option that cannot be used, by file, line and column if it is in a file."""
