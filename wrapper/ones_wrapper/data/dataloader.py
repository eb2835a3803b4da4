"""Settings of a script's own DataLoader, which `Job.loader` uses, too. The job chooses the samples of each batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

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
    """Return True if a sampler shuffles. Raises ValueError for a sampler that is neither random nor sequential."""
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        return True
    if sampler is None or isinstance(sampler, SequentialSampler):
        return False
    raise ValueError(SAMPLER.format(sampler=type(sampler).__name__))


class TakenOver(NamedTuple):
    """Dataset and settings of a script's own DataLoader, for `Job.loader`."""

    dataset: Any
    batch: int
    settings: dict[str, Any]


def taken_over(loader: DataLoader[Any]) -> TakenOver:
    """Return a DataLoader's dataset, batch size and other settings. Raises ValueError if its sampler is neither random
    nor sequential."""
    batches = own_batches(loader)
    if type(batches) is not BatchSampler:
        cut = type(batches).__name__ if batches is not None else "batch_size=None"
        raise ValueError(SAMPLER.format(sampler=cut))
    shuffle = not isinstance(loader.dataset, IterableDataset) and shuffles(batches.sampler)
    names = ["collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"]
    if loader.num_workers:
        names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    options = {name: getattr(loader, name) for name in names}
    settings = {"shuffle": shuffle, "drop_last": batches.drop_last, **options}
    return TakenOver(loader.dataset, batches.batch_size, settings)


def own_batches(loader: Any) -> Any:
    """Return the batch sampler that the script made, without Accelerate's wrapper around it."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "batch_sampler", batches)


def settings_of(loader: DataLoader[Any], batch: int) -> dict[str, Any]:
    """Return the options of `Job.loader` that correspond to a DataLoader. Raises the errors of `taken_over`, and
    ValueError if its batch size is not `batch`."""
    found = taken_over(loader)
    if found.batch != batch:
        raise ValueError(BATCH.format(given=found.batch, batch=batch))
    return found.settings if loader.generator is None else {"seed": loader.generator.initial_seed(), **found.settings}
