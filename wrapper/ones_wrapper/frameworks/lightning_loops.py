"""Lightning's loops in an elastic job: ends of epochs, position of the loops, and state of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback

from ones_wrapper.api import Job
from ones_wrapper.frameworks.steps import Steps
from ones_wrapper.process import hang_detector
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.run.loop import Loader

NEVER = 1 << 62
"""Number of steps that no job reaches."""


class Carried:
    """State of Lightning's callbacks, such as early stopping, in the job's checkpoints."""

    carries_counts = True
    """Always True: Lightning's hooks save the counts of callbacks and module, so that no search for counts is
    needed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._objects = [one for one in trainer.callbacks if _saves(type(one))]
        self._limits = [trainer.max_epochs, trainer.max_steps]
        self.over = False
        """True if training has ended. It is loaded as True only if the script's limits (`max_epochs`, `max_steps`) are
        unchanged."""

    def _callbacks(self) -> dict[str, Callback]:
        return {one.state_key: one for one in self._trainer.callbacks}

    def state_dict(self) -> dict[str, Any]:
        datamodule = self._trainer.datamodule
        states = {name: one.state_dict() for name, one in self._callbacks().items()}
        return {
            "over": self._limits if self.over else [],
            "callbacks": {name: state for name, state in states.items() if state},
            "hooks": self._hooks(),
            "data": datamodule.state_dict() if datamodule is not None else {},
        }

    def _hooks(self) -> dict[str, Any]:
        """Return what callbacks, module and DataModule add to a checkpoint by their hooks `on_save_checkpoint`."""
        trainer, module = self._trainer, self._trainer.lightning_module
        weights = module.state_dict()
        checkpoint: dict[str, Any] = {**self._begun(), "state_dict": weights}
        for one in trainer.callbacks:
            one.on_save_checkpoint(trainer, module, checkpoint)
        for holder in (module, trainer.datamodule):
            if hasattr(holder, "on_save_checkpoint"):
                holder.on_save_checkpoint(checkpoint)
        if checkpoint.get("state_dict") is weights:  # the job's checkpoint has them
            del checkpoint["state_dict"]
        return {name: value for name, value in checkpoint.items() if name not in self._begun()}

    def _begun(self) -> dict[str, Any]:
        return {"epoch": self._trainer.current_epoch, "global_step": self._trainer.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, module, datamodule = self._trainer, self._trainer.lightning_module, self._trainer.datamodule
        self.over = state["over"] in (True, self._limits)  # earlier releases wrote only True
        checkpoint = {**self._begun(), "state_dict": module.state_dict(), **state["hooks"]}
        if datamodule is not None:
            if state["data"]:
                datamodule.load_state_dict(state["data"])
            if hasattr(datamodule, "on_load_checkpoint"):
                datamodule.on_load_checkpoint(checkpoint)
        module.on_load_checkpoint(checkpoint)
        for name, one in self._callbacks().items():
            one.on_load_checkpoint(trainer, module, checkpoint)
            if name in state["callbacks"]:
                one.load_state_dict(state["callbacks"][name])


def _saves(kind: type[Callback]) -> bool:
    return any(getattr(kind, hook) is not getattr(Callback, hook) for hook in ("state_dict", "on_save_checkpoint"))


class Boundaries(Callback):
    """Callback at the beginnings of epochs. It also sets the position of Lightning's loops."""

    def __init__(
        self, job: Job, loader: Loader, steps: Steps, trainer: Any, carried: Carried, ask: Callable[[], None]
    ) -> None:
        """`ask` is called when an epoch begins, before Lightning requests the first batch."""
        self.carried = carried
        self._job, self._steps, self._trainer, self._ask = job, steps, trainer, ask
        self._per_epoch = len(loader)
        self._base = job._run.sizes.spec.base_batch
        self._max_steps = trainer.max_steps
        """The Trainer's `max_steps`, in steps of the base batch; -1 for no limit."""

    def restore(self) -> None:
        """Set Lightning's loops to the checkpoint's position; end them if the training is finished."""
        fit, run, progress = self._trainer.fit_loop, self._job._run, self._job.progress
        over = self.carried.over or 0 < self._max_steps <= self._job.base_steps
        if over or run.finished_before:
            fit.max_epochs = 0
            if not run.finished_before:
                run.begin()
            run.finish()
            return
        for tracker in (fit.epoch_progress.total, fit.epoch_progress.current):
            tracker.ready = tracker.started = tracker.processed = tracker.completed = progress.epoch
        steps = fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = progress.step
        fit.epoch_loop.on_load_checkpoint({"_batches_that_stepped": progress.step})
        FLAGS.install(keep=False)
        run.begin()

    def expect(self, total: int) -> None:
        """Prepare Lightning's loops for a step of `total` samples: the steps left in the epoch, whether an evaluation
        follows, and whether it is the last by `max_steps`."""
        trainer, run, progress = self._trainer, self._job._run, self._job.progress
        loop = trainer.fit_loop.epoch_loop
        end = progress.cursor + total
        left = -(-(progress.dataset - end) // run.sizes.batch)
        trainer.fit_loop.max_batches = loop.batch_progress.current.ready + 1 + left
        first, last = progress.cursor // self._base, end // self._base if left else self._per_epoch
        if trainer.val_check_batch is not None:  # None if an interval of time is given
            every = trainer.val_check_interval
            every = every if isinstance(every, int) else max(1, int(self._per_epoch * every))
            before = progress.epoch * self._per_epoch if trainer.check_val_every_n_epoch is None else 0
            due = (before + last) // every > (before + first) // every
            trainer.val_check_batch = 1 if due else NEVER
        if self._max_steps >= 0:
            done = progress.epoch * self._per_epoch + last >= self._max_steps
            loop.max_steps = trainer.global_step + 1 if done else NEVER

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        FLAGS.install(keep=False)  # Lightning's own handler of SIGTERM would end the ranks at different steps

    on_train_start = on_sanity_check_start

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps.begin_epoch()
        self._ask()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        hang_detector.beat()
