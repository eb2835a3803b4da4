"""`slurm-ones demo`: real trainings on this machine, and simulated jobs. A real companion resizes both.

The demo's Slurm is simulated, but in real time. It has two partitions: jobs of the first run as processes on this
machine, and jobs of the second are simulated. The companion and the live page are the same programs as at a real site,
each in its own process. The companion reaches the demo's Slurm through `remote`.
"""
