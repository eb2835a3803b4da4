"""Simulator of a Slurm cluster and its training jobs in virtual time. The real companion runs on it, with any
policy."""


class BadInput(Exception):
    """Error: a workload, profile or option cannot be used. The message names the file, line and column, if any."""
