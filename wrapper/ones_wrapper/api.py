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

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ones_wrapper.batch import RULES, LrScale, clamp_batch, lr_factor
from ones_wrapper.boundary import Agreement, Boundary
from ones_wrapper.checkpoint import Checkpoints, Progress, State, Stateful
from ones_wrapper.data import Feed, Share, local_indices
from ones_wrapper.ending import at_end
from ones_wrapper.group import Group, RankError, average, join
from ones_wrapper.launch import LaunchError, job_directory, make_job_directory
from ones_wrapper.mailbox import Inbox, Outbox, say, write_spec
from ones_wrapper.meter import Meter
from ones_wrapper.protocol import DRAIN_WAIT_S, Batch, Bye, Checkpoint, Epoch, Hello, Spec
from ones_wrapper.signals import FLAGS
from ones_wrapper.trace import Trace

STOP_CODE = 128 + 15
"""Exit code after a stop that a signal asked for: training is not finished, and Slurm should see that."""

DRAIN_POLL_S = 0.1


def init(
    *,
    batch: int,
    epochs: int = 0,
    max_batch: int | None = None,
    max_local_batch: int | None = None,
    lr_rule: str = "linear",
    lr_cap: float = 8.0,
    checkpoint_every_s: float = 600.0,
    backend: str | None = None,
) -> Job:
    """Join the run: build the process group, listen to signals and orders.

    `batch` is the global batch, in samples, that the script's learning rate was chosen for; `max_batch` the
    largest that it takes (default: `batch`, so only the GPUs change); `max_local_batch` the most samples per
    GPU per forward pass (default: `max_batch`). `epochs` is how many it means to train, 0 when it does not
    say. The learning rate follows the batch by `lr_rule` (linear, sqrt or none) up to `lr_cap` times.
    `backend` overrides the choice between nccl (every rank has a GPU) and gloo.

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
    launched = float(os.environ.get("ONES_LAUNCHED") or started)
    return Job(
        group,
        Spec(batch, max_batch, max_local_batch, 0, epochs),
        rule=(lr_rule, lr_cap),
        checkpoint_every_s=checkpoint_every_s,
        launch_s=max(0.0, started - launched),
        group_s=time.time() - started,
    )


class Job:
    """One run of an elastic training job, from its first line to its last. Made by `init`."""

    def __init__(
        self,
        group: Group,
        spec: Spec,
        *,
        rule: tuple[str, float],
        checkpoint_every_s: float,
        launch_s: float,
        group_s: float,
    ) -> None:
        env = os.environ
        self.group = group
        self.spec = spec
        self.progress = Progress()
        self._rule = rule
        self._restart = int(env.get("SLURM_RESTART_COUNT") or 0)
        job_id = int(env.get("SLURM_JOB_ID") or 0)
        self._directory = job_directory(env, Path.cwd())
        if group.rank == 0:
            make_job_directory(self._directory)
        spool = env.get("ONES_SPOOL")
        first = group.rank == 0
        self._outbox = Outbox(self._directory, self._restart) if first else None
        self._inbox = (
            Inbox(self._directory, self._restart, Path(spool) if spool else None, job_id) if first else None
        )
        self._boundary = Boundary(group, self._inbox, self._restart, FLAGS)
        self._checkpoints = Checkpoints(self._directory, group, job_id, self._restart)
        self._checkpoint_every_s = checkpoint_every_s
        self._saved_at = time.monotonic()
        self._saved_progress: Progress | None = None
        self._times = (launch_s, group_s)
        self._trace = Trace.of(env, self._restart, group.rank, group.world)
        self._meter = Meter(float(env.get("ONES_REPORT_EVERY_S") or 2.0))
        self._state: State | None = None
        self._feed: Feed | None = None
        self._scale: LrScale | None = None
        self._loaded = ""
        self._note = ""
        self._load_s = 0.0
        self._begun = False
        self._share = Share(0, 1, 1)
        self._reason = "stopped"
        self.batch = self._in_force(0)
        """Global batch in force, in samples."""
        FLAGS.install()
        FLAGS.armed = True
        at_end(self._ended)

    # What scripts ask for

    @property
    def rank(self) -> int:
        """This process's number among the ranks; do files and printing on rank 0."""
        return self.group.rank

    @property
    def world(self) -> int:
        """World size."""
        return self.group.world

    @property
    def device(self) -> torch.device:
        """Where the model and the batches belong."""
        return self.group.device

    @property
    def lr_factor(self) -> float:
        """Learning rate in force over the one that the script set."""
        return lr_factor(self.batch, self.spec.base_batch, *self._rule)

    def ddp(self, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """The model in data parallel, its gradients averaged over samples rather than over ranks.

        So the script's loss stays the mean over its local batch though local batches may differ in size.
        `options` are those of torch's DistributedDataParallel.
        """
        model = model.to(self.device)
        ids = [self.device] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **options)
        # A lambda, since DDP judges a function's annotations and takes no strings.
        wrapped.register_comm_hook(
            self, lambda job, bucket: average(bucket.buffer(), job._share.samples, job._share.total)
        )
        return wrapped

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
        if self._state is not None:
            raise RuntimeError("register: call it once, with everything that training carries")
        if self.group.world > 1 and not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "register: model is not the one that job.ddp returned; its gradients would not be averaged"
            )
        extras = dict(others)
        if scheduler is not None:
            extras["scheduler"] = scheduler
        self._state = State(model, optimizer, extras)
        started = time.monotonic()
        loaded = self._checkpoints.load(self._state)
        self._load_s = time.monotonic() - started
        self._loaded, self._note, self.progress = loaded.name, loaded.note, loaded.progress
        self._scale = LrScale(optimizer)

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
        if self._feed is not None:
            raise RuntimeError(
                "loader: a job trains on one dataset; use an ordinary DataLoader to evaluate on another"
            )
        if taken := {"batch_size", "sampler", "batch_sampler", "drop_last", "generator"} & set(options):
            raise ValueError(f"loader: {', '.join(sorted(taken))} cannot be given; ones.init holds the batch")
        self._feed = Feed(
            dataset,
            shuffle=shuffle,
            seed=seed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            options=options,
        )
        return Loader(self)

    def epochs(self) -> Iterator[int]:
        """The epochs still to train, from the one that the checkpoint stopped in; without end where init's is
        0.
        """
        self._begin()
        while self.spec.epochs == 0 or self.progress.epoch < self.spec.epochs:
            epoch = self.progress.epoch
            yield epoch
            if self.progress.epoch == epoch:
                self.epoch_end()
        self._save("at the end")
        self._reason = "finished"

    def loss(self, loss: torch.Tensor | float) -> None:
        """Tell the loss of this step, the mean over the local batch. Costs no wait for the GPU."""
        self._meter.loss(loss, self._share.samples)

    def epoch_end(self, *, accuracy: float | None = None, loss: float | None = None) -> None:
        """The epoch is over: report it and go on to the next. `loss` overrides the mean of what `job.loss`
        was told.

        All ranks call it; it is a step boundary.
        """
        self._begin()
        progress = self.progress
        total, samples = self.group.total(self._meter.take_epoch())
        if loss is None and samples:
            loss = total / samples
        self._send(Epoch(progress.epoch, progress.step, progress.cursor, loss, accuracy))
        progress.epoch += 1
        progress.cursor = 0
        self._act()

    # The step boundary

    def steps(self) -> Iterator[Any]:
        """The local batches of the present epoch from the cursor on; what `Loader` iterates over."""
        self._begin()
        feed, progress = cast(Feed, self._feed), self.progress
        scale, epoch = cast(LrScale, self._scale), progress.epoch
        order = feed.order(epoch)
        while progress.epoch == epoch and progress.cursor < feed.samples:
            batch = self.batch
            self._meter.start()
            for share, local in feed.batches(order, progress.cursor, batch, self.world, self.rank):
                self._share, scale.stepped = share, False
                used = local_indices(order, share)[: share.samples] if self._trace else []
                try:
                    yield local
                except GeneratorExit:  # the script left the loop: the step counts if the optimizer made it
                    if scale.stepped:
                        self._commit(share, used)
                    raise
                self._commit(share, used)
                self._act()
                self._meter.start()
                if self.batch != batch:
                    break

    def _commit(self, share: Share, used: list[int]) -> None:
        progress = self.progress
        if self._trace:
            self._trace.step(progress.epoch, progress.step, used)
        progress.cursor += share.total
        progress.samples += share.total
        progress.step += 1
        if report := self._meter.stop(progress, share.total, self.batch, self.lr_factor):
            self._send(report)

    def _act(self) -> None:
        """Do what orders and signals ask for, all ranks the same at the same step."""
        due = time.monotonic() - self._saved_at >= self._checkpoint_every_s
        agreed = self._boundary.meet(self._meter.step_s, due)
        if agreed is None:
            return
        if agreed.wanted and agreed.number != self._boundary.applied:
            self._boundary.applied = agreed.number
            self._change_batch(agreed.wanted, agreed.number)
        if agreed.drain:
            self._drain(agreed.number)
        elif agreed.stop:
            self._save("before the stop that a signal asked for")
            self._leave("signal")
        elif agreed.checkpoint:
            self._save("in passing")

    def _change_batch(self, wanted: int, number: int) -> None:
        self.progress.batch = wanted
        before, self.batch = self.batch, self._in_force(wanted)
        if self.batch != before:
            if report := self._meter.flush():
                self._send(report)
            cast(LrScale, self._scale).factor = self.lr_factor
        self._send(Batch(self.progress.step, self.batch, self.lr_factor, number))

    def _in_force(self, wanted: int) -> int:
        spec = self.spec
        return clamp_batch(wanted or spec.base_batch, self.world, spec.max_batch, spec.max_local_batch)

    def _save(self, why: str, order: int | None = None) -> bool:
        """Checkpoint and report it; False where it could not be written, which is said."""
        state = self._state
        if state is None or (order is None and self._saved_progress == self.progress):
            return state is not None
        if report := self._meter.flush():
            self._send(report)
        started = time.monotonic()
        FLAGS.checkpoint = False
        try:
            saved = self._checkpoints.save(state, self.progress)
        except RankError as error:
            if self.rank == 0:
                say(
                    f"the checkpoint {why} could not be written ({error}); training goes on, the last one stays"
                )
            self._saved_at = time.monotonic()
            return False
        self._saved_at = time.monotonic()
        self._saved_progress = Progress(**vars(self.progress))
        p = self.progress
        seconds = self._saved_at - started
        self._send(Checkpoint(saved.name, p.epoch, p.cursor, p.step, saved.bytes, seconds, order))
        return True

    def _drain(self, number: int) -> None:
        """Checkpoint, report it, wait for the requeue; carry on when it is called off or does not come."""
        if not self._save(f"for order {number}", number):
            return
        wait_s = float(os.environ.get("ONES_DRAIN_WAIT_S") or DRAIN_WAIT_S)
        started = time.monotonic()
        while True:
            over = time.monotonic() - started > wait_s
            answer: Agreement = self._boundary.wait(number, over)
            if answer.stop:
                self._leave("drained")
            if answer.drain:  # called off by a newer order, or nobody came
                if self.rank == 0:
                    say(
                        f"carrying on after order {number}: {'no requeue came' if over else 'a newer order came'}"
                    )
                return
            time.sleep(DRAIN_POLL_S)

    def _leave(self, reason: str) -> None:
        self._reason = reason
        raise SystemExit(STOP_CODE)

    # Beginning and end

    def _begin(self) -> None:
        """Before the first step: everything is known, so say hello."""
        if self._begun:
            return
        if self._state is None or self._feed is None:
            missing = "job.register(...)" if self._state is None else "job.loader(...)"
            raise RuntimeError(f"training starts without {missing}; call it before the first epoch")
        self._begun = True
        progress, feed, group = self.progress, self._feed, self.group
        if progress.dataset not in (0, feed.samples):
            raise ValueError(
                f"the checkpoint {self._loaded} was taken with {progress.dataset} samples an epoch, the dataset now "
                f"has {feed.samples}; use the same dataset, or another job directory (ONES_JOB_DIR)"
            )
        progress.dataset = feed.samples
        first = self._boundary.first()
        if first.wanted:
            progress.batch, self._boundary.applied = first.wanted, first.number
        self.batch = self._in_force(progress.batch)
        cast(LrScale, self._scale).factor = self.lr_factor
        s = self.spec
        self.spec = Spec(s.base_batch, s.max_batch, s.max_local_batch, feed.samples, s.epochs)
        if self._trace:
            self._trace.begin(progress.step)
        if self.rank == 0:
            write_spec(self._directory, self.spec)
        launch_s, group_s = self._times
        self._send(
            Hello(
                nodes=group.nodes,
                gpus_per_node=group.gpus_per_node,
                world=group.world,
                batch=self.batch,
                lr_factor=self.lr_factor,
                base_batch=s.base_batch,
                max_batch=s.max_batch,
                dataset=feed.samples,
                epochs=s.epochs,
                epoch=progress.epoch,
                cursor=progress.cursor,
                step=progress.step,
                checkpoint=self._loaded,
                note=self._note[:1000],
                launch_s=launch_s,
                group_s=group_s,
                load_s=self._load_s,
            )
        )

    def _send(self, report: Any) -> None:
        if self._outbox is not None:
            self._outbox.send(report)

    def _ended(self, code: int, note: str) -> None:
        """The script ended. Nothing collective here: other ranks may be gone."""
        FLAGS.armed = False
        if report := self._meter.flush():
            self._send(report)
        planned = self._reason in ("signal", "drained") and code == STOP_CODE
        reason = "error" if code and not planned else self._reason
        self._send(Bye(reason, self.progress.step, code, note))
        sys.stdout.flush()
        if code == 0:
            with suppress(RuntimeError):
                self.group.close()


class Loader:
    """The batches of the present epoch; made by `Job.loader`. Asking it for the next batch is the step
    boundary.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        return self._job.steps()


__all__ = ["Job", "LaunchError", "Loader", "init"]
