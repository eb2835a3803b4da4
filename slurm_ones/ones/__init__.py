"""Our policy: the search of ONES (SC21) over GPUs and batch of every job, with what it lacks.

ones.py is the policy, search.py its search for the sizes of highest worth: worth.py says what each size is worth to
each job, candidates.py makes the candidates and sees what finds room on the nodes. kinds.py chooses the kind of GPU.

From ONES it has the genome (what each job gets). Its population lives on between decisions: refreshed, crossed
uniformly, mutated, filled and cut to the best. These differ, and the option that takes each away again:

1. Progress counts and not samples: goodput, throughput × statistical efficiency (`goodput`).
2. The score is what a job's progress is worth to everybody (worth.py). That counts the waiting of those that get less
   or nothing. ONES counts the remaining GPU-seconds of those that run (`completion_prices`).
3. ρ enters through the mean of its distribution, not by one draw a generation (`expect`).
4. Speeds know nodes, and doubtful sizes are taken for slower (`placement`, `caution`); a job grows beyond what it has
   tried by `leap` at most.
5. A change must repay its interruption within a horizon (`resize_cost`, `horizon_s`, `horizon_share`,
   `tenure`).
6. Greedy solutions seed the population (`greedy`).
7. Local search follows crossover and mutation (`local_search`).
8. A job that fares worse than on its fair share weighs more (`fair_bound`).
9. The batch is a choice of its own at each size: one of best goodput; only changing the batch is free (`own_batch`).
"""

from __future__ import annotations

from slurm_ones.ones.ones import Ones
from slurm_ones.ones.search import OnesOptions

__all__ = ["Ones", "OnesOptions"]
