"""A simulated Slurm in virtual time: client, cluster, jobs, nodes and scheduler."""
