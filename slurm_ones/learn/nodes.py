"""Slow nodes, found by comparing jobs' throughput on different nodes at the same size, batch and kind of GPU.

PAL (Jain and others, SC 2024) finds slow GPUs by measurements before the cluster is used. Here no extra job is run. One
owner's jobs of one script are compared, if some ran on the node and some did not. A run on several nodes trains at the
pace of its slowest node, so its evidence is divided among them. The slowest certain node is found first; runs on it are
then no evidence about other nodes.

Measurements are reported by users, so one user cannot condemn a node:

- each owner has one vote, the median of their scripts, however many jobs they run;
- a node is slow if at least two owners vote so, and as slow as their median. Of an even number the milder of the middle
  two counts. If all measurements are of one owner, their jobs vote instead: nobody else can be harmed;
- no node counts as slower than `SLOWEST`, and at most a share `MOST` of all nodes as slow.
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
"""Lowest accepted speed of a node, relative to other nodes."""
SLOW = 0.9
"""Relative speed above which a node is not slow: time of day and neighbours explain such a difference."""
SPREAD = 0.15
"""Standard deviation of the logarithm of a node's speed, before any measurement."""
SURE = 2.5
"""Number of standard deviations by which a node must be slower: few of hundreds of equal nodes are so by chance."""
VOTES = 2
MOST = 1 / 3
"""Largest share of nodes that count as slow; at least one node."""
ENOUGH = 3
"""Fewest comparable runs from which their noise is estimated in pairs."""
MANY = 30
"""Largest number of comparable runs that enter the pairs for the noise estimate."""
NORMAL = 2.2219
"""Ratio of a normal distribution's standard deviation to the lower quartile of differences of two draws."""
RECENT_S = 7 * 86400.0
"""Largest age of measurements in seconds, so that a repaired node is used again."""


@dataclass(frozen=True)
class SlowNode:
    """A node that is slower than others."""

    name: str
    factor: float
    """Speed of the node relative to others, in [`SLOWEST`, `SLOW`]."""
    doubt: float
    """Standard deviation of the factor's logarithm."""
    runs: int
    """Number of runs on the node that show it."""
    owners: int
    """Number of owners of these runs."""


class _Run(NamedTuple):
    """Throughput of one run at one batch."""

    alike: Hashable
    """Key that is equal for runs that can be compared."""
    voter: Hashable
    run: Hashable
    owner: str
    names: frozenset[str]
    log: float
    """Logarithm of the run's samples/s."""


class _Comparison(NamedTuple):
    """One voter's comparable runs on a node: log of the node's relative speed, and its variance."""

    name: str
    voter: Hashable
    log: float
    variance: float
    runs: Sequence[_Run]


def slow_nodes(histories: Iterable[JobHistory], now: float) -> dict[str, SlowNode]:
    """Return the slow nodes by name, the most certain first. `now` is in Unix seconds."""
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
    """Return the standard deviation of log speed over comparable runs, by owner, `COMPARED` at least. It uses the lower
    quartile of pairwise differences (as in Rousseeuw and Croux, JASA 1993), so slow nodes do not count."""
    apart: dict[str, list[float]] = defaultdict(list)
    for runs in alike:
        if len(runs) >= ENOUGH:
            logs = sorted(run.log for run in runs)[:: -(-len(runs) // MANY)]
            apart[runs[0].owner] += [other - one for one, other in combinations(logs, 2)]
    quartiles = {owner: sorted(found)[(len(found) - 1) // 4] for owner, found in apart.items()}
    return {owner: max(NORMAL * quartile, COMPARED) for owner, quartile in quartiles.items()}


def _compared(runs: Sequence[_Run], noise: Mapping[str, float]) -> list[_Comparison]:
    """Return the comparisons of each node over one owner's comparable runs."""
    found = []
    each = noise.get(runs[0].owner, COMPARED) ** 2 if runs else 0.0
    for name in sorted(frozenset(name for run in runs for name in run.names)):
        elsewhere = [run.log for run in runs if name not in run.names]
        here = [run for run in runs if name in run.names] if elsewhere else []
        for voter, mine in _by_voter(here).items():
            slower = statistics.median(run.log for run in mine) - statistics.median(elsewhere)
            weight = sum(1.0 / len(run.names) for run in mine)
            variance = each * (1.0 / weight + 1.0 / len(elsewhere))
            found.append(_Comparison(name, voter, _bounded(slower), variance, mine))
    return found


def _slow_by(comparisons: Iterable[Sequence[_Comparison]]) -> list[SlowNode]:
    votes: dict[str, dict[Hashable, list[_Comparison]]] = defaultdict(lambda: defaultdict(list))
    for one in chain.from_iterable(comparisons):
        votes[one.name][one.voter].append(one)
    return [node for name, by_voter in votes.items() if (node := _judged(name, by_voter)) is not None]


def _by_voter(runs: Iterable[_Run]) -> dict[Hashable, list[_Run]]:
    found: dict[Hashable, list[_Run]] = defaultdict(list)
    for run in runs:
        found[run.voter].append(run)
    return found


def _bounded(log: float) -> float:
    return min(max(log, math.log(SLOWEST)), -math.log(SLOWEST))


def _judged(name: str, votes: Mapping[Hashable, Sequence[_Comparison]]) -> SlowNode | None:
    """Return the node if each voter's comparisons together show it slow, else None."""
    if len(votes) < VOTES:
        return None
    each = [middle([(one.log, one.variance) for one in found]) for found in votes.values()]
    logs, variances = sorted(log for log, _ in each), [variance for _, variance in each]
    # The middle one; of an even number the milder of two.
    log, variance = logs[len(logs) // 2], statistics.median(variances) / len(each)
    believed = Factor(0.0, SPREAD**2).after([(log, variance)])
    doubt = math.sqrt(believed.variance)
    if believed.mean > math.log(SLOW) or believed.mean + SURE * doubt > 0:
        return None
    witnesses = [run for found in votes.values() for one in found for run in one.runs]
    runs, owners = {run.run for run in witnesses}, {run.owner for run in witnesses}
    return SlowNode(name, max(math.exp(believed.mean), SLOWEST), doubt, len(runs), len(owners))
