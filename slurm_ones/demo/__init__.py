"""`slurm-ones demo`: trainings of this machine's own processes and simulated jobs, resized by a real companion.

A simulated Slurm that keeps to the clock has two partitions. In one, what it starts are processes here (`processes`);
in the other, simulated jobs. The companion and the live page are the programs that a site runs, each a process of its
own; the companion reaches this Slurm by `remote`.
"""
