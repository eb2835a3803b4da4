"""The caps of a site as they bear on one partition's elastic jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from ones_db import ResizeRecord
from slurm_ones.config import LimitSettings
from slurm_ones.observe.eligibility import Observation
from slurm_ones.rules.caps import Cap
from slurm_ones.rules.reserved import target_of
from slurm_ones.slurm.gpus import partition_gpus
from slurm_ones.slurm.model import Job


def caps_of(
    seen: Observation,
    partition: str,
    limits: LimitSettings,
    whole_node_gpus: Mapping[str, int],
    resizes: Iterable[ResizeRecord] = (),
) -> tuple[Cap, ...]:
    """The share of the partition, and the caps of each user and account that have elastic jobs in it."""
    here = {id_: one.job for id_, one in seen.elastic.items() if one.job.partition.split(",")[0] == partition}
    targets = {resize.job_id: target_of(resize).gpus for resize in resizes}
    there = [
        (one.job, max(one.shape.gpus if one.job.running else 0, targets.get(id_, 0)))
        for id_, one in seen.elastic.items()
        if id_ not in here
    ]
    users = _named(here, there, lambda job: job.user, "user", limits.gpus_per_user, limits.gpus_of_user)
    accounts = _named(here, there, lambda job: job.account, "account", limits.gpus_per_account, limits.gpus_of_account)
    return (*_share(seen, partition, here, limits.share, whole_node_gpus), *users, *accounts)


def _share(
    seen: Observation, partition: str, here: Mapping[int, Job], share: float, whole_node_gpus: Mapping[str, int]
) -> Iterator[Cap]:
    part = seen.snapshot.partitions.get(partition)
    if share >= 1 or part is None or not here:
        return
    full, _ = partition_gpus(part, seen.snapshot, whole_node_gpus)
    nodes = [seen.snapshot.nodes[name] for name in part.node_names if name in seen.snapshot.nodes]
    gpus = int(share * sum(full if partition in whole_node_gpus else node.gpus for node in nodes) + 1e-9)
    yield Cap(gpus, frozenset(here), f"elastic jobs grow within {gpus} GPUs of partition {partition} (limits.share)")


def _named(
    here: Mapping[int, Job],
    there: Iterable[tuple[Job, int]],
    name_of: Callable[[Job], str],
    kind: str,
    general: int | None,
    own: Mapping[str, int],
) -> Iterator[Cap]:
    """A cap for each name; `there` are jobs in other partitions with the GPUs that they have or are about to."""
    jobs: dict[str, set[int]] = defaultdict(set)
    for job_id, job in here.items():
        jobs[name_of(job)].add(job_id)
    elsewhere: dict[str, int] = defaultdict(int)
    for job, gpus in there:
        elsewhere[name_of(job)] += gpus
    for name, ids in sorted(jobs.items()):
        most = own.get(name, general)
        if name and most is not None:
            setting = f"limits.gpus_of_{kind}" if name in own else f"limits.gpus_per_{kind}"
            words = f"elastic jobs of {kind} {name} grow within {most} GPUs in all ({setting})"
            yield Cap(most - elsewhere[name], frozenset(ids), words)
