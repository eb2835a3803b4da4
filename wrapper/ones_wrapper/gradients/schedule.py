"""Learning rate schedules that follow the training's progress when the batch changes.

A script's schedule is written in steps of its base batch, for example a cosine over `epochs * len(loader)` steps. A
step of twice the batch uses the samples of two such steps, so the schedule must advance by two. For this `Job.register`
returns each scheduler in a wrapper. Inside the loop over batches, `step()` of the wrapper steps the script's scheduler
once for each base batch of samples used: several times, or not at all. Outside the loop, `step()` is the script's own.

The number of samples that do not fill a base batch is kept in the scheduler's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from ones_wrapper.data.progress import TrainingProgress

METRICS = (
    "scheduler.step(...): {name} is given a metric inside the loop over batches, where the number of steps depends on "
    "the batch. Step it once an epoch, after that loop: `scheduler.step(loss)`"
)
EPOCH = (
    "scheduler.step(...): inside the loop over batches a schedule follows progress, and takes no number. "
    "Write `scheduler.step()`, and give {name} its lengths in steps rather than epochs: "
    "`epochs * len(loader)`"
)
UNWRAPPED = (
    "{name}.step: this is the scheduler that the job was given. It counts steps, which become fewer as the "
    "batch grows; use the one that was returned, which follows progress: `model, optimizer, scheduler = "
    "job.prepare(model, optimizer, scheduler)`"
)
DIFFERS = (
    "{name} gives another rate at step {step} than at the checkpoint ({now:g} and {before:g} times the base rate): "
    "write it in steps of len(loader), without values that change with the GPUs, such as the number of processes"
)
MADE_OTHERWISE = (
    "{name} is made with {key}={now!r:.60} here, and was made with {before!r:.60} at the first start, which stays in "
    "force: write schedules in steps of len(loader), without values that change with the GPUs, such as the number of "
    "processes"
)
MADE = "ones:made"
"""Key, in a scheduler's state, of its state as the job's first start made it."""
REST = "ones:samples"
"""Key, in a scheduler's state, of the number of samples that do not fill a base batch yet."""


