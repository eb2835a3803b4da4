"""How often to save: often enough to lose little, seldom enough to cost little."""

from __future__ import annotations

import math

PRIOR_FAILURES = 0.2
PRIOR_NODE_S = 20 * 86_400.0
"""Prior of the failure rate, a gamma distribution: one failure in 100 node-days. Kokolis et al. ("Revisiting
Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025) give 6.5 and 2.3 in 1,000 node-days for the
infrastructure of two clusters; people and scripts fail as well, so ours is a round number above them. It is held so
loosely that the job's own first failures outweigh it."""

LEAST_S = 30.0
MOST_S = 3_600.0
"""The interval stays between these: stalls shorter than can be measured, and rates known from nothing but the
prior, would lead to extremes."""


def failure_rate(failures: int, trained_s: float, nodes: int) -> float:
    """Failures a second of a job on `nodes` nodes, having seen `failures` in `trained_s` seconds at this size.

    The mean of a gamma posterior: nodes fail independently, each at the same rate.
    """
    nodes = max(1, nodes)
    return nodes * (PRIOR_FAILURES + failures) / (PRIOR_NODE_S + max(0.0, trained_s) * nodes)


def interval_s(stall_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose least to stalls and to work done twice.

    Daly's higher-order estimate in closed form ("A higher order estimate of the optimum checkpoint interval for
    restart dumps", Future Generation Computer Systems 22, 2006), whose first term is Young's sqrt(2 × stall × time
    between failures), kept from `LEAST_S` to `MOST_S`. `stall_s` is how long training stands still for one, not how
    long its writing takes.
    """
    stall, between = max(0.0, stall_s), max(1e-9, mean_time_between_failures_s)
    best = between
    if stall < 2 * between:
        root = math.sqrt(stall / (2 * between))
        best = math.sqrt(2 * stall * between) * (1 + root / 3 + root * root / 9) - stall
    return min(MOST_S, max(LEAST_S, best))
