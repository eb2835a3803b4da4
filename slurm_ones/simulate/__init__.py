"""A cluster and its jobs in virtual time: policies compared by the companion that drives the real Slurm."""


class BadInput(Exception):
    """A workload, profile or option that cannot be used; of a file, the message names file, line and column."""
