"""A simulated Slurm: client, cluster, jobs, nodes and scheduler in virtual time."""
