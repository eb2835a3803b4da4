"""One step after another, until the void action is the best or no GPU is left (DeepRM §3.2)."""

from __future__ import annotations

import heapq

import numpy as np

from slurm_ones.decide.drl.network import Network
from slurm_ones.decide.drl.steps import Steps
from slurm_ones.schedule.policy import Ints


def best_steps(network: Network, steps: Steps, gpus: int, total: int) -> Ints:
    """(J,) steps that each job takes when the best-scored action is taken each time, of `gpus` GPUs of `total`.

    Each step costs as much as a heap's operation: the scores are had before, all at once.
    """
    scores = network.scores(steps.features).tolist()
    extra = steps.extra.tolist()
    taken = np.zeros(len(scores), dtype=np.int64)
    heap = [(-of_job[0], j, 0) for j, of_job in enumerate(scores) if of_job and extra[j][0] > 0]
    heapq.heapify(heap)
    free, growing = gpus, True
    while heap and free > 0:
        score, j, step = heapq.heappop(heap)
        growing = growing and -score >= network.void(steps.context(free / max(total, 1)))
        if (step > 0 and not growing) or extra[j][step] > free:
            continue
        free -= extra[j][step]
        taken[j] = step + 1
        if step + 1 < len(extra[j]) and extra[j][step + 1] > 0:
            heapq.heappush(heap, (-scores[j][step + 1], j, step + 1))
    return taken


def gpus_of(steps: Steps, taken: Ints) -> Ints:
    """(J,) GPUs after the steps taken; 0 after none."""
    if not steps.sizes.shape[1]:
        return np.zeros(len(taken), dtype=np.int64)
    last = np.maximum(taken - 1, 0)
    found: Ints = np.where(taken > 0, steps.sizes[np.arange(len(taken)), last], 0)
    return found
