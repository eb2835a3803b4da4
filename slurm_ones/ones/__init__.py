"""Our policy: the search of ONES (SC21) over every job's GPUs and batch, with nine changes.

ones.py is the policy. search.py searches for the sizes of highest worth: worth.py computes what each size is worth to
each job, candidates.py makes candidates and finds room for them on the nodes. kinds.py chooses the kind of GPU.

As in ONES, a candidate assigns GPUs to jobs, and a population of candidates is kept between decisions. In each
generation it is refreshed, crossed uniformly, mutated, filled and cut to the best. These points differ from ONES; the
option in brackets switches each off:

1. Progress counts, not samples: goodput is throughput × statistical efficiency (`goodput`).
2. The score of a candidate is the waiting time that it saves all jobs (worth.py). ONES counts the remaining GPU-seconds
   of running jobs (`completion_prices`).
3. The completed fraction ρ of a job is the mean of its distribution, not one draw from it (`expect`).
4. Speeds depend on the number of nodes, and sizes of uncertain speed count as slower (`placement`, `caution`). A job
   grows to at most `leap` times the most GPUs that it has had.
5. A change must repay its pause within a given time (`resize_cost`, `horizon_s`, `horizon_share`, `tenure`).
6. Greedy solutions are put into the population (`greedy`).
7. Local search follows crossover and mutation (`local_search`).
8. A job weighs more if its JCT gets much longer than on a fair share of the cluster (`fair_bound`).
9. Each size has its own batch, which gives the best goodput (`own_batch`). A change of only the batch costs nothing.
"""

from __future__ import annotations

from slurm_ones.ones.ones import Ones
from slurm_ones.ones.search import OnesOptions

__all__ = ["Ones", "OnesOptions"]
