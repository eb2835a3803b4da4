"""The run as its script sees it: model, data, evaluation, reports and checkpoints."""

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
    "evaluate on another take job.evaluate or an ordinary DataLoader"
)


class Job:
    """One run of an elastic training job, as its script sees it. Made by `init`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._models: dict[str, torch.nn.Module] = {}
        self._found: dict[str, float] = {}
        """Accuracy and loss that the script gave for the present epoch's report."""

    @property
    def rank(self) -> int:
        """This process's number among the ranks; do files and printing on rank 0. A block that waits to join has no
        rank: the value equals no number, and shows as "none yet".
        """
        return self._run.rank

    @property
    def world(self) -> int:
        """World size. A block that waits has no world size, as with `rank`."""
        return self._run.known(self._run.group.world)

    @property
    def strategy(self) -> Strategy | None:
        """The strategy by which the job trains; None for plain data parallel."""
        return self._run.settings.strategy

    @property
    def replicas(self) -> int:
        """Number of replicas over which a step's samples are split: one a rank, unless a strategy's are larger."""
        return self._run.known(self._run.sizes.division.replicas)

    @property
    def replica(self) -> int:
        """Number of this rank's replica, from 0; all ranks of a replica get the same samples."""
        return self._run.known(self._run.sizes.division.replica)

    @property
    def device(self) -> torch.device:
        """Device on which model and batches belong."""
        return self._run.group.device

    @property
    def batch(self) -> int:
        """Global batch in force, in samples."""
        return self._run.sizes.batch

    @property
    def lr_factor(self) -> float:
        """Ratio of the learning rate in force to the rate that the script set."""
        return self._run.sizes.lr_factor

    @property
    def progress(self) -> TrainingProgress:
        """Progress of the training."""
        return self._run.progress

    @property
    def run_id(self) -> str:
        """Name for all runs of this job, and after `register` for runs of the job whose checkpoint it resumes:

            wandb.init(id=job.run_id, resume="allow")
            SummaryWriter(log_dir=f"tensorboard/{job.run_id}", purge_step=job.progress.step)

        The name is stored in the file `run-id` of the job's directory, and in checkpoints.
        """
        return self._run.run_id

    @property
    def base_steps(self) -> int:
        """Samples used so far, in steps of the base batch; at that batch, the number of steps. A formula of the
        script's own for the learning rate takes it as the iteration (`lr = cosine(job.base_steps)`)."""
        progress = self._run.progress
        self._run.loop.first_steps.counts_by_job = True
        return (progress.samples + progress.padding) // self._run.sizes.spec.base_batch

    @property
    def updates(self) -> bool:
        """True if the optimizer steps now: of several accumulation steps, only in the last one. Put things to do once a
        step, such as clipping gradients, under `if job.updates:`."""
        return self._run.loop.part.last

    def prepare(self, *things: Any) -> Any:
        """Make the training's objects elastic, given in any order, and return them in that order:

            model, optimizer, loader, scheduler = job.prepare(model, optimizer, data, scheduler)

        Models are returned as by `ddp`, on the job's device. A model that `ddp`, `fsdp` or `exchange` returned stays,
        as does a model with nothing to train. Data is a dataset, or a DataLoader whose settings are taken over, with
        init's `batch` as its batch size: see `loader`. All else is registered, and the newest good checkpoint is loaded
        into it: see `register`. Optimizers and schedulers may be made before this call, with the original model.
        Further schedulers, gradient scalers, averages, objects with a state, and a dict of plain values may be given,
        too.

        Call this again for further objects: models and data at any time before training begins, everything else with
        the optimizers, once. Synchronises all ranks.
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
        """Return the model in data parallel, its gradients averaged over samples rather than over ranks.

        So the script's loss stays the mean over its local batch even if local batches differ in size. `options` are
        those of torch's DistributedDataParallel; over MPI, `bucket_cap_mb` and `broadcast_buffers`. Synchronises all
        ranks: all get rank 0's parameters. In training each step exchanges every gradient once, during backward.

        Call it once for each model; the gradient noise scale is measured on the first. Parameters that are trained at
        any time must require gradients now, and can be frozen afterwards.
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
        """Return the model sharded over the ranks by FSDP2 (`fully_shard`), its gradients averaged over samples.

        `modules` names the modules that are units (a type, several, or a function of a module); other options are
        `fully_shard`'s. Synchronises all ranks. In training each pass gathers every unit's parameters twice and
        exchanges its gradients once.
        """
        from ones_wrapper.gradients.fsdp import FsdpExchange

        self._check_averaged("fsdp")
        return self._wrap(FsdpExchange(self._run.group, self._noise), model, options)

    def exchange(self, model: torch.nn.Module, name: str, **options: Any) -> torch.nn.Module:
        """Return the model with a gradient exchange of another package, a subclass of `gradients.exchange.Exchange`.

        `name` is its name in the entry points `ones_wrapper.exchanges`, or `package.module:Class`. Raises ValueError if
        there is none of that name. `options` are those of its `wrap`.
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
                "ddp, fsdp, exchange: give the job models before optimizers, with which the checkpoint is loaded"
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
        """Return the model that was given to `ddp`, `fsdp` or `exchange`: to save, export or evaluate it.

        Another model is returned as it is. A sharded model is the same object, and its parameters stay sharded. If a
        strategy's ranks train models of their own, the result is the model that the job saves. In training this is a
        copy, for which all ranks call this.
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
        """Name the training's state once, load the newest good checkpoint into it, and return objects to train with:

            optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)

        Returns only the optimizer, or all that was given besides the model, in the order (optimizer, scheduler,
        others). Schedulers come back in a wrapper (`schedule.py`): its `step()` inside the loop over batches advances
        by as many steps of the base batch as the samples are worth. If a step may take several accumulation steps,
        optimizer and gradient scaler come in wrappers that act in the last one (`accumulation.py`). The given objects
        raise an error if they are used instead. `others` are further objects with `state_dict` and `load_state_dict`,
        such as a gradient scaler; their state is plain data: numbers, texts, tensors, and lists and dicts of them.
        Synchronises all ranks, and reads each checkpoint twice: once to verify it, once to load it.

        Models, optimizers, schedulers and others may be dicts of several (`model={"g": G, "d": D}`), and come back as
        such. A dict of plain values among the others (`counters={"best": 0.0}`) is carried, too, and loaded in place;
        the values of rank 0 count.
        """
        extras = others if scheduler is None else {"scheduler": scheduler, **others}
        carried = self._carry(model, optimizer, extras)
        return carried[0] if len(carried) == 1 else tuple(carried)

    def _carry(self, model: Any, optimizer: Any, others: Mapping[str, Any]) -> list[Any]:
        """Load the newest good checkpoint; return the optimizer and each of the others to train with."""
        run = self._run
        if run.keeping.state is not None:
            raise RuntimeError("prepare, register: the optimizer was given; give all that training carries at once")
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
        """Return the training data cut into the batch in force, each sample once an epoch.

        The data is a map-style dataset, or an iterable one that can skip (`skip(n)`, or `from_position(epoch, start)`).
        `seed` fixes the order of every epoch, and all random numbers. With `keyed` the numbers that a sample draws as
        it is fetched (augmentation) depend only on seed, epoch and sample. Others (dropout) depend on seed, step and
        rank. `options` are further ones of torch's DataLoader (`pin_memory`, …); not those that choose samples, since
        that is done here. With `drop_last` an epoch has only the first samples of its order that fill whole batches of
        init's `batch`: the same samples at any size and batch, but others in each epoch. Synchronises nothing.

        With a `coreset` an epoch is a chosen part of the data, and the loop gets (batch, weights): write the loss as
        the mean of weight times the sample's loss. A coreset synchronises all ranks when samples are chosen, at the
        beginning of an epoch.
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
        """Return this rank's share of a dataset to evaluate on, without padding or repeats.

        Its batches have at most `batch` samples (`max_local_batch`). `mean` puts the ranks' results together. All ranks
        iterate over it; at its beginning they take rank 0's buffers of the model. The training's data and random
        numbers stay as they are.
        """
        feed = Feed(
            dataset, shuffle=False, seed=0, collate_fn=collate_fn, num_workers=num_workers, options=dict(options)
        )
        return Evaluation(self._run, feed, batch or self._run.sizes.spec.max_local_batch)

    def any(self, bad: torch.Tensor | bool) -> bool:
        """Return whether any rank's answer is yes: `if job.any(not loss.isfinite()): continue`.

        All ranks then leave the step out together: if one rank skipped its backward pass, the others would wait for it.
        Synchronises all ranks, and waits for the GPU.
        """
        self._run.loop.first_steps.together("job.any")
        self._run.loop.first_steps.skipped = found = bool(self._run.group.maximum([int(bool(bad))])[0])
        return found

    def mean(self, total: torch.Tensor | float, count: torch.Tensor | float) -> float:
        """Return the mean over all ranks' samples, from each rank's sum over its samples and their number.

        The sum is in double precision. A rank without samples gives 0 and 0. Synchronises all ranks. Raises ValueError
        if no rank had a sample.
        """
        self._run.loop.first_steps.together("job.mean")
        sums = self._run.group.total([float(total), float(count)])
        if not sums[1]:
            raise ValueError("mean: no rank counted a sample")
        return sums[0] / sums[1]

    def open(self, path: str | os.PathLike[str]) -> KeptFile:
        """Open a text file to whose end rank 0 writes; other ranks may write too, without effect.

        A resume cuts the file back to its size at the checkpoint, so that no line is there twice. If training begins
        from scratch the file is empty. Call this after `register`. If rank 0 moves to another node, as in a job of
        blocks, `path` must be shared.
        """
        if self._run.keeping.state is None:
            raise RuntimeError(
                "open: call it after job.prepare or job.register, which know what the file held at the checkpoint"
            )
        return self._run.keeping.files.open(path)

    def epochs(self) -> Iterator[int]:
        """Yield the epochs still to train, from the one in which the checkpoint stopped; without end if init's is 0.

        Synchronises all ranks at the first and, for the last checkpoint, after the last.

        Each turn ends the epoch, at a step boundary: the epoch is reported, with the values that `report` got, and two
        small sums synchronise the ranks. A block that joins waits here.

        Leaving the loop by `break` or `return` writes the last checkpoint, too. The next start goes on after the loop,
        unless init's `epochs` has changed. All ranks must leave together.
        """
        run = self._run
        if run.left:
            raise RuntimeError("epochs: the script has left its loop before, which ended the training: write one loop")
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
        """Give the present epoch's report an accuracy, and a loss in place of the mean of the losses given to
        `job.loss`. Call it in the loop over epochs; rank 0's last values count. Synchronises nothing."""
        found = {"accuracy": accuracy, "loss": loss}
        self._found |= {name: value for name, value in found.items() if value is not None}

    def epoch_end(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """End the epoch here, with the values that `report` takes: in a loop that does not use `epochs`.

        Or call this before work that should not wait for the next turn. All ranks call this; it is a step boundary, and
        synchronises them.
        """
        self._run.loop.first_steps.together("job.epoch_end")
        self.report(accuracy=accuracy, loss=loss)
        self._run.end_epoch(self._found.get("loss"), self._found.get("accuracy"))
        self._found = {}

    def probe(self, one_pass: Callable[[int], object]) -> int:
        """Return the most samples of a pass that the devices hold, found by trial; at most init's `max_local_batch`.

        `one_pass(samples)` makes a forward and a backward pass of that many samples, on the model inside
        (`job.unwrap(model)`); a strategy's own collectives may be part of it. Call it after `register` and before the
        first epoch. The result is kept in the job's directory and corrects the strategy's limits for the companion: so
        later runs on the same devices need not try again. Synchronises all ranks. On a GPU without memory left by
        others it takes a few dozen passes.

        Meanwhile memory for the first steps is held: the trained parameters once for the buckets of gradients, and
        twice for moments of the optimizer, if no checkpoint brought them. An optimizer that keeps less leaves the
        difference free; further state, such as 1-bit LAMB's residual, is not counted.

        If ranks wait for each other in a pass (replicas of several ranks, `fsdp`), a pass that runs out of memory is
        not caught. As in training it ends the ranks, `ones-run` starts them again, and half as many samples are taken.

        Raises MemoryError if not one sample fits.
        """
        state = self._run.keeping.state
        if state is None or self._run.begun:
            raise RuntimeError("probe: call it after job.prepare or job.register, and before the first epoch")
        return self._run.sizes.probe(one_pass, state)

    def loss(self, loss: torch.Tensor | float) -> None:
        """Report the mean loss of this local batch; with a strategy whose ranks compute parts of the loss, this rank's
        part. Does not wait for the GPU, and synchronises nothing."""
        run = self._run
        if run.settings.strategy is not None and run.settings.strategy.losses_add_up:
            loss = loss * (run.group.world // run.sizes.division.replicas)
        run.loop.exchanges.loss(loss)
        run.records.meter.loss(loss, run.loop.part.counted)

    def checkpoint(self) -> bool:
        """Write a checkpoint now; durable on return. False if it could not be written, which is logged.

        Synchronises all ranks and waits for the file system. Call it between steps, on all ranks: before a backward
        pass, or outside the loop. Raises RuntimeError after the optimizer's step, which counts only when the loader is
        asked for the next batch.
        """
        if self._run.loop.mid_step:
            raise RuntimeError("checkpoint: the optimizer has stepped; call it at the top of the loop, or after it")
        self._run.loop.first_steps.together("job.checkpoint")
        return self._run.keeping.save("that the script asked for", 0)
