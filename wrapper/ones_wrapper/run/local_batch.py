"""A job's largest local batch: the script's limit, lowered by a strategy's formula and by trials.

A formula gives only the memory of activations, without allocator, workspaces and fragmentation. If a pass runs out of
memory in training, the local batch is halved (`memory.py`). A script may also call `Job.probe`, which doubles the size
until a pass fails, and then bisects. HFTA (2102.02344) finds its largest number of models in this way. Each size is
tried several times, since a later pass may need more memory than the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ones_wrapper.checkpoint import SavedState
from ones_wrapper.data.randomness import keep_generators
from ones_wrapper.devices.room import reserved
from ones_wrapper.group import Group
from ones_wrapper.process import hang_detector
from ones_wrapper.protocol import Spec
from ones_wrapper.run import memory
from ones_wrapper.run.memory import LargestBatch
from ones_wrapper.run.replicas import as_found

TRIES = 3
BUCKETS, MOMENTS = 1, 2
"""Memory that the first steps allocate for gradient buckets and an optimizer's two moments, in multiples of the trained
parameters' size."""


class LocalBatch:
    """The largest local batch of one run. Methods are collective unless they say otherwise."""

    def __init__(self, directory: Path, spec: Spec, group: Group) -> None:
        """`spec` is the spec as the script declared it."""
        self._directory, self._declared, self._group = directory, spec.max_local_batch, group
        strategy = f", {spec.limits.strategy}" if spec.limits else ""
        self._device = memory.device_name(group.device) + strategy
        found = memory.look_up(directory, self._declared, self._device)
        self.own = found.samples if found is not None else self._declared
        """Largest number of samples on this rank's device by an earlier trial; without a trial the script's limit."""
        self.found: LargestBatch | None = None
        """Smallest result of the trials on all ranks; None without a trial."""
        self.trying = 0
        self._by_size = spec.limits is not None

    @property
    def _gpus(self) -> int:
        return self._group.world if self._by_size else 0

    def applied(self, spec: Spec) -> Spec:
        """Return `spec` with its local batch limited to the smallest result of earlier trials on any rank."""
        found = self._group.gather(memory.look_up(self._directory, self._declared, self._device))
        self.found = min((LargestBatch(*one) for one in found if one), default=None)
        return as_found(spec, self._group.world, self.found)

    def classify_error(self, error: BaseException, samples: int) -> tuple[int, str] | None:
        """Call `memory.classify_error` for an error in a pass of `samples` samples. Not collective."""
        return memory.classify_error(error, self._directory, self._declared, samples, self._device, self._gpus)

    def probe(self, one_pass: Callable[[int], object], state: SavedState, unit: int, together: bool) -> LargestBatch:
        """Return the largest number of samples in a pass, found by trials unless an earlier run has found it at this
        world size.

        `together` is True if ranks wait for each other within a pass. If one then runs out of memory, all ranks end,
        since others may never leave their pass. They start again, with `trying` as the size that failed. Raises
        MemoryError if one `unit` does not fit.
        """
        group, device = self._group, self._device
        found = group.on_first(lambda: memory.look_up(self._directory, self._declared, device))
        if found is not None and (its := LargestBatch(*found)).gpus == self._gpus:
            return its

        def fits(size: int) -> bool:
            self.trying = size
            held = _holds(one_pass, size, state, group, together)
            self.trying = 0
            return held

        samples = largest(fits, self._declared, unit)
        if not samples:
            raise MemoryError(f"probe: {unit} samples a pass do not fit into the memory of this device ({device})")
        self.found = kept = LargestBatch(samples, self._gpus)
        group.on_first(lambda: memory.write(self._directory, self._declared, kept, device))
        return kept


def largest(fits: Callable[[int], bool], most: int, unit: int = 1) -> int:
    """Return the largest multiple of `unit`, up to `most`, for which `fits` returns True; 0 if one unit does not
    fit."""
    most -= most % unit
    held, size = 0, min(unit, most)
    while held < size and fits(size):
        held, size = size, min(2 * size, most)
    failed = size if size > held else most + unit
    while failed - held > unit:
        middle = held + (failed - held) // (2 * unit) * unit
        if fits(middle):
            held = middle
        else:
            failed = middle
    return held


@contextmanager
def keep_for_first_step(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Context that occupies as much memory as the first steps will allocate. Parameters that have optimizer state
    already, from a loaded checkpoint, need no more for moments."""
    coming = [
        torch.empty_like(parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach())
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        for _ in range(BUCKETS + (0 if optimizer.state.get(parameter) else MOMENTS))
    ]
    try:
        yield
    finally:
        coming.clear()


def _holds(one_pass: Callable[[int], object], samples: int, state: SavedState, group: Group, together: bool) -> bool:
    """Return True if passes of `samples` samples fit on all ranks. Collective. Restores buffers and random numbers, and
    drops gradients. With `together`, lack of memory is raised as an error; other errors always are."""
    model, optimizers = state.model, list(state.optimizers.values())
    buffers = [buffer.detach().clone() for buffer in model.buffers()]
    failed = False
    hang_detector.beat()
    with keep_generators():
        for _ in range(TRIES):
            try:
                with keep_for_first_step(optimizers), reserved(group.device, group.world):
                    one_pass(samples)
            except Exception as error:
                if together or not memory.is_out_of_memory(error):
                    raise
                failed = True
            model.zero_grad()
            if failed:
                break
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return not group.maximum([int(failed)])[0]
