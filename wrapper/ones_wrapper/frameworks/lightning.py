"""Lightning, elastic: a script changes two lines, an import and the Trainer's strategy.

    from ones_wrapper.frameworks.lightning import ElasticStrategy
    trainer = L.Trainer(max_epochs=10, strategy=ElasticStrategy(max_batch=256))

The base batch is what the script takes on one GPU: `batch_size` of the DataLoader times `accumulate_grad_batches`.
`max_steps`, `val_check_interval` and schedules with interval `step` count steps of the base batch. What Lightning sees
as a batch is a whole step, with all its accumulation steps; `global_step` and `batch_idx` count such steps.

Data, gradient exchange and checkpoints are the job's; loops, evaluation, logs and callbacks are Lightning's. Besides a
strategy's methods this module uses attributes of Lightning's loops, and two private names, which are marked in the
code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from ones_wrapper.api import Job
from ones_wrapper.data.dataloader import taken_over
from ones_wrapper.data.feed import AccumulationStep, Pass
from ones_wrapper.frameworks.lightning_loops import Boundaries, Carried
from ones_wrapper.frameworks.steps import Steps, hidden, join, meet, pass_over
from ones_wrapper.gradients.accumulation import AccumulatedOptimizer
from ones_wrapper.group import Group
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.run.loop import Loader
from ones_wrapper.script.line import line

MANY = 1 << 40
"""Length of an epoch for Lightning, larger than any real one. An epoch ends with its data, whatever the number of
steps."""
REFUSED = {
    "limit_train_batches": (1.0, "an epoch is the whole dataset: give a smaller one"),
    "overfit_batches": (0.0, "an epoch is the whole dataset: give a smaller one"),
    "reload_dataloaders_every_n_epochs": (0, "the dataset must stay the same"),
}
"""(only value allowed, reason) of the Trainer's arguments that an elastic job cannot obey."""
MANUAL = (
    "an elastic LightningModule optimizes automatically, with one optimizer: with several, or with manual "
    "optimization, write the loop yourself, as the example gan.py does"
)
FINETUNING = (
    "a callback for finetuning adds parameters to the optimizer while it trains, so no checkpoint would fit the next "
    "start: give the optimizer all of them, and freeze some by requires_grad_(False) in on_train_epoch_start"
)
DATA = (
    "an elastic job trains on one torch DataLoader over a dataset with a length, whose batch_size is a number; "
    "this one is {found}"
)
DEVICE = "the Trainer chose {theirs} and ones-run's ranks have {ours}: leave out accelerator, devices and num_nodes"
WORLD = (
    "world_size was asked for before training begins{line}: the DataLoader's batch_size is for one GPU, at any "
    "number of them, so do not divide it; a batch for all GPUs together is ElasticStrategy(batch=N)"
)


class LightningRanks(TorchElasticEnvironment):
    """Lightning's environment of ranks that `ones-run` started. `devices` and `num_nodes` have no effect, and Lightning
    does not requeue the job."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept all numbers, since a resize changes both."""


