"""A cluster and its jobs in virtual time: policies compared by the companion that drives the real Slurm."""
