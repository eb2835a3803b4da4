"""Entry point `python -m slurm_ones.cli`, the same as `slurm-ones`."""

from slurm_ones.cli import main

main()