class ElasticStrategy(ParallelStrategy):
    """Data parallel training in a job that may be resized. Takes keywords of `ones.init`."""

    barrier = DDPStrategy.barrier
    broadcast = DDPStrategy.broadcast
    reduce = DDPStrategy.reduce
    model_to_device = DDPStrategy.model_to_device
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids

    _steps: Steps
    _loader: Loader

    def __init__(self, ddp: dict[str, Any] | None = None, **elastic: Any) -> None:
        """`ddp` are options of torch's DistributedDataParallel, `elastic` keywords of `ones.init`."""
        super().__init__(cluster_environment=LightningRanks())
        self._elastic, self._ddp = elastic, ddp or {}
        self._group: Group | None = None
        self._job: Job | None = None
        self._said = False
        self._given: list[Any] = []
        self._asking = False
        """True while Lightning requests the training data or its length."""
        self._passes: list[Pass] = []
        self._local: Any = None
        """Local batch of the present pass, on the device; None in a step's first pass."""
        self._checkpoint: Any = None

    @property
    def job(self) -> Job:
        """The job that `ones.init` returned. It exists once training has begun."""
        assert self._job is not None
        return self._job

    # -- who the ranks are ---------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """World size. If the script reads it before training, the log warns that a batch must not depend on it."""
        if self._job is None and not self._said and (at := line(sys._getframe(1), 2)):
            self._said = True
            if self.global_rank == 0:
                log(WORLD.format(line=at))
        return self._group.world if self._group else 1

    @property
    def num_processes(self) -> int:
        """Always 1. A module may divide its batch by this number, but the job already does."""
        return 1

    @property
    def global_rank(self) -> int:
        return self._group.rank if self._group else super().global_rank

    @property
    def root_device(self) -> torch.device:
        return self._group.device if self._group else (self.parallel_devices or [torch.device("cpu")])[0]

    @property
    def is_distributed(self) -> bool:
        """True if Lightning must split a DataLoader's samples over the ranks, as for evaluation; the job splits
        training data."""
        return self.world_size > 1 and not self._asking

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the rank for Lightning's `rank_zero_only`. Lightning calls this after it has made the Trainer."""
        only: Any = rank_zero_only
        only.rank = self.global_rank

    def setup_environment(self) -> None:
        if self._group is None:
            self._group = meet(self._elastic.get("backend"))
        theirs = (self.parallel_devices or [self.root_device])[0].type
        if theirs != self.root_device.type:
            raise RuntimeError(DEVICE.format(theirs=theirs, ours=self.root_device.type))
        super().setup_environment()

    # -- what is set up before the loop --------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        if not self._asking:
            return dataloader
        self._given.append(dataloader)
        return _Batches(self)

    def setup(self, trainer: Any) -> None:
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        if not self._fitting:
            super().setup(trainer)
            return
        if self._job is not None:
            raise RuntimeError("trainer.fit: an elastic job trains once")
        self._refuse(trainer)
        self._join(trainer)
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)
        self._register(trainer)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return self.job.ddp(model, **self._ddp) if self._fitting else model

    def _refuse(self, trainer: Any) -> None:
        for name, (needed, why) in REFUSED.items():
            if (found := getattr(trainer, name)) != needed:
                raise ValueError(f"Trainer({name}={found!r}): an elastic job cannot do that; {why}")
        if any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks):
            raise ValueError("GradientAccumulationScheduler: how often to accumulate depends on the GPUs; leave it out")
        if any(isinstance(one, BaseFinetuning) for one in trainer.callbacks):
            raise ValueError(FINETUNING)
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError(MANUAL)

    def _join(self, trainer: Any) -> None:
        self._asking = True
        trainer.fit_loop.setup_data()
        self._asking = False
        given = self._given[0] if len(self._given) == 1 else None
        if not isinstance(given, DataLoader) or isinstance(given.dataset, IterableDataset) or not given.batch_size:
            kinds = [type(getattr(one, "dataset", one)).__name__ for one in self._given]
            raise ValueError(DATA.format(found=", ".join(kinds) or "missing"))
        its = taken_over(given)
        epochs = trainer.max_epochs if trainer.max_steps == -1 and (trainer.max_epochs or 0) > 0 else 0
        elastic = {"epochs": epochs, **self._elastic}
        self._job = job = join("Lightning", its.batch, trainer.accumulate_grad_batches, elastic)
        trainer.accumulate_grad_batches = 1  # a batch of ours is a whole step
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # what `seed_everything` was given
        self._loader = job.loader(its.dataset, seed=seed, **its.settings)
        self._steps = Steps(job, self._loader)
        trainer.fit_loop.max_batches = len(self._loader)  # for `estimated_stepping_batches`

    def _register(self, trainer: Any) -> None:
        """Load the job's newest checkpoint, and set Lightning's loops to its position."""
        job, model = self.job, self.model
        if len(self.optimizers) != 1:
            raise ValueError(MANUAL)
        carried = Carried(trainer)
        follow: dict[str, Any] = {}
        others: dict[str, Any] = {"trainer": carried}
        for number, config in enumerate(self.lr_scheduler_configs):
            if config.reduce_on_plateau or config.interval != "step":
                others[f"scheduler{number}"] = hidden(config.scheduler)
            elif config.frequency != 1:
                raise ValueError(
                    f"lr_scheduler frequency={config.frequency}: with interval='step' an elastic job takes 1"
                )
            else:
                follow[str(number)] = config.scheduler
        precision: Any = self.precision_plugin
        scaler = getattr(precision, "scaler", None)
        if scaler is not None:
            others["scaler"] = scaler
        assert model is not None
        found = job.register(model=model, optimizer=self.optimizers[0], scheduler=follow or None, **others)
        self.optimizers = [found[0]]
        for number, wrapped in (found[1] if follow else {}).items():
            self.lr_scheduler_configs[int(number)].scheduler = wrapped
        if scaler is not None:
            precision.scaler = found[-1]
        if self._checkpoint is not None:
            known = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
            given = f"ckpt_path={self._checkpoint!r}"
            pass_over(job, "Lightning", "ckpt_path", given, " (`load_from_checkpoint`)", known)
        boundaries = Boundaries(job, self._loader, self._steps, trainer, carried, self._ask)
        self._boundaries = boundaries
        trainer.callbacks.insert(0, boundaries)
        boundaries.restore()

    def _ask(self) -> None:
        self._asking = True  # until the first batch

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load nothing in training, because the job has its own checkpoints; otherwise load as Lightning does."""
        if self.lightning_module is None or self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._checkpoint = str(checkpoint_path)
        return {"pytorch-lightning_version": version("lightning"), "state_dict": {}, "lr_schedulers": []}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        FLAGS.checkpoint = True  # when Lightning saves, the job saves, too: at the end of this step

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if checkpoint["state_dict"]:
            super().load_model_state_dict(checkpoint, strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    # -- a step --------------------------------------------------------------------------------------------------------

    def take(self) -> Any:
        """End the previous step; return this rank's local batch for the first pass of the next step."""
        self._asking = False
        self._passes = self._steps.take()
        if not self._passes:
            raise StopIteration
        self._boundaries.expect(self._passes[-1][0].share.total)
        return self._passes[0][1]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._local is not None:
            args = (self._local, *args[1:])
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make all forward and backward passes of a step, each by Lightning's closure, and then the optimizer's
        step."""
        own = optimizer.optimizer if isinstance(optimizer, AccumulatedOptimizer) else optimizer
        *others, (last, local) = self._passes
        accumulation = self.job._run.loop.accumulation
        for part, samples in others:
            with self._loader.passing(part):
                self._compute(part, samples, closure)
        with self._loader.passing(last):
            loss = self._compute(last, local, closure)
            accumulation.due(asks=True)
            with accumulation.stepping():
                return super().optimizer_step(own, lambda: loss, model, **kwargs)

    def _compute(self, part: AccumulationStep, local: Any, closure: Callable[[], Any]) -> Any:
        """Make a forward and backward pass; return the loss."""
        self._local = None if part.index == 0 else self._on_device(local)
        loss, self._local = closure(), None
        if part.samples and loss is not None:
            self.job.loss(loss)
        return loss

    def _on_device(self, local: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        # A private name: it asks the module or the datamodule, whichever has the hook.
        local = module._on_before_batch_transfer(self.precision_plugin.convert_input(local), dataloader_idx=0)
        return self.batch_to_device(local, dataloader_idx=0)

    def on_train_end(self) -> None:
        self._boundaries.carried.over = True
        self._steps.finish()


class _Batches:
    """The job's batches for Lightning, in place of the training DataLoader."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    def __len__(self) -> int:
        """Number of steps of the base batch in an epoch, for schedules. For Lightning's own loop it is `MANY`."""
        strategy = self._strategy
        return MANY if strategy._asking or strategy._job is None else len(strategy._loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._strategy.take()
