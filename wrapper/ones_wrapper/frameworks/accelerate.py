"""Hugging Face's Accelerate, elastic: a script changes an import and its loop over epochs.

    from ones_wrapper.frameworks.accelerate import Accelerator
    ...
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in accelerator.epochs(10):

The base batch is what the script takes on one GPU: `batch_size` of the DataLoader times `gradient_accumulation_steps`.
`Accelerator(elastic={...})` takes keywords of `ones.init`, such as `max_batch`. The job prepares model, optimizer,
scheduler and training data; mixed precision, device, evaluation, gathering and trackers are Accelerate's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import send_to_device
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ones_wrapper.api import Job
from ones_wrapper.data.dataloader import taken_over
from ones_wrapper.frameworks.steps import check_ranks, join, pass_over
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.run.loop import Loader
from ones_wrapper.script.line import line

TOGETHER = (
    "accelerator.prepare: an elastic job prepares its model, its optimizer and its training DataLoader in one call, "
    "the training DataLoader first among several. This one has {models} model(s), {optimizers} optimizer(s) and "
    "{loaders} DataLoader(s)"
)
PROCESSES = (
    "accelerator.num_processes was asked for before accelerator.prepare{line}: schedules are in steps of what one "
    "process takes, at any number of processes, so do not multiply them by it"
)
OWN = "ones-run-id"
"""File in a folder of `save_state` with the id of the run that wrote the folder."""
NOT_YET = "call accelerator.prepare(model, optimizer, loader) before accelerator.{name}"


class Accelerator(accelerate.Accelerator):
    """An Accelerator whose job may be resized during training."""

    scaler: Any

    def __init__(
        self, *args: Any, elastic: dict[str, Any] | None = None, gradient_accumulation_steps: int = 1, **kwargs: Any
    ) -> None:
        """`elastic` are keywords of `ones.init`; all other arguments are Accelerate's own."""
        if "gradient_accumulation_plugin" in kwargs:
            raise ValueError("Accelerator: say gradient_accumulation_steps=N; how often to accumulate depends on GPUs")
        # Ours divides losses, and adds up gradients, by the samples of each accumulation step.
        super().__init__(*args, **kwargs)
        self._accumulation = gradient_accumulation_steps
        self._elastic = elastic
        self._job: Job | None = None
        self._registered = Registered()
        self._said = False

    @property
    def num_processes(self) -> int:
        """Accelerate's number of processes. If the script reads it before `prepare`, the log warns that schedules must
        not depend on it."""
        found: int = self.state.num_processes
        # The Accelerator reads this also while it is made, before it has `_job`.
        early = getattr(self, "_job", self) is None and not self._said
        if early and (at := line(sys._getframe(1), 1)):
            self._said = True
            if self.is_main_process:
                log(PROCESSES.format(line=at))
        return found

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register objects as Accelerate does. The job's checkpoints contain their state, too, even if they are
        registered after `prepare`."""
        super().register_for_checkpointing(*objects)
        for one in objects:
            self._registered.add(one)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does. The job also writes a checkpoint of its own at the end of this step."""
        found = super().save_state(output_dir, *args, **kwargs)
        if self._job is not None:
            FLAGS.checkpoint = True
            if self.is_main_process:
                (Path(found) / OWN).write_text(self._job.run_id)
        return found

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Before `prepare`, load as Accelerate does. After `prepare`, load nothing, because the job's own checkpoint is
        newer. Raises ValueError if the job has no checkpoint yet."""
        if self._job is None:
            super().load_state(input_dir, *args, **kwargs)
            return
        own, how = Path(input_dir or ".") / OWN, " into the model before accelerator.prepare"
        known = own.is_file() and own.read_text() == self._job.run_id
        pass_over(self._job, "Accelerate", "load_state", f"load_state({input_dir!r})", how, known)

    @property
    def job(self) -> Job:
        """The job that `ones.init` returned. Raises RuntimeError before `prepare`."""
        if self._job is None:
            raise RuntimeError(NOT_YET.format(name="job"))
        return self._job

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does. The call that includes the optimizer makes the training elastic, and loads the
        newest checkpoint. Other calls are Accelerate's only, such as for an evaluation's DataLoader."""
        models = [one for one in args if isinstance(one, torch.nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        loaders = [one for one in args if isinstance(one, DataLoader)]
        if not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        if self._job is not None or len(models) != 1 or len(optimizers) != 1 or not loaders:
            raise ValueError(TOGETHER.format(models=len(models), optimizers=len(optimizers), loaders=len(loaders)))
        schedulers = [one for one in args if isinstance(one, LRScheduler)]
        ours = self._join(models[0], optimizers[0], loaders[0], schedulers)
        return tuple(ours[id(one)] if id(one) in ours else super(Accelerator, self).prepare(one) for one in args)

    def _join(self, model: Any, optimizer: Any, loader: DataLoader[Any], schedulers: list[Any]) -> dict[int, Any]:
        """Join the run; return the elastic form of each object, by the id of the object."""
        given = taken_over(loader)
        self._job = job = join("Accelerate", given.batch, self._accumulation, self._elastic)
        check_ranks(job, "Accelerate", self.num_processes, "Accelerator(cpu=True)")
        data = job.loader(given.dataset, **given.settings)
        # Mixed precision and torch.compile, but no DDP of Accelerate's own.
        inner = self.prepare_model(model, evaluation_mode=True)
        wrapped = job.ddp(inner, **(self.ddp_handler.to_kwargs() if self.ddp_handler else {}))
        others: dict[str, Any] = {f"scheduler{number}": one for number, one in enumerate(schedulers)}
        others["registered"] = self._registered
        if self.scaler is not None:
            others["scaler"] = self.scaler
        carried = job.register(model=wrapped, optimizer=optimizer, **others)
        if self.scaler is not None:
            self.scaler = carried[-1]
        stepped = self.prepare_optimizer(carried[0], device_placement=False)
        batches = Batches(data, loader.dataset, self.device, self._accumulation)
        found = {id(model): wrapped, id(optimizer): stepped, id(loader): batches}
        return found | {id(one): new for one, new in zip(schedulers, carried[1:], strict=False)}

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs out of `count`; use it in place of `range(count)`. Synchronises the
        ranks as `Job.epochs` does."""
        if self._job is None:
            raise RuntimeError(NOT_YET.format(name="epochs"))
        run = self._job._run
        run.sizes.spec = replace(run.sizes.spec, epochs=count)
        return self._job.epochs()

    @property
    def sync_gradients(self) -> bool:
        """True in the last accumulation step, in which the optimizer acts."""
        return self._job.updates if self._job is not None else bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if, in the last accumulation step, the gradient scaler skipped the optimizer's step."""
        if self._job is None or self.scaler is None:
            return False
        loop = self._job._run.loop
        return loop.within and loop.part.last and not loop.rate.stepped

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Do nothing: the wrappers of optimizer and scheduler already know the accumulation step."""
        yield


class Registered:
    """Objects given to `register_for_checkpointing`, numbered in the order of the calls. A new object gets its state at
    once if the checkpoint is already loaded."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._loaded: dict[str, Any] = {}

    def add(self, thing: Any) -> None:
        """Register an object, and load its state if a checkpoint has one."""
        name = str(len(self._objects))
        self._objects.append(thing)
        if name in self._loaded:
            thing.load_state_dict(self._loaded.pop(name))

    def state_dict(self) -> dict[str, Any]:
        return self._loaded | {str(number): one.state_dict() for number, one in enumerate(self._objects)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded, objects, self._objects = dict(state), self._objects, []
        for one in objects:
            self.add(one)


class Batches:
    """This rank's local batches of the present epoch, on its device.

    Its length and totals are those of a single process, which needs `accumulation` batches for a base batch. Scripts
    divide the length by the number of accumulation steps, and multiply the totals by it.
    """

    def __init__(self, loader: Loader, dataset: Any, device: torch.device, accumulation: int) -> None:
        self.dataset, self._accumulation, self._loader, self._device = dataset, accumulation, loader, device

    @property
    def total_batch_size(self) -> int:
        return max(1, self._loader.batch_size // self._accumulation)

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job knows the epoch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        samples = len(self._loader) * self._loader.batch_size
        return -(-min(samples, len(self.dataset)) // self.total_batch_size)

    def __iter__(self) -> Iterator[Any]:
        with closing(iter(self._loader)) as batches:  # type: ignore[type-var]
            for batch in batches:
                yield send_to_device(batch, self._device)
