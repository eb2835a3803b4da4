"""`slurm-ones demo`: real trainings on this machine, and simulated jobs. A real companion resizes both.

The demo's Slurm is simulated, but in real time. Jobs of its first partition run as processes on this machine; jobs of
its second are simulated. Companion and live page are the same programs as at a real site, each in its own process. The
companion reaches the demo's Slurm through `remote`.
"""
