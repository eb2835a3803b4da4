"""LWF-κ, the packing rule of Wang et al. (arXiv 2002.10105), under the sizes that `ones` chooses: a rival.

The paper was not at hand: this follows the rule's name, as far as it applies to unshared GPUs.

    slurm-ones simulate --plain --network 4x4:3 --policy ones --policy benchmarks.lwf:OnesLwf
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from slurm_ones.decide.ones.ones import Ones, Options
from slurm_ones.schedule.places import Places
from slurm_ones.schedule.policy import Allocation, ClusterView, Floats, JobView, Schedule


def least_workload_first(
    cluster: ClusterView,
    jobs: Sequence[JobView],
    allocations: Mapping[int, Allocation],
    workload: Mapping[int, float],
    kappa: int = 1,
) -> dict[int, tuple[str, ...]]:
    """LWF-κ (Wang et al., arXiv 2002.10105), as far as it applies to GPUs that are not shared: a rival.

    A job of at most `kappa` GPUs gets those on the nodes with the least `workload` left, in seconds for each GPU of a
    job; a larger one fills the nodes with the least first, one after the other. Leaf switches do not enter.
    """
    stay = [
        job
        for job in jobs
        if job.shape is not None
        and (job.fixed or (job.job_id in allocations and allocations[job.job_id].shape.gpus == job.shape.gpus))
    ]
    ids = {job.job_id for job in stay}
    places = Places(cluster, stay)
    load: Floats = np.zeros(len(places.names))
    for job in stay:
        for n in places.held(job):
            load[n] += job.nodes[places.names[n]] * workload.get(job.job_id, 0.0)
    found: dict[int, tuple[str, ...]] = {}
    change = [job for job in jobs if job.job_id in allocations and job.job_id not in ids]
    for job in sorted(change, key=lambda job: -allocations[job.job_id].shape.gpus):
        gpus, chosen = allocations[job.job_id].shape.gpus, list[int]()
        key = (load,) if gpus <= kappa else (load, np.where(places.free >= min(gpus, cluster.gpus_per_node), 0, 1))
        for n in np.lexsort(key):
            taken = int(min(gpus, places.free[n]))
            if taken:
                chosen.append(int(n))
                places.free[n] -= taken
                load[n] += taken * workload.get(job.job_id, 0.0)
                gpus -= taken
            if not gpus:
                found[job.job_id] = tuple(places.names[n] for n in chosen)
                break
    return found


class OnesLwf:
    """`ones` that knows nothing of places, with LWF-κ's nodes."""

    name = "ones+lwf"

    def __init__(self, kappa: int = 1) -> None:
        self._inner = Ones(Options(places=False))
        self._kappa = kappa

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """See `slurm_ones.schedule.policy.Policy`."""
        found = self._inner.decide(cluster, jobs, now, rng)
        workload = {job.job_id: _left_s(job, found.allocations) for job in jobs}
        nodes = least_workload_first(cluster, jobs, found.allocations, workload, self._kappa)
        return replace(
            found,
            allocations={i: replace(got, nodes=nodes.get(i, ())) for i, got in found.allocations.items()},
        )


def _left_s(job: JobView, allocations: Mapping[int, Allocation]) -> float:
    """Seconds that the job is expected to train for at what it gets."""
    got = allocations.get(job.job_id)
    if got is None:
        return 0.0
    at = [np.array([n]) for n in (got.shape.nodes, got.shape.gpus, got.batch)]
    goodput = float(job.model.throughput(*at)[0] * job.efficiency.efficiency(at[2])[0])
    return job.progress.beta * job.dataset / max(goodput, 1e-9)
