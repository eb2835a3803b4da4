"""GPUs that resizes under way are about to need: free in Slurm's eyes, but spoken for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ones_db import ResizeRecord
from slurm_ones.observe.eligibility import Elastic
from slurm_ones.slurm.gpus import take
from slurm_ones.slurm.model import Shape


def new_of(resize: ResizeRecord) -> Shape:
    """The shape that the resize was begun for."""
    return Shape(resize.new_nodes, resize.new_gpus_per_node)


def old_of(resize: ResizeRecord) -> Shape:
    """The shape that the job had before it."""
    return Shape(resize.old_nodes, resize.old_gpus_per_node)


def target_of(resize: ResizeRecord) -> Shape:
    """The shape that the resize is heading for: the old one once it is on its way back."""
    if resize.state.endswith("_back"):
        return old_of(resize)
    return new_of(resize)


def holdings(elastic: Elastic) -> dict[str, int]:
    """GPUs that the job holds on each of its nodes; none unless it runs."""
    return dict.fromkeys(elastic.job.node_list, elastic.shape.gpus_per_node) if elastic.job.running else {}


def set_aside(resizes: Iterable[ResizeRecord], elastic: Mapping[int, Elastic], free: dict[str, int]) -> None:
    """Take from `free` what each resize still needs; nothing where its job has it already."""
    for resize in resizes:
        job = elastic.get(resize.job_id)
        if job is not None and not (job.job.running and job.shape == target_of(resize)):
            take(target_of(resize), free, holdings(job))
