"""Hugging Face's Trainer, elastic: a script changes only its import.

    from ones_wrapper.frameworks.transformers import Trainer

The base batch is what the script takes on one GPU: `per_device_train_batch_size * gradient_accumulation_steps`.
`max_steps`, `logging_steps`, `global_step` and the schedule count steps of the base batch. A larger batch counts as
several such steps, so that training ends after the same number of samples. `Trainer(elastic={...})` takes keywords of
`ones.init`, such as `max_batch`.

Data, gradient exchange and checkpoints are the job's; loop, losses, evaluation, logs and callbacks are the Trainer's.
The overridden methods are documented by the Trainer for this purpose, except two, which are marked in the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from ones_wrapper.api import Job
from ones_wrapper.data.dataloader import SAMPLER, TakenOver, own_batches, taken_over
from ones_wrapper.data.feed import AccumulationStep, Pass
from ones_wrapper.frameworks.steps import Steps, check_ranks, hidden, join, pass_over
from ones_wrapper.process import hang_detector
from ones_wrapper.process.hooks import FLAGS

_REFUSED = {
    "auto_find_batch_size": "say how much a GPU holds: Trainer(elastic={'max_local_batch': N})",
    "deepspeed": "its optimizer cannot be loaded at another number of GPUs here",
    "fsdp": "write the loop with job.fsdp, as the example lm_fsdp.py does",
}
"""TrainingArguments that an elastic job cannot obey, each with a remedy."""
OWN_LOADER = (
    "{name}.get_train_dataloader returns batches by a {found}: slurm-ones decides which samples a step uses. So "
    "return a torch DataLoader with batch_size=, or override only the dataset and the collator"
)


class Trainer(transformers.Trainer):
    """A Trainer whose job may be resized during training."""

    steps: Steps

    def __init__(self, *args: Any, elastic: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """`elastic` are keywords of `ones.init`; all other arguments are the Trainer's own. Raises ValueError for
        arguments that an elastic job cannot obey."""
        super().__init__(*args, **kwargs)
        for name, instead in _REFUSED.items():
            if getattr(self.args, name, None):
                raise ValueError(f"TrainingArguments({name}=...): an elastic job cannot do that; {instead}")
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            raise ValueError(SAMPLER.format(sampler=f"train_sampling_strategy={strategy!r}"))
        if "tokens" in (elastic or {}):
            raise ValueError("elastic={'tokens': ...}: the Trainer counts tokens itself; leave it out")
        self._elastic = elastic
        self._job: Job | None = None
        self._part: AccumulationStep | None = None
        self._schedule: Any = None
        self._carried = _Carried(self)
        # After the Trainer's own callback, which checks the steps first, and before all others.
        self.callback_handler.callbacks.insert(1, _Boundaries(self))

    @property
    def job(self) -> Job:
        """The job that `ones.init` returned. It exists once training has begun."""
        assert self._job is not None
        return self._job

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, but from the job's own checkpoint; `resume_from_checkpoint` is not loaded."""
        if self._job is not None:
            raise RuntimeError("trainer.train: an elastic job trains once")
        self._resume = resume_from_checkpoint
        # The subclass may override both: they are called for each pass, and for the script's own DataLoader.
        self._loads = type(self).get_train_dataloader is not transformers.Trainer.get_train_dataloader
        self._own_step, self._own_loader = self.training_step, self.get_train_dataloader
        vars(self).update(training_step=self._step, get_train_dataloader=self._batches)
        return super().train(None, *args, **kwargs)

    # -- what the Trainer asks for before its loop ---------------------------------------------------------------------

    def _batches(self) -> Any:
        if self._job is None:
            self._join()
        return _TrainerBatches(self)

    def _join(self) -> None:
        """Join the run with data, model, optimizer and schedule, and load the newest checkpoint."""
        args = self.args
        given = self._taken_over()
        self._job = job = join(
            "the Trainer",
            given.batch,
            args.gradient_accumulation_steps,
            {"epochs": 0 if args.max_steps > 0 else -int(-args.num_train_epochs // 1), **(self._elastic or {})},
        )
        on_cpus = "TrainingArguments(use_cpu=True); DataParallel and TPUs are not supported"
        check_ranks(job, "the Trainer", self.accelerator.num_processes, on_cpus)
        args.gradient_accumulation_steps = 1  # a batch of ours is a whole step
        seed = args.seed if args.data_seed is None else args.data_seed
        loader = job.loader(given.dataset, seed=seed, **given.settings)
        # `accelerator.prepare` would wrap it in a DDP of its own; this applies mixed precision and torch.compile.
        model = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        handler = self.accelerator.ddp_handler
        self.model_wrapped = job.ddp(model, **(handler.to_kwargs() if handler else {}))
        self.create_optimizer()
        self.steps, self._loader = Steps(job, loader), loader
        batches: Any = _TrainerBatches(self)
        max_steps = super().set_initial_training_values(args, batches)[-1]
        self.create_scheduler(num_training_steps=max_steps, optimizer=self.optimizer)
        self._register(max_steps)

    def _taken_over(self) -> TakenOver:
        """Return dataset and settings of the script's own DataLoader. Raises ValueError unless its class, sampler and
        batch sampler are torch's."""
        if isinstance(self.train_dataset, IterableDataset) and not self._loads:  # each rank's loader has a share
            options = {"shuffle": False, "drop_last": self.args.dataloader_drop_last, "collate_fn": self.data_collator}
            return TakenOver(self.train_dataset, self.args.per_device_train_batch_size, options)
        loader = self._own_loader()
        loader = getattr(loader, "base_dataloader", loader)
        batches = own_batches(loader)
        if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
            raise ValueError(OWN_LOADER.format(name=type(self).__name__, found=type(batches or loader).__name__))
        return taken_over(loader)

    def _register(self, max_steps: int) -> None:
        others: dict[str, Any] = {"trainer": self._carried}
        if self.accelerator.scaler is not None:
            others["scaler"] = self.accelerator.scaler
        follows = not isinstance(self.lr_scheduler, ReduceLROnPlateau)  # evaluations step this scheduler
        if not follows:
            others["plateau"] = hidden(self.lr_scheduler)
        optimizer: Any = self.optimizer
        follower = self.lr_scheduler if follows else None
        found = self.job.register(model=self.model_wrapped, optimizer=optimizer, scheduler=follower, **others)
        self._schedule = found[1] if follows else self.lr_scheduler
        self.job._run.begin()
        if self._resume:
            what = "resume_from_checkpoint"
            pass_over(self.job, "the Trainer", what, f"{what}={self._resume!r}", " (from_pretrained)")
        self._carried.over |= self.job.base_steps >= max_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self._schedule is not None:  # the registered scheduler, which follows progress
            self.lr_scheduler = self._schedule
            return self._schedule
        return super().create_scheduler(num_training_steps, optimizer)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        found = super().set_initial_training_values(args, dataloader)
        if not isinstance(dataloader, _TrainerBatches):
            return found
        epochs, steps, examples, samples, _, length, max_steps = found
        self._epochs = epochs
        left = 0 if self._carried.over else max(0, epochs - self.job.progress.epoch)
        # The most steps that an epoch may take, at a batch of one sample: the job's data ends the epoch.
        most = self.job._run.loop.feed.samples or steps * self.job._run.sizes.spec.base_batch  # type: ignore[union-attr]
        return left, most, examples, samples, self.job.batch, length, max_steps

    # -- a step --------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        if not isinstance(epoch_iterator, _TrainerBatches):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        passes = self.steps.take()
        if not passes:
            self.control.should_epoch_stop = True
            return [], None
        counted = [local if part.samples else _nothing_of(local) for part, local in passes]
        return [_Step(passes)], self._get_num_items_in_batch(counted, device)

    def _step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make all passes of one step, and return this rank's part of the loss. The mean of the parts over all ranks is
        the step's loss times its number of base steps."""
        total = torch.zeros((), device=self.args.device)
        before = self.job.base_steps
        for part, local in inputs.passes:
            with self._loader.passing(part):
                self._part = part
                try:
                    loss = self._own_step(model, local, num_items_in_batch)
                finally:
                    self._part = None
                if part.samples:
                    self.job.loss(loss)
                    total += loss * (part.samples * self.job.world / part.share.total)
        return total * (self.steps.base_steps - before)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the Trainer's loss as the mean over this pass's samples. If the Trainer divides the loss by the step's
        tokens, return a loss whose gradients, summed over the step, are the mean over these tokens."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        part = self._part
        scaled = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if part is None or not part.samples or num_items_in_batch is None or not scaled:
            return found
        if self.args.average_tokens_across_devices:
            factor = part.share.total / (part.samples * self.accelerator.num_processes)
        else:
            factor = part.share.samples / part.samples
        return (found[0] * factor, *found[1:]) if return_outputs else found * factor

    def floating_point_ops(self, inputs: Any) -> int:
        passes = [local for _, local in inputs.passes] if isinstance(inputs, _Step) else [inputs]
        return int(sum(super(Trainer, self).floating_point_ops(local) for local in passes))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for local in [local for _, local in inputs.passes] if isinstance(inputs, _Step) else [inputs]:
            super()._track_num_input_tokens(local)


class _Step(dict[str, Any]):
    """The passes of a step, as a dict with the inputs of the first pass."""

    def __init__(self, passes: list[Pass]) -> None:
        super().__init__(passes[0][1])
        self.passes = passes


class _TrainerBatches:
    """Object in place of the training DataLoader, with its length. The batches come from
    `Trainer.get_batch_samples`."""

    def __init__(self, trainer: Trainer) -> None:
        self.dataset = trainer.train_dataset
        self._loader = trainer._loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise RuntimeError("an elastic Trainer's data is only taken by its own loop")


class _Carried:
    """State of the Trainer and its callbacks in the job's checkpoints."""

    LOST = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "max_steps", "num_train_epochs")
    """Fields of the Trainer's state that are not saved, since each run sets them."""
    SUMS = ("_total_loss_scalar", "_globalstep_last_logged")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._limits = [trainer.args.num_train_epochs, trainer.args.max_steps]
        self._loaded: dict[str, Any] = {}
        self.over = False
        """True if training has ended. It is loaded as True only if the script's limits (`num_train_epochs`,
        `max_steps`) are unchanged."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {k: v for k, v in dataclasses.asdict(trainer.state).items() if k not in self.LOST}
        callbacks = {
            type(callback).__name__: callback.state()["attributes"]
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, ExportableState)
        }
        sums = {name: getattr(trainer, name, 0) for name in self.SUMS}
        loss = float(getattr(trainer, "_tr_loss", 0.0))
        over = self._limits if self.over else []
        return {"state": state, "callbacks": callbacks, "sums": sums, "loss": loss, "over": over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = dict(state)
        self.over = state["over"] in (True, self._limits)  # earlier releases wrote only True

    def restore(self) -> None:
        """Set the Trainer to the loaded state, after it has made its `TrainerState`."""
        trainer, loaded = self._trainer, self._loaded
        if not loaded:
            return
        for name, value in loaded["state"].items():
            setattr(trainer.state, name, value)
        for callback in trainer.callback_handler.callbacks:
            vars(callback).update(loaded["callbacks"].get(type(callback).__name__, {}))
        for name, value in loaded["sums"].items():
            setattr(trainer, name, value)
        trainer._tr_loss += loaded["loss"]
        trainer._initial_global_step = 0


class _Boundaries(TrainerCallback):
    """Callback at the ends of steps and epochs. It also sets `global_step`, in steps of the base batch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer._carried.restore()
        state.global_step = trainer.job.base_steps
        state.num_train_epochs = trainer._epochs

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.steps.begin_epoch(_accuracy(state))

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.global_step = self._trainer.steps.base_steps - 1  # the Trainer adds one

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the Trainer to log, evaluate or save if the step passed a multiple of the interval, also if it was not
        hit exactly."""
        state.epoch = self._trainer.steps.epochs
        before, now = self._trainer.job.base_steps, state.global_step

        def passed(every: int) -> bool:
            return every > 0 and now // every > before // every

        if before == now and now < state.max_steps:  # less than a step of the base batch
            control.should_log = control.should_evaluate = control.should_save = False
            return
        if (args.logging_strategy == "steps" and passed(state.logging_steps)) or (
            args.logging_first_step and not before
        ):
            control.should_log = True
        if args.eval_strategy == "steps" and passed(state.eval_steps) and args.eval_delay <= now:
            control.should_evaluate = True
        if args.save_strategy == "steps" and passed(state.save_steps):
            control.should_save = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        FLAGS.checkpoint = True  # when the Trainer saves, the job saves, too: at the end of this step

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        hang_detector.beat()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer._carried.over = True
        self._trainer.steps.finish()


def _accuracy(state: TrainerState) -> float | None:
    found = [entry["eval_accuracy"] for entry in reversed(state.log_history or []) if "eval_accuracy" in entry]
    return float(found[0]) if found else None


def _nothing_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with all labels set to -100 (ignored), so that no token counts."""
    names = {"labels", "shift_labels"} & set(inputs)
    return {**inputs, **{name: torch.full_like(inputs[name], -100) for name in names}}
