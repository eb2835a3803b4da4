"""What a training script calls: five edits make an ordinary loop elastic.

job = ones.init(batch=64, max_batch=1024, max_local_batch=128, epochs=10)
model = job.ddp(model)
job.register(model=model, optimizer=optimizer, scheduler=scheduler)
loader = job.loader(dataset)
for epoch in job.epochs():
    for x, y in loader:         # asking for the next batch is the step boundary
        ...
    job.epoch_end(accuracy=...)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ones_wrapper.batch import RULES, lr_factor
from ones_wrapper.checkpoint import Progress, State, Stateful
from ones_wrapper.data import Feed, Share, local_indices
from ones_wrapper.group import average, join
from ones_wrapper.noise import NoiseScale
from ones_wrapper.protocol import Spec
from ones_wrapper.run import Run


def init(
    *,
    batch: int,
    epochs: int = 0,
    max_batch: int | None = None,
    max_local_batch: int | None = None,
    lr_rule: str = "linear",
    lr_cap: float = 8.0,
    checkpoint_every_s: float = 600.0,
    noise_scale: bool = True,
    backend: str | None = None,
) -> Job:
    """Join the run: build the process group, listen to signals and orders.

    `batch` is the global batch, in samples, that the script's learning rate was chosen for; `max_batch` the
    largest that it takes (default: `batch`, so only the GPUs change); `max_local_batch` the most samples per
    GPU per forward pass (default: `max_batch`). `epochs` is how many it means to train, 0 when it does not
    say. The learning rate follows the batch by `lr_rule` (linear, sqrt or none) up to `lr_cap` times.
    `noise_scale` measures the gradient noise scale on the way, by which the companion knows what larger
    batches are worth; on one GPU this keeps a copy of the gradients. `backend` overrides the choice between
    nccl (every rank has a GPU) and gloo.

    Call it once, before anything that needs the device. Raises ValueError for numbers that contradict each
    other.
    """
    started = time.time()
    max_batch = batch if max_batch is None else max_batch
    max_local_batch = max_batch if max_local_batch is None else max_local_batch
    if not 1 <= batch <= max_batch:
        raise ValueError(f"init: batch={batch} must be from 1 to max_batch={max_batch}")
    if max_local_batch < 1:
        raise ValueError(f"init: max_local_batch={max_local_batch} must be 1 or more")
    if epochs < 0:
        raise ValueError(f"init: epochs={epochs} must be 0 (does not say) or more")
    if lr_rule not in RULES:
        raise ValueError(f"init: lr_rule={lr_rule!r} is none of {', '.join(RULES)}")
    if lr_cap <= 0:
        raise ValueError(f"init: lr_cap={lr_cap} must be positive")
    group = join(backend)
    spec = Spec(batch, max_batch, max_local_batch, 0, epochs)
    run = Run(group, spec, lambda b: lr_factor(b, batch, lr_rule, lr_cap), checkpoint_every_s, started)
    if noise_scale:
        run.noise = NoiseScale(group)
    return Job(run)


class Job:
    """One run of an elastic training job, as its script sees it. Made by `init`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._share = Share(0, 1, 1)

    @property
    def rank(self) -> int:
        """This process's number among the ranks; do files and printing on rank 0."""
        return self._run.group.rank

    @property
    def world(self) -> int:
        """World size."""
        return self._run.group.world

    @property
    def device(self) -> torch.device:
        """Where the model and the batches belong."""
        return self._run.group.device

    @property
    def batch(self) -> int:
        """Global batch in force, in samples."""
        return self._run.batch

    @property
    def lr_factor(self) -> float:
        """Learning rate in force over the one that the script set."""
        return self._run.lr_factor

    @property
    def progress(self) -> Progress:
        """How far training has come."""
        return self._run.progress

    def ddp(self, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """The model in data parallel, its gradients averaged over samples rather than over ranks.

        So the script's loss stays the mean over its local batch though local batches may differ in size.
        `options` are those of torch's DistributedDataParallel.
        """
        model = model.to(self.device)
        ids = [self.device] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **options)
        # A lambda, since DDP judges a function's annotations and takes no strings.
        wrapped.register_comm_hook(self, lambda job, bucket: job._average(bucket.index(), bucket.buffer()))
        return wrapped

    def _average(self, bucket: int, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        (_, _, total), samples, noise = self._share, self._share.samples, self._run.noise
        if noise is None:
            return average(gradient, samples, total)
        noise.local(bucket, gradient, samples, total)
        return average(gradient, samples, total, lambda summed: noise.whole(summed, total))

    def register(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None = None,
        **others: Stateful,
    ) -> None:
        """Say once what training carries, and load the newest good checkpoint into it.

        `others` are further objects with `state_dict` and `load_state_dict`, such as a gradient scaler.
        """
        if self._run.state is not None:
            raise RuntimeError("register: call it once, with everything that training carries")
        if self.world > 1 and not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "register: model is not the one that job.ddp returned; its gradients would not be averaged"
            )
        extras = dict(others)
        if scheduler is not None:
            extras["scheduler"] = scheduler
        self._run.load(State(model, optimizer, extras))

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> Loader:
        """The training data: a map-style dataset, cut into the batch in force, each sample once an epoch.

        `seed` fixes the order of every epoch. `options` are further ones of torch's DataLoader (`pin_memory`,
        …); not those that choose samples, since that is done here.
        """
        if self._run.feed is not None:
            raise RuntimeError("loader: a job trains on one dataset; use an ordinary DataLoader to evaluate on another")
        if taken := {"batch_size", "sampler", "batch_sampler", "drop_last", "generator"} & set(options):
            raise ValueError(f"loader: {', '.join(sorted(taken))} cannot be given; ones.init holds the batch")
        self._run.feed = Feed(
            dataset, shuffle=shuffle, seed=seed, collate_fn=collate_fn, num_workers=num_workers, options=options
        )
        return Loader(self)

    def epochs(self) -> Iterator[int]:
        """The epochs still to train, from the one that the checkpoint stopped in; without end where init's is
        0.
        """
        run = self._run
        run.begin()
        while run.spec.epochs == 0 or run.progress.epoch < run.spec.epochs:
            epoch = run.progress.epoch
            yield epoch
            if run.progress.epoch == epoch:
                run.end_epoch(None, None)
        run.finish()

    def loss(self, loss: torch.Tensor | float) -> None:
        """Tell the loss of this step, the mean over the local batch. Costs no wait for the GPU."""
        self._run.meter.loss(loss, self._share.samples)

    def epoch_end(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """The epoch is over: report it and go on to the next. `loss` overrides the mean of what `job.loss`
        was told.

        All ranks call it; it is a step boundary.
        """
        self._run.end_epoch(loss, accuracy)

    def _steps(self) -> Iterator[Any]:
        """This rank's local batches from the cursor to the end of the present epoch."""
        run = self._run
        run.begin()
        progress, feed, scale = run.progress, run.feed, run.scale
        assert feed is not None and scale is not None
        epoch, order = progress.epoch, feed.order(progress.epoch)
        while progress.epoch == epoch and progress.cursor < feed.samples:
            batch = run.batch
            run.meter.start()
            for share, local in feed.batches(order, progress.cursor, batch, self.world, self.rank):
                self._share, scale.stepped = share, False
                used = local_indices(order, share)[: share.samples] if run.trace else []
                try:
                    yield local
                except GeneratorExit:  # the script left the loop: the step counts if the optimizer made it
                    if scale.stepped:
                        run.commit(share, used)
                    raise
                run.commit(share, used)
                run.act()
                run.meter.start()
                if run.batch != batch:
                    break


class Loader:
    """The batches of the present epoch; made by `Job.loader`. Asking it for the next batch is the step
    boundary.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        return self._job._steps()
