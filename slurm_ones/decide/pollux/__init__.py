"""Pollux: sizes and batches of highest goodput for all jobs together, by a genetic search.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021. Taken from there:

- Goodput = throughput × statistical efficiency, at the batch that makes it highest (§3).
- Fitness: the power mean (p = -1) over jobs of the speed-up against the job's fair share (§4.2.1), times
  (T - R·δ) / (T + δ) for a job that would be re-allocated: T its age, R its re-allocations, δ what one costs (§4.2.2).
- At most one job of several nodes to a node, against interference (§4.2.2).
- At most twice the most GPUs that the job has had (§4.1), one GPU at first.
- The genetic search over allocation matrices, jobs × nodes, of 100 candidates and 100 generations that begins with the
  last decision's population; tournament, one-point crossover over jobs, three mutations, repair. Rates, the order of
  jobs (least attained service first) and the second aim that keeps candidates various (NSGA-II) are those of its
  authors' public simulator, which their figures come from.

Where we differ, because this is Slurm:

- A job that keeps its size stays on its nodes and pays nothing; there every change of nodes is a re-allocation. A
  schedule says sizes, and Slurm chooses the nodes.
- Where shapes must be uniform, a candidate's job has a valid size of one node or whole nodes.
- A first start is weighed like a re-allocation, as there, but where this makes two candidates equal the one that uses
  more of the cluster is taken, so that a job of age 0 may start.
- The matrices are kept sparse (problem.py), so that a decision costs a fraction of the authors' 1.5 to 3 s.
- Throughput and efficiency come from whatever models the caller has, not from Pollux's own fit.
"""

from __future__ import annotations

from slurm_ones.decide.pollux.pollux import Options, Pollux

__all__ = ["Options", "Pollux"]
