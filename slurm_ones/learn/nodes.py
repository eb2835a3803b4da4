"""Slow nodes, found by comparing jobs' throughput on different nodes at the same size, batch and kind of GPU.

PAL (Jain and others, SC 2024) finds slow GPUs by measurements before the cluster is used. Here no extra job is run.
Runs of one owner and script on a node are compared with runs of this owner and script elsewhere. A run on several nodes
trains at the speed of the slowest, so it counts only in part for each of its nodes. The most certainly slow node is
found first, and its runs are left out before the next is searched.

The measurements come from users' jobs, so one user must not be able to have a node treated as slow:

- Each owner has one vote, the median over his scripts, however many jobs he runs.
- A node needs votes of at least two owners, and is as slow as their median. (For an even number of votes, it is the
  less slow of the middle two.) If all measurements are of one owner, each of his jobs has a vote.
- No node counts as slower than `SLOWEST`, and at most a share `MOST` of all nodes counts as slow.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

from ones_db import JobHistory
from slurm_ones.learn.hierarchy import COMPARED, Factor, middle
from slurm_ones.learn.histories import plain_spec
from slurm_ones.learn.throughput import ABSURD

SLOWEST = 0.3
"""Lower bound on a node's relative speed; a slower node counts as this fast."""
SLOW = 0.9
"""Relative speed up to which a node counts as slow. Time of day and neighbouring jobs explain smaller differences."""
SPREAD = 0.15
"""Standard deviation of the logarithm of a node's relative speed, before any measurement."""
SURE = 2.5
"""Number of standard deviations by which a slow node must be slower than others, so that chance rarely makes a node
slow."""
VOTES = 2
MOST = 1 / 3
"""Largest share of all nodes that can count as slow; one node always can."""
ENOUGH = 3
"""Fewest comparable runs that are used to estimate the noise."""
MANY = 30
"""Largest number of comparable runs that are used to estimate the noise."""
NORMAL = 2.2219
"""Standard deviation of a normal distribution, divided by the lower quartile of |x − y| for two draws x, y."""
RECENT_S = 7 * 86400.0
"""Largest age of a used measurement, in seconds, so that a repaired node is used again."""


@dataclass(frozen=True)
class SlowNode:
    """A node that is slower than other nodes."""

    name: str
    factor: float
    """Speed of the node, divided by the speed of other nodes; in [`SLOWEST`, `SLOW`]."""
    doubt: float
    """Standard deviation of the logarithm of `factor`."""
    runs: int
    """Number of runs on the node that were compared."""
    owners: int
    """Number of owners of the compared runs."""


class _Run(NamedTuple):
    """Throughput of one run at one batch."""

    alike: Hashable
    """Key that comparable runs share: owner, script, number of nodes, GPUs per node, batch and kind of GPU."""
    voter: Hashable
    """Owner of the run; the job if all measurements are of one owner."""
    run: Hashable
    owner: str
    names: frozenset[str]
    log: float
    """Logarithm of the run's samples/s."""


class _Comparison(NamedTuple):
    """Log of a node's relative speed, with its variance, from one voter's runs on the node and on other nodes."""

    name: str
    voter: Hashable
    log: float
    variance: float
    runs: Sequence[_Run]


def slow_nodes(histories: Iterable[JobHistory], now: float) -> dict[str, SlowNode]:
    """Return the slow nodes by name, the most certain first. `now` is Unix time in seconds."""
    alike: dict[Hashable, list[_Run]] = defaultdict(list)
    for run in _runs(histories, now):
        alike[run.alike].append(run)
    names = frozenset(name for runs in alike.values() for run in runs for name in run.names)
    noise = _noise_of(alike.values())
    compared = {key: _compared(runs, noise) for key, runs in alike.items()}
    found: dict[str, SlowNode] = {}
    while len(found) < max(int(MOST * len(names)), 1):
        slow = _slow_by(compared.values())
        if not slow:
            break
        worst = min(slow, key=lambda node: (math.log(node.factor) / node.doubt, node.name))
        found[worst.name] = worst
        for key, runs in alike.items():
            clean = [run for run in runs if worst.name not in run.names]
            if len(clean) < len(runs):
                alike[key], compared[key] = clean, _compared(clean, noise)
    return found


