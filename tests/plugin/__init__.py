"""The Slurm plugin: its rules in Lua beside those in Python, its files, and both Slurms with it."""
