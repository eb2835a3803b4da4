"""A small scheduler trained by policy gradient: what ONES was compared with (ONES §4 names it DRL).

Neither its weights nor its code were published, so this one is built after the two that began the line: DeepRM (Mao et
al., HotNets 2016, §3: from nothing, one action after another until the void action ends the round; REINFORCE with the
mean of several rollouts of one workload as baseline; reward minus the jobs in the system) and DL2 (Peng et al., arXiv
1909.06040, §4: jobs that grow by steps at the size of their users' batch, all decided anew in each interval).

drl.py is the policy and takes one step after another; steps.py says what a job's next step looks like, as figures;
perceptron.py weighs them. weights.npz was trained by
`python -m benchmarks.train_drl`; `load` tells the exact command, and how the training went.
docs/decisions/0010-policy-gradient-rival.md has the figures.

Where it differs from both:

1. One network scores every job's step alone, with figures of the whole queue among its inputs, where theirs have a
   fixed number of places for jobs. So it is linear in the jobs and takes queues of any length.
2. A step doubles the GPUs, or goes to the size that the user asked for: the sizes that Slurm can be asked for.
3. The void action ends the growing alone: a job that has nothing still gets its first step where there is room.
"""

from __future__ import annotations

from slurm_ones.decide.drl.drl import Drl

__all__ = ["Drl"]
