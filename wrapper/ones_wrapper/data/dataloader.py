"""A script's own DataLoader, whose settings the job takes over: all but which samples make a batch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

SAMPLER = (
    "the training data comes through {sampler}: which samples a step uses is decided by slurm-ones, so that none is "
    "lost or repeated at a resize. Use shuffle=True, or the dataset's own order"
)
BATCH = (
    "prepare: the DataLoader's batch_size is {given}, and init's batch is {batch}: both are the samples of one step on "
    "all GPUs together, by which schedules count. Give both the same number; what one GPU holds is init's "
    "max_local_batch"
)


def shuffles(sampler: Any) -> bool:
    """Tell whether a sampler shuffles. Raises ValueError for one that is neither random nor sequential."""
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        return True
    if sampler is None or isinstance(sampler, SequentialSampler):
        return False
    raise ValueError(SAMPLER.format(sampler=type(sampler).__name__))


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a DataLoader that do not choose samples, for `Job.loader`."""
    names = ["collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"]
    if loader.num_workers:
        names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    return {name: getattr(loader, name) for name in names}


def settings_of(loader: DataLoader[Any], batch: int) -> dict[str, Any]:
    """All that `Job.loader` takes over of a DataLoader, besides its dataset. Raises ValueError if it cuts batches other
    than into `batch` samples in the dataset's or a random order.
    """
    if loader.batch_size is None:
        cut = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "batch_size=None"
        raise ValueError(SAMPLER.format(sampler=cut))
    if loader.batch_size != batch:
        raise ValueError(BATCH.format(given=loader.batch_size, batch=batch))
    stream = isinstance(loader.dataset, IterableDataset)
    found = {"shuffle": not stream and shuffles(loader.sampler), "drop_last": loader.drop_last, **options_of(loader)}
    return found if loader.generator is None else {"seed": loader.generator.initial_seed(), **found}