def _runs(histories: Iterable[JobHistory], now: float) -> list[_Run]:
    points = [
        (history, point)
        for history in histories
        for point in history.placed
        if abs(now - point.time) <= RECENT_S and 1.0 / ABSURD < point.samples_per_s < ABSURD
    ]
    alone = len({history.job.user for history, _ in points}) < VOTES
    found = []
    for history, point in points:
        owner, job_id = history.job.user, history.job.job_id
        script = plain_spec(history.spec) if history.spec is not None else job_id
        names = frozenset(point.node_names)
        alike = owner, script, len(names), point.gpus_per_node, point.batch, point.kind
        voter = job_id if alone else owner
        found.append(_Run(alike, voter, (job_id, point.restart), owner, names, math.log(point.samples_per_s)))
    return found


def _noise_of(alike: Iterable[Sequence[_Run]]) -> dict[str, float]:
    """Return, for each owner, the standard deviation of log speed between comparable runs; at least `COMPARED`.

    It follows from the lower quartile of pairwise differences (as in Rousseeuw and Croux, JASA 1993), which slow nodes
    hardly affect.
    """
    apart: dict[str, list[float]] = defaultdict(list)
    for runs in alike:
        if len(runs) >= ENOUGH:
            logs = sorted(run.log for run in runs)[:: -(-len(runs) // MANY)]
            apart[runs[0].owner] += [other - one for one, other in combinations(logs, 2)]
    quartiles = {owner: sorted(found)[(len(found) - 1) // 4] for owner, found in apart.items()}
    return {owner: max(NORMAL * quartile, COMPARED) for owner, quartile in quartiles.items()}


def _compared(runs: Sequence[_Run], noise: Mapping[str, float]) -> list[_Comparison]:
    """Return a comparison for each node and each voter with runs on it. All `runs` are comparable."""
    found = []
    each = noise.get(runs[0].owner, COMPARED) ** 2 if runs else 0.0
    for name in sorted(frozenset(name for run in runs for name in run.names)):
        elsewhere = [run.log for run in runs if name not in run.names]
        here = [run for run in runs if name in run.names] if elsewhere else []
        for voter in dict.fromkeys(run.voter for run in here):
            mine = [run for run in here if run.voter == voter]
            slower = statistics.median(run.log for run in mine) - statistics.median(elsewhere)
            slower = min(max(slower, math.log(SLOWEST)), -math.log(SLOWEST))
            weight = sum(1.0 / len(run.names) for run in mine)
            variance = each * (1.0 / weight + 1.0 / len(elsewhere))
            found.append(_Comparison(name, voter, slower, variance, mine))
    return found


def _slow_by(comparisons: Iterable[Sequence[_Comparison]]) -> list[SlowNode]:
    votes: dict[str, dict[Hashable, list[_Comparison]]] = defaultdict(lambda: defaultdict(list))
    for one in chain.from_iterable(comparisons):
        votes[one.name][one.voter].append(one)
    return [node for name, by_voter in votes.items() if (node := _judged(name, by_voter)) is not None]


def _judged(name: str, votes: Mapping[Hashable, Sequence[_Comparison]]) -> SlowNode | None:
    """Return the node if the votes show that it is slow, else None. A voter's vote is the median of his comparisons."""
    if len(votes) < VOTES:
        return None
    each = [middle([(one.log, one.variance) for one in found]) for found in votes.values()]
    logs, variances = sorted(log for log, _ in each), [variance for _, variance in each]
    # The median; if the number is even, the milder of the middle two.
    log, variance = logs[len(logs) // 2], statistics.median(variances) / len(each)
    believed = Factor(0.0, SPREAD**2).after([(log, variance)])
    doubt = math.sqrt(believed.variance)
    if believed.mean > math.log(SLOW) or believed.mean + SURE * doubt > 0:
        return None
    witnesses = [run for found in votes.values() for one in found for run in one.runs]
    runs, owners = {run.run for run in witnesses}, {run.owner for run in witnesses}
    return SlowNode(name, max(math.exp(believed.mean), SLOWEST), doubt, len(runs), len(owners))
