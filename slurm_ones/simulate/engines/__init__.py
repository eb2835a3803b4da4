"""The two ways to run a workload: the companion on a simulated Slurm, and the published studies' assumptions."""
