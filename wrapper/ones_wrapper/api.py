"""Entry of the wrapper into a training script: three edits make an ordinary loop elastic.

job = ones.init(batch=64, epochs=10, max_batch=1024)
model, optimizer, loader, scheduler = job.prepare(model, optimizer, data, scheduler)
for epoch in job.epochs():
    for x, y in loader:         # a step boundary each time the next batch is requested
        ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group, TorchGroup, join_torch
from ones_wrapper.job import Job as Job
from ones_wrapper.launch import plain_steps
from ones_wrapper.membership.entered import Entered, enter_before_script, enter_block
from ones_wrapper.network import rendezvous
from ones_wrapper.network.proof import ProofError
from ones_wrapper.process.block import own_block
from ones_wrapper.process.exit_codes import PEER_LOST
from ones_wrapper.process.hooks import requeue_conflict
from ones_wrapper.process.log import log
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import MOST_GPUS
from ones_wrapper.run.changing import start
from ones_wrapper.run.replicas import limits_of, noise_may_be_measured
from ones_wrapper.run.run import Run
from ones_wrapper.run.settings import RunSettings, checked_spec
from ones_wrapper.strategy import Strategy

_run: Run | None = None
"""The run of this process."""
_entered: Entered | None = None
"""Group of ranks that was built before `init`, or None."""

TWICE = (
    "init: a job is one training, and init was called before: a second training, for example another fold, would "
    "continue from its checkpoint. Give each fold a job of its own (`--array=0-4`, with SLURM_ARRAY_TASK_ID as the "
    "fold)"
)


def init(
    *,
    batch: int,
    epochs: int = 0,
    max_batch: int | None = None,
    max_local_batch: int | None = None,
    max_accumulation_steps: int | None = None,
    multiple_of: int = 1,
    scale_lr: bool = True,
    checkpoint_every_s: float | None = None,
    write_behind: bool = True,
    noise_scale: bool = True,
    backend: str | None = None,
    strategy: Strategy | None = None,
    uneven: bool = False,
    shares: str = "all",
    series: Callable[[str], Any] | None = None,
    tokens: Callable[[Any], Any] | None = None,
) -> Job:
    """Join the run: build the process group, and install the handlers of signals and orders.

    `batch` is the global batch, in samples, for which the script's learning rate was chosen. `max_batch` is the largest
    global batch allowed (default: `batch`, so that a resize changes only the GPUs). `max_local_batch` is the largest
    number of samples per GPU in a forward pass (default: `max_batch`). It is halved if the device runs out of memory.
    `max_accumulation_steps` is the largest number of forward passes per GPU in a step, for batches that do not fit in
    one (default: as many as `batch` needs on one GPU). Global batches are multiples of `multiple_of`, except an epoch's
    last, and batches on GPUs that hold fewer samples. `epochs` is the number of epochs to train; 0 for no limit.

    Learning rate and momentum follow the batch by a rule for the optimizer's class (`gradients/learning_rate.py`)
    unless `scale_lr` is False. `checkpoint_every_s` is the time between checkpoints in seconds (default: chosen from
    their measured cost and the job's failures). With `write_behind`, training continues while a checkpoint is written,
    unless the job must wait for it, as in a drain. `noise_scale` measures the gradient noise scale, from which the
    companion computes what a larger batch is worth. On one GPU the measurement keeps a copy of the gradients. `backend`
    is `nccl`, `gloo`, or `mpi` for an exchange through mpi4py (default: nccl if every rank has a GPU, else gloo).
    `strategy` is a way to train other than plain data parallel.

    With `uneven`, each rank's share of a step is in proportion to its measured speed, for GPUs of different kinds
    (`data/uneven.py`). This needs `job.ddp`, and a `max_local_batch` above `batch` / ranks.

    By default all samples of an epoch are used, so that the ranks' shares of a step may differ by one sample. With
    `shares="equal"` all ranks have equally many samples, for a script whose own collectives gather a batch. A step is
    then as large as batch and ranks allow. An epoch leaves out the samples that remain after division, fewer than the
    number of ranks; they differ between epochs.

    `series` is a function from a run id to a logger, called on the rank that reports. The logger is a W&B run, a
    SummaryWriter, the module mlflow after `start_run`, or an object with Lightning's `log_metrics`. It gets GPUs,
    batch, learning rate, speed, pauses and resizes.

    `tokens` is a function from a local batch of the loader to its number of tokens (`lambda batch:
    batch["mask"].sum()`). Give it if the script's loss is the mean over the tokens of its local batch. Gradients and
    the reported loss then become the mean over the step's tokens, however many tokens each rank and accumulation step
    has. Each step then has a small all-reduce, and the passes of a step are fetched together.

    Call `init` once, before anything that needs the device. Synchronises all ranks. Raises ValueError if numbers
    contradict each other, or if the strategy cannot use this number of ranks. Raises RuntimeError if another tool would
    also requeue the job.
    """
    global _run, _entered
    if _run is not None and not _run.ended:
        raise RuntimeError(TWICE)
    started = time.time()
    plain_steps.stop()
    spec = checked_spec(batch, max_batch, max_local_batch, epochs, max_accumulation_steps, multiple_of)
    if why := requeue_conflict():
        raise RuntimeError(why)
    if uneven and strategy is not None:
        raise ValueError(f"init: uneven=True is for plain data parallel, and {strategy.name} divides its own work")
    if shares not in ("all", "equal") or (uneven and shares == "equal"):
        raise ValueError(f"init: shares={shares!r} is 'all' or 'equal', and 'equal' does not go with uneven=True")
    if tokens is not None and strategy is not None:
        raise ValueError(f"init: tokens= is for plain data parallel, and {strategy.name} has a mean of its own")
    entered = enter(backend)
    group = entered.group

    def limited() -> Spec:
        """Return the spec with the strategy's limits, which depend on the ranks."""
        its = replace(spec, limits=limits_of(strategy, spec, group))
        if strategy is not None:
            strategy.bind(group)
        return its

    def fits(world: int) -> bool:
        if not isinstance(strategy, Strategy):
            return True
        return strategy.limits(spec, max(MOST_GPUS, world), group.gpus_per_node).at(world) is not None

    settings = RunSettings(
        scale_lr, checkpoint_every_s, write_behind, strategy, uneven, shares == "equal", series, tokens
    )
    if entered.blocks is not None:
        run = start(entered, settings, started, limited, fits)
    else:
        run = Run(group, limited(), settings, started)
    if noise_scale and noise_may_be_measured(strategy, run.sizes.spec):
        run.loop.noise = NoiseScale(group)
    _run, _entered = run, None
    return Job(run)


def before_script() -> None:
    """Prepare a rank before `ones-run` starts its script. Ends the process if its block has nothing to do or must
    wait."""
    global _entered
    rendezvous.install(os.environ)
    _entered = enter_before_script()


def enter(backend: str | None = None) -> Entered:
    """Return the group of ranks for `init`. If neither a framework's integration nor `ones-run` has built it, build it,
    which is collective. Ends the process if its block has nothing to do."""
    global _entered
    if _run is not None and not _run.ended:
        return Entered(_run.group)
    if _entered is None:
        group, block = join(backend), own_block(os.environ)
        if block is not None and isinstance(group, TorchGroup):
            _entered = enter_block(group, block)
        else:
            _entered = Entered(group)
    elif _entered.early:
        with _entered.losing():
            _entered.set_up(join(backend))
    return _entered


def present_group() -> Group | None:
    """Return the group of ranks of this process's run; None before `init`."""
    return _run.group if _run is not None else None


def join(backend: str | None = None) -> Group:
    """Build the process group: torch.distributed's, or for backend `mpi` a group of the ranks that the MPI launcher
    started. `backend` is by default the variable `ONES_BACKEND`. With `mpi`, torch.distributed is not initialized."""
    backend = backend or os.environ.get("ONES_BACKEND") or None
    if backend != "mpi":
        try:
            return join_torch(backend)
        except ProofError as error:
            log(f"{error}; the ranks begin again")
            raise SystemExit(PEER_LOST) from None
    from ones_wrapper.group.mpi_group import join_mpi  # only those who use MPI need mpi4py

    return join_mpi(os.environ)
