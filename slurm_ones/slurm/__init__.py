"""All access to Slurm: its data, the clients and the parsers."""