def base_steps(samples: int, base_batch: int) -> int:
    """Return the number of base batches in `samples` samples, rounded up."""
    return -(-samples // base_batch)


def counted(progress: TrainingProgress, total: int, batch: int, base_batch: int, least_step: int = 1) -> int:
    """Return the number of samples by which schedules advance in a step of `total` samples. `batch` is the present
    global batch, `progress` the position before the step.

    In an epoch's last step, a last base batch counts as full, so that each epoch is a whole number of base batches. A
    step also counts as the last if fewer than `least_step` samples remain after it, since the epoch does not use these.
    """
    end = progress.cursor + total
    if 0 <= progress.dataset - end < least_step:
        end = progress.dataset
    # A step that is one sample short, so that the last step has two samples, is not yet the end.
    if end == progress.dataset or total < batch - (end == progress.dataset - 2):
        return base_steps(end, base_batch) * base_batch - progress.cursor
    return total


def is_scheduler(thing: Any) -> bool:
    """Return True for a learning rate scheduler: torch's own, or an object with the same methods."""
    if isinstance(thing, LRScheduler):
        return True
    methods = all(callable(getattr(thing, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return methods and hasattr(thing, "last_epoch") and not isinstance(thing, Optimizer)


class Schedules:
    """The schedulers of a job. Their wrappers share the present step."""

    def __init__(
        self,
        base_batch: int,
        due: Callable[[], bool] = lambda: True,
        of_ranks: Callable[[float], list[float]] = lambda value: [value],
    ) -> None:
        """`due` returns True in a step's last accumulation step. `of_ranks` returns a value of each rank, given this
        rank's."""
        self.of_ranks, self.base_batch, self.due = of_ranks, base_batch, due
        self.samples = 0
        """Number of samples by which schedules advance in the present step."""
        self.rest = 0
        """Number of samples, before the present step, that do not fill a base batch."""
        self.within = False
        """True if the script is in the loop over batches."""
        self._wrapped: list[ProgressScheduler] = []
        self.differences: list[str] = []
        """Messages about schedules that differ from the checkpoint's."""

    def wrap(self, thing: Any, known: bool = False) -> Any:
        """Return a wrapper of a scheduler; any other object is returned as it is. An `AveragedModel` is changed in
        place, so that it follows progress, too. With `known`, any object with a method `step` counts as a scheduler."""
        if isinstance(thing, AveragedModel):
            thing.update_parameters = _Average(thing.update_parameters, self)  # type: ignore[method-assign]
        if not (is_scheduler(thing) or (known and callable(getattr(thing, "step", None)))):
            return thing
        self._wrapped.append(ProgressScheduler(thing, self))
        return self._wrapped[-1]

    def enter(self, samples: int, before: int = 0) -> None:
        """Begin a step that advances schedules by `samples` samples, after `before` samples in earlier steps."""
        self.samples, self.rest, self.within = samples, before % self.base_batch, True
        for wrapped in self._wrapped:
            wrapped.mark()

    def check(self) -> None:
        """Raise RuntimeError if the script stepped a scheduler itself, rather than its wrapper, in the present step."""
        for wrapped in self._wrapped:
            wrapped.check()

    def leave(self) -> None:
        """Record that the script has left the loop over batches."""
        self.within = False


class _Average:
    """Function that updates an averaged model once for each base batch of samples used: k updates apply decay ** k."""

    def __init__(self, update: Callable[[Any], None], schedules: Schedules) -> None:
        self._update, self._schedules = update, schedules
        self._samples: int | None = None
        """Number of samples that no update has counted yet; None before the first call in this run."""

    def __call__(self, model: Any) -> None:
        times, schedules = 1, self._schedules
        if schedules.within:
            if not schedules.due():
                return
            rest = schedules.rest if self._samples is None else self._samples
            times, self._samples = divmod(rest + schedules.samples, schedules.base_batch)
        for _ in range(times):
            self._update(model)


class ProgressScheduler:
    """Scheduler wrapper that follows the training's progress in base batches. All other attributes are those of the
    script's own `scheduler`."""

    def __init__(self, scheduler: Any, schedules: Schedules) -> None:
        self.scheduler, self._schedules = scheduler, schedules
        self._samples = 0
        """Number of samples that the scheduler has not counted yet, fewer than a base batch."""
        self._marks: Any = None
        self._made = _plain(scheduler.state_dict()) if callable(getattr(scheduler, "state_dict", None)) else {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance to the progress after this step, inside the loop over batches. Outside the loop, step the script's
        own scheduler on all ranks, with a metric averaged over the ranks. Raises RuntimeError for an argument (metric
        or epoch) inside the loop."""
        schedules = self._schedules
        if not schedules.within:
            if isinstance(self.scheduler, ReduceLROnPlateau):
                args, kwargs = (self._alike(*args, **kwargs),), {}
            self.scheduler.step(*args, **kwargs)
            return
        name = type(self.scheduler).__name__
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise RuntimeError(METRICS.format(name=name))
        if any(value is not None for value in (*args, *kwargs.values())):
            raise RuntimeError(EPOCH.format(name=name))
        if not schedules.due():
            return
        steps, self._samples = divmod(self._samples + schedules.samples, schedules.base_batch)
        for _ in range(steps):
            if not self._over():
                self.scheduler.step()
        self.mark()

    def _alike(self, metrics: Any, epoch: Any = None) -> float:
        """Return the mean of the ranks' metrics, so that all ranks get the same learning rate. Collective."""
        found = self._schedules.of_ranks(float(metrics))
        return found[0] if len(set(found)) == 1 else sum(found) / len(found)

    def _over(self) -> bool:
        """True if the schedule has ended, so that a further step may raise an error (OneCycleLR)."""
        last, total = (getattr(self.scheduler, name, None) for name in ("last_epoch", "total_steps"))
        return isinstance(last, int) and isinstance(total, int) and last >= total

    def mark(self) -> None:
        """Store the position of the script's own scheduler, with which `check` compares."""
        self._marks = _marks(self.scheduler)

    def check(self) -> None:
        """Raise RuntimeError if the script's own scheduler was stepped since `mark`."""
        if _marks(self.scheduler) != self._marks:
            raise RuntimeError(UNWRAPPED.format(name=type(self.scheduler).__name__))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script's own scheduler, with the number of samples not counted yet."""
        return {**self.scheduler.state_dict(), REST: self._samples, MADE: self._made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`, or from the script's own scheduler."""
        state = dict(state_dict)
        self._samples = state.pop(REST, 0)
        first = state.pop(MADE, self._made)
        if other := _other(first, self._made):
            name = type(self.scheduler).__name__
            self._schedules.differences.append(MADE_OTHERWISE.format(name=name, **other))
        self._made = first
        self.scheduler.load_state_dict(state)
        self._schedules.differences += _differences(self.scheduler)
        self.mark()


def _marks(scheduler: Any) -> list[Any]:
    """Return counters that change with each step of a scheduler, or of one inside it."""
    own = [getattr(scheduler, name, None) for name in ("last_epoch", "_step_count")]
    return own + [_marks(part) for part in getattr(scheduler, "_schedulers", ())]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _other(before: Any, now: Any, key: str = "") -> dict[str, Any]:
    """Return the first key under which two plain states differ, with both values; empty if there is none."""
    if isinstance(before, dict) and isinstance(now, dict) and (not key or before.keys() == now.keys()):
        parts = ((before[name], now[name], name) for name in before if name in now)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = ((one, two, key) for one, two in zip(before, now, strict=True))
    else:
        return {} if before == now else {"key": key, "before": before, "now": now}
    return next((found for part in parts if (found := _other(*part))), {})


def _differences(scheduler: Any) -> list[str]:
    """Return a message for each LambdaLR whose functions now give another rate than at the checkpoint. Checkpoints do
    not hold the functions."""
    found = [text for part in getattr(scheduler, "_schedulers", ()) for text in _differences(part)]
    saved = getattr(scheduler, "_last_lr", None)
    if not isinstance(scheduler, LambdaLR) or not saved:
        return found
    step = scheduler.last_epoch
    for base, rule, before in zip(scheduler.base_lrs, scheduler.lr_lambdas, saved, strict=False):
        now = float(rule(step))
        if base and abs(now - before / base) > 1e-6 * max(1.0, abs(now)):
            return [*found, DIFFERS.format(name=type(scheduler).__name__, step=step, now=now, before=before / base)]
    return found
