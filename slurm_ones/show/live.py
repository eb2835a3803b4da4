"""Data of a live view: the companion's health, jobs with their reasons, and the GPUs that jobs hold.

Everything is read in one transaction, even if only a part is shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from ones_db import (
    DecisionJobRecord,
    HealthRecord,
    HeldRecord,
    JobSummary,
    LeaderRecord,
    NodeRecord,
    PromiseRecord,
    Store,
)
from ones_db.reasons import CAUSES, NO_REASON, WRONG, cause_of
from slurm_ones.show.columns import ShownJob, ShownNode
from slurm_ones.text import seconds

ENDED = 100
"""Largest number of ended jobs in a view: the last ones. So a view costs the same at a site with a long history."""

KEPT = 4096
"""Largest number of jobs whose rendered form is cached."""

LATE = 3.0
"""Intervals without a tick after which a companion counts as silent. One late tick is normal if Slurm is slow."""


class NotSeenYet(Exception):
    """Error: the companion has published nothing yet for this user. The message says why."""


@dataclass(frozen=True)
class Live:
    """A cluster's elastic jobs, nodes and companion at one moment."""

    cluster: str
    jobs: tuple[ShownJob, ...] = ()
    """Jobs that have not ended and the last ended ones, by submission time."""
    held: tuple[HeldRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    """Nodes by name; empty if the reader may not see them."""
    leader: LeaderRecord | None = None
    health: HealthRecord | None = None
    asked: bool = False
    """True if the states are from Slurm, and newer than the companion's last tick."""


def node_rows(nodes: Iterable[NodeRecord], held: Iterable[HeldRecord]) -> list[ShownNode]:
    """Return the nodes by name, with the GPUs that jobs hold on them. Nodes that are known only from jobs come last."""
    holding: dict[str, dict[int, int]] = {}
    for one in held:
        of_node = holding.setdefault(one.node, {})
        of_node[one.job_id] = of_node.get(one.job_id, 0) + one.gpus
    rows = [ShownNode(node.name, node.state, node.gpus, holding.pop(node.name, {})) for node in nodes]
    rows += [ShownNode(name, "", 0, holding[name]) for name in sorted(holding)]
    return sorted(rows, key=lambda node: (not node.state, _natural(node.name)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which n2 comes before n10."""
    parts = [part.lstrip("0") if n % 2 else part for n, part in enumerate(re.split(r"([0-9]+)", name))]
    return [(len(part) if n % 2 else -1, part) for n, part in enumerate(parts)]


def read_live(store: Store, also: Collection[int] = (), *, only: Collection[int] = (), whole: bool = False) -> Live:
    """Return the jobs that have not ended and the last `ENDED` ended ones, or all ended ones if `whole`.

    The jobs `also` are added. If `only` is given, no other jobs are returned. Raises `StoreError`.
    """
    with store.one_moment():
        jobs = store.job_summaries(sorted(only)) if only else store.job_summaries(ended=None if whole else ENDED)
        older = sorted({*also} - {job.job_id for job in jobs})
        jobs += store.job_summaries(older) if older else []
        jobs.sort(key=lambda job: (job.submit_time, job.job_id))
        newest = store.newest_decisions()
        promises = store.promises() | store.promises([job.job_id for job in jobs if job.end_time is not None])
        shown = tuple(_shown(job, newest.get(job.job_id), promises.get(job.job_id)) for job in jobs)
        held, nodes = tuple(store.held()), tuple(store.nodes())
        return Live(store.cluster, shown, held, nodes, store.leader(), store.health())


@lru_cache(maxsize=KEPT)
def _shown(job: JobSummary, decided: DecisionJobRecord | None, promise: PromiseRecord | None) -> ShownJob:
    if job.end_time is not None:
        return ShownJob(job, promise=promise)
    outcome, reason = (decided.outcome, decided.reason) if decided is not None else (NO_REASON, NO_REASON)
    # That a change begins says nothing of why it does.
    why = str(job.refusal) or str(reason if outcome.code == "begins" else outcome) or str(reason)
    cause = cause_of(job.refusal_code, outcome.code, reason.code) or None
    return ShownJob(job, why, cause, str(reason) if reason.code in WRONG else "", promise)


def counted(codes: Iterable[str]) -> str:
    """Return the number of jobs for each cause as text: `8 jobs: capped by account; 1 job: interactive`."""
    counts = Counter(codes)
    shown = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{count} job{'s' * (count != 1)}: {CAUSES[code]}" for code, count in shown)


def as_of(health: HealthRecord | None, now: float, *, asked: bool = False) -> str:
    """Return a sentence on the age of the shown data. With `asked`, it says that states are Slurm's present ones."""
    fresh = "; states as Slurm has them now" if asked else ""
    if health is None or health.tick_time is None:
        return f"no companion has looked yet{fresh}"
    late = f"; it should look every {health.interval_s:.0f} s (slurm-ones status)" if silent(health, now) else ""
    return f"as the companion saw it {seconds(max(now - health.tick_time, 0.0))} ago{late}{fresh}"


def silent(health: HealthRecord | None, now: float) -> bool:
    """Return True if the companion's next tick is late. A companion that has never ticked is not silent."""
    if health is None or health.tick_time is None:
        return False
    return now - health.tick_time > LATE * health.interval_s
