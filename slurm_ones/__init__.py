"""slurm-ones: training jobs on Slurm that grow and shrink with the cluster (ONES, SC21)."""

__version__ = "0.2.0"
