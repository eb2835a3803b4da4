"""The object by which a training script uses its run: model, data, evaluation, reports and checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ones_wrapper.checkpoint.registered import check_exchanged, mapped, normalizes_batches, state_of
from ones_wrapper.data.coreset import Coreset
from ones_wrapper.data.dataloader import settings_of
from ones_wrapper.data.feed import Feed
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.data.streams import make_feed
from ones_wrapper.files.kept_files import KeptFile
from ones_wrapper.gradients.accumulation import Accumulation
from ones_wrapper.gradients.exchange import DdpExchange, Exchange
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.gradients.schedule import Schedules
from ones_wrapper.group import TorchGroup
from ones_wrapper.plugins import load
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.run.evaluation import Evaluation
from ones_wrapper.run.given import NOT_TOGETHER, PARALLEL, Given, named_by_type, sorted_by_kind, unused_name
from ones_wrapper.run.loop import Loader
from ones_wrapper.run.run import Run
from ones_wrapper.script.first_steps import averages
from ones_wrapper.script.line import left_on_purpose
from ones_wrapper.strategy import Strategy

TWO = (
    "loader: a job trains on one dataset: to train on two, make one Dataset whose item holds a sample of each; to "
    "evaluate on another use job.evaluate or an ordinary DataLoader"
)


class Job:
    """One run of an elastic training job, for its script. `init` returns it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._models: dict[str, torch.nn.Module] = {}
        self._found: dict[str, float] = {}
        """Accuracy and loss from the script for the present epoch's report."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0. Write files and print on rank 0 only. In a block that waits to join, it equals
        no number, and prints as "none yet"."""
        return self._run.rank

    @property
    def world(self) -> int:
        """World size. Unknown, like `rank`, in a block that waits to join."""
        return self._run.known(self._run.group.world)

    @property
    def strategy(self) -> Strategy | None:
        """The strategy by which the job trains; None for plain data parallel."""
        return self._run.settings.strategy

    @property
    def replicas(self) -> int:
        """Number of replicas over which a step's samples are split: the world size, unless a replica has several
        ranks."""
        return self._run.known(self._run.sizes.division.replicas)

    @property
    def replica(self) -> int:
        """Number of this rank's replica, from 0; all ranks of a replica get the same samples."""
        return self._run.known(self._run.sizes.division.replica)

    @property
    def device(self) -> torch.device:
        """Device of this rank, for its model and batches."""
        return self._run.group.device

    @property
    def batch(self) -> int:
        """Present global batch, in samples."""
        return self._run.sizes.batch

    @property
    def lr_factor(self) -> float:
        """Learning rate that the optimizer uses, divided by the rate that the script set."""
        return self._run.sizes.lr_factor

    @property
    def progress(self) -> TrainingProgress:
        """Position of the training: epoch, step, samples and more."""
        return self._run.progress

    @property
    def run_id(self) -> str:
        """Name for experiment loggers, the same in all runs of this job:

            wandb.init(id=job.run_id, resume="allow")
            SummaryWriter(log_dir=f"tensorboard/{job.run_id}", purge_step=job.progress.step)

        A job that resumes from another job's checkpoint has that job's name after `register`. The name is stored in
        checkpoints and in the file `run-id` of the job's directory.
        """
        return self._run.run_id

    @property
    def base_steps(self) -> int:
        """Samples used so far, in base batches; the last base batch of an epoch counts as full. With the base batch as
        global batch, this is the number of steps. Use it as the iteration in a formula of the learning rate: `lr =
        cosine(job.base_steps)`."""
        progress = self._run.progress
        self._run.loop.first_steps.counts_by_job = True
        return (progress.samples + progress.padding) // self._run.sizes.spec.base_batch

    @property
    def updates(self) -> bool:
        """True in the last accumulation step of a step, in which the optimizer acts. Put actions that occur once a
        step, such as clipping gradients, under `if job.updates:`."""
        return self._run.loop.part.last

    def prepare(self, *things: Any) -> Any:
        """Make the training's objects elastic, and return them in the order in which they were given:

            model, optimizer, loader, scheduler = job.prepare(model, optimizer, data, scheduler)

        - Models are returned as by `ddp`, on the job's device. A model from `ddp`, `fsdp` or `exchange` is returned as
          it is. A model without trainable parameters is only moved to the device.
        - Data is a dataset, or a DataLoader whose batch size is init's `batch`. The DataLoader's other settings are
          kept: see `loader`.
        - Optimizers, schedulers, gradient scalers, averages, other objects with a state, and dicts of plain values are
          registered: see `register`. The newest good checkpoint is loaded into them and the models. Optimizers and
          schedulers may have been made with the original model.

        Further calls before training begins may prepare data at any time, but models only before the optimizers. Give
        optimizers and all other objects in one call. Synchronises all ranks.
        """
        given = sorted_by_kind(things)
        found: dict[int, Any] = {id(one): self._prepared(one) for one in given.models}
        for name, model in named_by_type(given.models).items():
            if any(True for _ in chain(model.parameters(), model.buffers())):
                self._models[unused_name(name, self._models)] = found[id(model)]
        if given.carried:
            if not (given.optimizers and self._models):
                raise ValueError(NOT_TOGETHER.format(names=", ".join(type(one).__name__ for one in given.carried)))
            found |= self._prepare_carried(given)
        for data in given.data:
            loader = isinstance(data, DataLoader)
            options = settings_of(data, self._run.sizes.spec.base_batch) if loader else {}
            found[id(data)] = self.loader(data.dataset if loader else data, **options)
        result = tuple(found[id(one)] for one in things)
        return result[0] if len(result) == 1 else result

    def _prepared(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._run.loop.exchanges.owns(model):
            return model
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise ValueError(PARALLEL.format(kind=type(model).__name__))
        trained = any(parameter.requires_grad for parameter in model.parameters())
        return self.ddp(model) if trained else model.to(self.device)

    def _prepare_carried(self, given: Given) -> dict[int, Any]:
        """Return the elastic form of optimizers, schedulers and others, by the id of the given object."""
        for one in given.optimizers:
            if one.state and self.device.type != "cpu":  # made before the model moved, as Adagrad's is
                one.load_state_dict(one.state_dict())
        for one in given.others:
            if isinstance(one, torch.nn.Module):  # an average
                one.to(self.device)
        optimizers, others = named_by_type(given.optimizers), named_by_type(given.others)
        models = next(iter(self._models.values())) if len(self._models) == 1 else self._models
        optimizer = given.optimizers[0] if len(optimizers) == 1 else optimizers
        carried, *rest = self._carry(models, optimizer, others)
        returned = carried.values() if isinstance(carried, dict) else (carried,)
        pairs = zip((*given.optimizers, *given.others), (*returned, *rest), strict=True)
        return {id(one): it for one, it in pairs}

    def ddp(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Return the model in data parallel. Its gradients are averaged over the samples of a step, not over ranks.

        So the script's loss stays the mean over its local batch, even if local batches differ in size. `options` are
        those of torch's DistributedDataParallel; over MPI, only `bucket_cap_mb` and `broadcast_buffers`. Synchronises
        all ranks: each gets rank 0's parameters. In training, each gradient is exchanged once a step, during backward.

        Call it once for each model; the gradient noise scale is measured on the first. A parameter that is trained at
        any time must require a gradient now, and can be frozen afterwards.
        """
        run = self._run
        strategy = run.settings.strategy
        its = strategy.exchange(run.group, self._noise) if strategy is not None else None
        wrapped = self._wrap(its or self._averaging(), model, options)
        if strategy is not None:
            strategy.wrapped(wrapped)
        return wrapped

    def _averaging(self) -> Exchange:
        run = self._run
        if isinstance(run.group, TorchGroup):
            return DdpExchange(run.group, self._noise)
        from ones_wrapper.gradients.mpi_exchange import MpiExchange
        from ones_wrapper.group.mpi_group import MpiGroup

        assert isinstance(run.group, MpiGroup)
        return MpiExchange(run.group, self._noise)

    def fsdp(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Return the model sharded over the ranks by FSDP2 (`fully_shard`). Its gradients are averaged over the samples
        of a step.

        `modules` selects the modules that are gathered as units: a type, several types, or a function that is true for
        such a module. Other options are `fully_shard`'s. Synchronises all ranks. In training, each accumulation step
        gathers a unit's parameters twice, for forward and backward, and exchanges its gradients once.
        """
        from ones_wrapper.gradients.fsdp import FsdpExchange

        self._check_averaged("fsdp")
        return self._wrap(FsdpExchange(self._run.group, self._noise), model, options)

    def exchange(self, model: torch.nn.Module, name: str, **options: Any) -> torch.nn.Module:
        """Return the model with a gradient exchange from another package, a subclass of `gradients.exchange.Exchange`.

        `name` is the name that the package registers in the entry points `ones_wrapper.exchanges`, or
        `package.module:Class`. `options` are passed to the exchange's `wrap`. Raises ValueError if no exchange has this
        name.
        """
        self._check_averaged("exchange")
        made = load("ones_wrapper.exchanges", name, ())(self._run.group, self._noise)
        if not isinstance(made, Exchange):
            raise ValueError(f"exchange: {name} is no subclass of ones_wrapper.gradients.exchange.Exchange")
        return self._wrap(made, model, options)

    def _check_averaged(self, what: str) -> None:
        strategy = self._run.settings.strategy
        if strategy is not None and strategy.exchange(self._run.group, None) is not None:
            raise ValueError(f"{what}: {strategy.name} brings a gradient exchange of its own; call job.ddp(model)")

    @property
    def _noise(self) -> NoiseScale | None:
        return None if len(self._run.loop.exchanges) else self._run.loop.noise

    def _wrap(self, exchange: Exchange, model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
        if self._run.keeping.state is not None:
            raise RuntimeError(
                "ddp, fsdp, exchange: give the job models before optimizers, with which it loads the checkpoint"
            )
        if self._run.sizes.uneven is not None:
            if not exchange.timed:
                raise ValueError(
                    f"init: uneven=True goes with job.ddp: in {type(exchange).__name__} ranks wait for each other "
                    "throughout a pass, so no rank's own speed can be measured; leave out uneven=True"
                )
            exchange.watch = self._run.sizes.uneven.watch
        return self._run.loop.exchanges.add(exchange, model, options)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model that was given to `ddp`, `fsdp` or `exchange`, to save, export or evaluate it.

        Any other model is returned as it is. A model of `fsdp` is the given object itself, and stays sharded. If a
        strategy's ranks train different models, the result is the model that checkpoints hold. During training this is
        a copy, for which all ranks must call `unwrap`.
        """
        return self._run.loop.exchanges.inside(model)

    def register(
        self,
        *,
        model: torch.nn.Module | dict[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer],
        scheduler: Any = None,
        **others: Any,
    ) -> Any:
        """Register the training's state, load the newest good checkpoint into it, and return the objects to train with:

            optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)

        Call it once. Returns a tuple of all objects but the model, in the order optimizer, scheduler, others; a single
        object is returned without a tuple. Use the returned objects: a given object that was replaced by a wrapper
        raises an error when it is used.

        - A scheduler's wrapper (`schedule.py`) counts in base batches: `step()` inside the loop over batches advances
          the scheduler by the step's samples divided by the base batch.
        - If a step may take several accumulation steps, wrappers of optimizer and gradient scaler (`accumulation.py`)
          act only in the last one.

        `others` are further objects with `state_dict` and `load_state_dict`, such as a gradient scaler. Their state is
        plain data: numbers, texts, tensors, and lists and dicts of them.

        Models, optimizers, schedulers and others may be dicts of several objects (`model={"g": G, "d": D}`), and are
        returned as dicts. A dict of plain values among the others (`counters={"best": 0.0}`) is also saved, with rank
        0's values, and loaded in place.

        Synchronises all ranks. A checkpoint is read twice: once to verify it, once to load it.
        """
        extras = others if scheduler is None else {"scheduler": scheduler, **others}
        carried = self._carry(model, optimizer, extras)
        return carried[0] if len(carried) == 1 else tuple(carried)

    def _carry(self, model: Any, optimizer: Any, others: Mapping[str, Any]) -> list[Any]:
        """Load the newest good checkpoint; return the optimizer and other objects in the form to train with."""
        run = self._run
        if run.keeping.state is not None:
            raise RuntimeError(
                "prepare, register: the optimizer was given before; give all objects with a state in one call"
            )
        check_exchanged(model, run.loop.exchanges, run.group.world == 1 and run.sizes.spec.max_passes == 1)
        accumulation = Accumulation()
        schedules = Schedules(run.sizes.spec.base_batch, accumulation.due, run.group.gather)
        extras = {
            name: mapped(thing, partial(schedules.wrap, known=name == "scheduler")) for name, thing in others.items()
        }
        state = state_of(model, optimizer, extras, {"files": run.keeping.files, "data": run.loop.selection})
        scaled = any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in state.extras.values())
        run.loop.exchanges.trained_by(state.optimizers.values(), scaled)
        carried: list[Any] = [optimizer, *extras.values()]
        if run.sizes.spec.max_passes > 1:
            carried = [mapped(thing, accumulation.wrap) for thing in carried]
        run.load(state)
        grows = run.sizes.spec.max_batch > run.sizes.spec.base_batch
        said = schedules.differences + (averages(state.extras.values(), run.sizes.spec.base_batch) if grows else [])
        for text in said if run.rank == 0 else ():
            log(text)
        run.loop.accumulation, run.loop.schedules = accumulation, schedules
        run.loop.least = 2 if normalizes_batches(state.model) else 1
        return carried

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        keyed: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        coreset: Coreset | None = None,
        **options: Any,
    ) -> Loader:
        """Return the training data in batches of the job's present size. An epoch has each sample once.

        `dataset` is a map-style dataset, or an iterable one that can skip (`skip(n)`, or `from_position(epoch,
        start)`). `seed` fixes the order of every epoch, and all random numbers. With `keyed`, random numbers that are
        drawn while a sample is fetched (augmentation) depend only on seed, epoch and sample. Other random numbers
        (dropout) depend on seed, step and rank. `options` are further options of torch's DataLoader (`pin_memory`, …),
        except those that choose samples. Not collective.

        With `drop_last`, an epoch leaves out the last samples of its order, which do not fill a batch of init's
        `batch`. Which samples these are depends on the epoch, but not on world size or batch.

        With a `coreset`, an epoch is a weighted subset of the data, and the loop gets (batch, weights). Write the loss
        as the mean of weight × loss over the samples. The subset is chosen at the beginning of an epoch, which
        synchronises all ranks.
        """
        if self._run.loop.feed is not None:
            raise RuntimeError(TWO)
        if taken := {"batch_size", "sampler", "batch_sampler", "generator"} & set(options):
            raise ValueError(f"loader: {', '.join(sorted(taken))} cannot be given; ones.init holds the batch")
        self._run.loop.seed = seed
        self._run.loop.feed = make_feed(
            dataset,
            chosen=(coreset, self._run.loop.selection) if coreset is not None else None,
            shuffle=shuffle,
            seed=seed,
            keyed=keyed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            options=options,
            whole=self._run.sizes.spec.base_batch if drop_last else 1,
        )
        return Loader(self._run, dataset, {"num_workers": num_workers, "drop_last": drop_last, **options})

    def evaluate(
        self,
        dataset: Dataset[Any],
        *,
        batch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> Evaluation:
        """Return an iterable over this rank's share of an evaluation dataset, without padding or repeats.

        Its batches have at most `batch` samples (default: init's `max_local_batch`). Combine the ranks' results by
        `mean`. All ranks must iterate over it: at the beginning, all get the model's buffers from rank 0. Position and
        random numbers of the training do not change.
        """
        feed = Feed(
            dataset, shuffle=False, seed=0, collate_fn=collate_fn, num_workers=num_workers, options=dict(options)
        )
        return Evaluation(self._run, feed, batch or self._run.sizes.spec.max_local_batch)

    def any(self, bad: torch.Tensor | bool) -> bool:
        """Return True if `bad` is true on any rank: `if job.any(not loss.isfinite()): continue`.

        All ranks then leave out a step together. If only some left out their backward pass, the others would wait for
        them. Synchronises all ranks, and waits for the GPU.
        """
        self._run.loop.first_steps.together("job.any")
        self._run.loop.first_steps.skipped = found = bool(self._run.group.maximum([int(bool(bad))])[0])
        return found

    def mean(self, total: torch.Tensor | float, count: torch.Tensor | float) -> float:
        """Return the mean over the samples of all ranks.

        `total` is the sum over this rank's samples, `count` their number; both are 0 on a rank without samples. The
        sums are in double precision. Synchronises all ranks. Raises ValueError if no rank had a sample.
        """
        self._run.loop.first_steps.together("job.mean")
        sums = self._run.group.total([float(total), float(count)])
        if not sums[1]:
            raise ValueError("mean: no rank counted a sample")
        return sums[0] / sums[1]

    def open(self, path: str | os.PathLike[str]) -> KeptFile:
        """Open a text file to which rank 0 appends. Other ranks may call `write`, which does nothing there.

        When a checkpoint is loaded, the file is cut back to its size at that checkpoint, so that no line occurs twice.
        A training from scratch empties the file. Call this after `register`. `path` must be on a shared file system if
        rank 0 may move to another node, as in a job of blocks.
        """
        if self._run.keeping.state is None:
            raise RuntimeError(
                "open: call it after job.prepare or job.register, which know what the file held at the checkpoint"
            )
        return self._run.keeping.files.open(path)

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs to train, from the epoch of the loaded checkpoint; without end if init's
        `epochs` is 0.

        Each turn of the loop ends an epoch at a step boundary, and reports the epoch with the values given to `report`.
        All ranks are synchronised before the first epoch, at the end of each epoch (by two small all-reduces), and at
        the last checkpoint. In a block that joins, the first turn waits until the block is admitted.

        Leaving the loop by `break` or `return` ends the training, and writes the last checkpoint. The job's next start
        then skips the loop, unless init's `epochs` has changed, or the loop was left after a signal. All ranks must
        leave together.
        """
        run = self._run
        if run.left:
            raise RuntimeError(
                "epochs: the script has left a loop over epochs before, which ended the training: write one loop"
            )
        over = run.finished_before
        if not over:
            run.begin()
        while not (over or run.left) and (run.sizes.spec.epochs == 0 or run.progress.epoch < run.sizes.spec.epochs):
            epoch, run.loop.in_epochs = run.progress.epoch, True
            try:
                yield epoch
            except GeneratorExit:
                if left_on_purpose(sys._getframe().f_back) and not FLAGS.tested:
                    run.leave_epochs(self._found.get("loss"), self._found.get("accuracy"))
                raise
            if run.progress.epoch == epoch:
                self.epoch_end()
        run.finish()

    def report(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """Set accuracy and loss in the present epoch's report. Without a loss, the report has the mean of the losses
        that `job.loss` got. Call it in the loop over epochs; the last values on rank 0 count. Not collective."""
        found = {"accuracy": accuracy, "loss": loss}
        self._found |= {name: value for name, value in found.items() if value is not None}

    def epoch_end(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """End the epoch now. Accuracy and loss are reported as by `report`.

        Call this in a loop without `epochs`. In the loop over `epochs`, it ends the epoch before further work, rather
        than at the next turn. All ranks call this together. It is a step boundary, and synchronises all ranks.
        """
        self._run.loop.first_steps.together("job.epoch_end")
        self.report(accuracy=accuracy, loss=loss)
        self._run.end_epoch(self._found.get("loss"), self._found.get("accuracy"))
        self._found = {}

    def probe(self, one_pass: Callable[[int], object]) -> int:
        """Find by trial the largest number of samples in a pass that every device holds, and return it; at most init's
        `max_local_batch`.

        `one_pass(samples)` makes a forward and a backward pass of that many samples on the original model
        (`job.unwrap(model)`). It may use a strategy's collectives. Call `probe` after `register` and before the first
        epoch. Synchronises all ranks. A trial takes a few dozen passes. The result is stored in the job's directory, so
        that later runs on the same devices make no trial. It also corrects the strategy's limits.

        During the trial, memory for the first training steps is set aside: the trained parameters' size for gradient
        buckets, and twice that size for an optimizer's moments not loaded yet. An optimizer with less state leaves the
        difference free in training. Further state, such as 1-bit LAMB's residual, is not counted.

        If ranks wait for each other within a pass (replicas of several ranks, `fsdp`), running out of memory ends the
        ranks, as in training. `ones-run` then starts them again, and half as many samples are taken.

        Raises MemoryError if one sample does not fit.
        """
        state = self._run.keeping.state
        if state is None or self._run.begun:
            raise RuntimeError("probe: call it after job.prepare or job.register, and before the first epoch")
        return self._run.sizes.probe(one_pass, state)

    def loss(self, loss: torch.Tensor | float) -> None:
        """Report the mean loss of this rank's local batch. With a strategy whose ranks compute parts of the loss,
        report this rank's part. Does not wait for the GPU; not collective."""
        run = self._run
        if run.settings.strategy is not None and run.settings.strategy.losses_add_up:
            loss = loss * (run.group.world // run.sizes.division.replicas)
        run.loop.exchanges.loss(loss)
        run.records.meter.loss(loss, run.loop.part.counted)

    def checkpoint(self) -> bool:
        """Write a checkpoint. Return True once it is durable; if it cannot be written, log the reason and return False.

        Synchronises all ranks and waits for the file system. Call it on all ranks between two steps: before a backward
        pass, or outside the loop. Raises RuntimeError between the optimizer's step and the request for the next batch,
        which completes the step.
        """
        if self._run.loop.mid_step:
            raise RuntimeError(
                "checkpoint: the optimizer has stepped; call it before the step's backward pass, or after the loop"
            )
        self._run.loop.first_steps.together("job.checkpoint")
        return self._run.keeping.save("that the script asked for", 0)
