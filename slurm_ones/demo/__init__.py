"""`slurm-ones demo`: real trainings on this machine and simulated jobs, both resized by a real companion.

A simulated Slurm in real time has two partitions. Jobs of one run as local processes (`processes`), jobs of the other
are simulated. Companion and live page are the programs of a real site, each in its own process; the companion reaches
this Slurm through `remote`.
"""
