"""Our policy: the search of ONES (SC21) over every job's GPUs and batch, with nine changes.

ones.py is the policy. search.py searches for the sizes of highest worth: worth.py gives the worth of each size to each
job, candidates.py makes the candidates and finds room for them on the nodes. kinds.py chooses the kind of GPU.

The genome (GPUs of each job) is that of ONES. The population is kept between decisions: refreshed, crossed uniformly,
mutated, filled and cut to the best. These points differ from ONES; the option in brackets switches each off:

1. Progress counts and not samples: goodput, throughput × statistical efficiency (`goodput`).
2. The score is the worth of a job's progress to all jobs (worth.py), including jobs that wait meanwhile. ONES counts
   the remaining GPU-seconds of running jobs (`completion_prices`).
3. ρ enters through the mean of its distribution, not by one draw a generation (`expect`).
4. Speeds depend on nodes, and uncertain sizes count as slower (`placement`, `caution`); a job grows to at most `leap`
   times the most GPUs that it has had.
5. A change must repay its interruption within a horizon (`resize_cost`, `horizon_s`, `horizon_share`,
   `tenure`).
6. Greedy solutions seed the population (`greedy`).
7. Local search follows crossover and mutation (`local_search`).
8. A job that fares worse than on its fair share weighs more (`fair_bound`).
9. Each size has its own batch, that of best goodput; changing only the batch is free (`own_batch`).
"""

from __future__ import annotations

from slurm_ones.ones.ones import Ones
from slurm_ones.ones.search import OnesOptions

__all__ = ["Ones", "OnesOptions"]
