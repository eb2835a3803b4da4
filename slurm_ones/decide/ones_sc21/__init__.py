"""ONES as published: an online evolutionary search over the GPUs and the batch of every job (SC21, arXiv 2108.03645).

The baseline, which must not be improved. ones_sc21.py is the policy, its limits and its reasons; space.py is what one
decision searches over, what a candidate is and what it costs; generation.py has the steps of a generation. What differs
from the paper is what a real Slurm forces, and no more:

1. A size is one that Slurm can be asked for, part of a node or whole nodes (`schedule.shapes`), and a candidate counts
   only if it can be placed: unchanged jobs stay on their nodes, as Slurm does not move them. Where shapes
   need not be uniform any count will do, as in the paper.
2. A new job's first limit is the paper's 1 GPU, or its smallest size where it takes no single one.
3. Jobs that must keep their shape take no part: their GPUs are not in the space (`space`).
4. While the best candidate may not be deployed, nobody who runs is changed, but idle GPUs go to waiting jobs by the
   paper's order of filling: Slurm would start them there anyhow.
5. The samples that a job has used are known as its progress, samples of its base batch (`JobView.samples`).

Going to zero GPUs is a checkpoint, as in the paper: jobs that the deployed candidate leaves out are parked.
"""

from __future__ import annotations

from slurm_ones.decide.ones_sc21.ones_sc21 import OnesSc21, Options

__all__ = ["OnesSc21", "Options"]
