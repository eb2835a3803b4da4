"""Time between two checkpoints, computed from the pause that one takes and the job's failure rate."""

from __future__ import annotations

import math

PRIOR_FAILURES = 0.2
PRIOR_NODE_S = 20 * 86_400.0
"""Prior of the failure rate, a gamma distribution: one failure in 100 node-days. Kokolis et al. ("Revisiting
Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025) report 6.5 and 2.3 infrastructure failures in
1,000 node-days on two clusters. People and scripts cause failures as well, so that our rate is a round number above
theirs. The prior is so weak that the job's own first failures outweigh it."""

LEAST_S = 30.0
MOST_S = 3_600.0
"""Largest interval in seconds; `LEAST_S` is the smallest. They bound the interval for a pause too short to measure, and
for a rate from the prior only."""


def failure_rate(failures: int, trained_s: float, nodes: int) -> float:
    """Return the failures per second of a job on `nodes` nodes, after `failures` in `trained_s` seconds of training. It
    is the mean of a gamma posterior: nodes fail independently, each at the same rate."""
    nodes = max(1, nodes)
    return nodes * (PRIOR_FAILURES + failures) / (PRIOR_NODE_S + max(0.0, trained_s) * nodes)


def interval_s(stall_s: float, mean_time_between_failures_s: float) -> float:
    """Return the training time between two checkpoints, in seconds, that minimises the sum of pauses and repeated work.

    This is Daly's higher-order estimate in closed form ("A higher order estimate of the optimum checkpoint interval for
    restart dumps", Future Generation Computer Systems 22, 2006). Its first term is Young's sqrt(2 × pause × time
    between failures). The result is limited to the range from `LEAST_S` to `MOST_S`. `stall_s` is the pause of training
    for one checkpoint, not the time of its write.
    """
    stall, between = max(0.0, stall_s), max(1e-9, mean_time_between_failures_s)
    best = between
    if stall < 2 * between:
        root = math.sqrt(stall / (2 * between))
        best = math.sqrt(2 * stall * between) * (1 + root / 3 + root * root / 9) - stall
    return min(MOST_S, max(LEAST_S, best))
