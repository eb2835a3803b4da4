"""Limits and costs of a training strategy for each number of GPUs, as plain data that the companion reads.

A strategy (`ones_wrapper.strategy`) computes these limits, the job writes them into `spec.json`, and every schedule
obeys them. Contradictory numbers are refused both in the job and in the companion. Needs only the standard library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ones_wrapper.protocol.fields import MAX_INT, MAX_ROWS, ProtocolError

MEMORY_SHARE = 0.92
"""Fraction of a GPU's memory that a strategy's formulas may fill; the rest is for the allocator."""
MOST_GPUS = 256
"""Largest number of GPUs for which a strategy reports limits, unless the job has more."""
MAX_NOTES = 16
MAX_NOTE = 100
"""Largest number of characters of a strategy's name, and of each text in `carries` and `resets`. `MAX_NOTES` is the
largest number of texts."""


@dataclass(frozen=True)
class SizeLimits:
    """Limits at one number of GPUs. Raises `ProtocolError` if numbers contradict each other."""

    gpus: int
    """World size."""
    replicas: int
    """Data-parallel degree: number of replicas over which a step's samples are split. A replica has consecutive
    ranks."""
    quantum: int = 1
    """Divisor of all global batches, except an epoch's last."""
    together: int = 1
    """Number of consecutive ranks to place on one node; 1 for no preference. If a node has fewer GPUs, the companion
    uses the greatest common divisor of both numbers."""
    fixed_bytes: int = 0
    """Bytes of a GPU's memory that do not depend on the batch: weights, gradients, optimizer state, workspace; 0 if
    unknown."""
    sample_bytes: int = 0
    """Bytes of a GPU's memory for each sample of a replica's local batch; 0 if unknown."""
    replica_bytes: int = 0
    """Bytes that a rank sends within its replica in an optimizer step, for each sample of the replica's local batch; 0
    if unknown."""
    data_bytes: int = 0
    """Bytes that a rank sends to other replicas in an optimizer step; 0 if unknown."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.endswith("bytes") else 1
            if not least <= value <= MAX_INT:
                raise ProtocolError(f"{field.name}: {value!r:.40} is not from {least} to {MAX_INT}")
        if self.gpus % self.replicas:
            raise ProtocolError(f"replicas: {self.gpus} GPUs are not {self.replicas} parts of equal size")
        if self.gpus % self.together:
            raise ProtocolError(f"together: {self.gpus} GPUs are not groups of {self.together}")

    def most_local(self, memory_bytes: int) -> int | None:
        """Return the largest local batch of a replica that fits into `memory_bytes` per GPU; 0 if no sample fits. None
        if the GPU's memory or the bytes of a sample are unknown."""
        if not memory_bytes or not self.sample_bytes:
            return None
        return self._usable(memory_bytes) // self.sample_bytes

    def _usable(self, memory_bytes: int) -> int:
        return max(0, int(memory_bytes * MEMORY_SHARE) - self.fixed_bytes)

    def measured_sample_bytes(self, memory_bytes: int, samples: int) -> int:
        """Return the bytes of a sample, given that `samples` samples are the most that fit by measurement."""
        return max(1, self._usable(memory_bytes) // samples)


@dataclass(frozen=True)
class StrategyLimits:
    """Limits of a strategy at all numbers of GPUs. Raises `ProtocolError` for contradictory values."""

    strategy: str
    """Name of the strategy in reasons shown to people."""
    sizes: tuple[SizeLimits, ...] = ()
    """Limits for each usable number of GPUs, ascending. Empty if every number is usable, and each GPU is then a
    replica."""
    memory_bytes: int = 0
    """Bytes of a GPU's memory; 0 if unknown."""
    exact: bool = True
    """True if, at the same global batch, training computes the same at any number of GPUs."""
    batch_fixed: bool = False
    """True if the global batch must not change now."""
    carries: tuple[str, ...] = ()
    """Names of state, besides model and optimizer, that a resize keeps."""
    resets: tuple[str, ...] = ()
    """Names of state that begins again at each resize."""
    reshards: bool = False
    """True if a checkpoint's shards depend on the number of GPUs, so that each resize reads and writes the whole
    checkpoint."""
    min_steps: int = 0
    """Least optimizer steps between two resizes."""

    def __post_init__(self) -> None:
        if not self.strategy or len(self.strategy) > MAX_NOTE:
            raise ProtocolError(f"strategy: {self.strategy!r:.40} is no name of at most {MAX_NOTE} characters")
        for name in ("carries", "resets"):
            notes = getattr(self, name)
            if len(notes) > MAX_NOTES or any(len(note) > MAX_NOTE for note in notes):
                raise ProtocolError(f"{name}: more than {MAX_NOTES} texts of at most {MAX_NOTE} characters")
        if len(self.sizes) > MAX_ROWS:
            raise ProtocolError(f"sizes: more than {MAX_ROWS} rows")
        gpus = [row.gpus for row in self.sizes]
        if gpus != sorted(set(gpus)):
            raise ProtocolError("sizes: not in ascending order of gpus")

    def at(self, gpus: int) -> SizeLimits | None:
        """Return the limits at `gpus` GPUs; None if the strategy cannot use that number."""
        if not self.sizes:
            return SizeLimits(gpus, gpus)
        place = bisect_left(self.sizes, gpus, key=lambda row: row.gpus)
        found = self.sizes[place] if place < len(self.sizes) else None
        return found if found is not None and found.gpus == gpus else None

    def corrected(self, gpus: int, samples: int) -> StrategyLimits:
        """Return the limits after a measurement: `samples` is the largest local batch at `gpus` GPUs. `sample_bytes` is
        multiplied by the same factor at all sizes. Nothing changes if formula or memory is unknown."""
        row = self.at(gpus)
        if row is None or not row.most_local(self.memory_bytes):
            return self
        factor = row.measured_sample_bytes(self.memory_bytes, samples) / row.sample_bytes
        rows = (replace(one, sample_bytes=min(MAX_INT, max(1, int(one.sample_bytes * factor)))) for one in self.sizes)
        return replace(self, sizes=tuple(rows))

    def refusal(self, gpus: int) -> str:
        """Return why the strategy cannot use `gpus` GPUs, with the nearest usable numbers; empty if it can."""
        if self.at(gpus) is not None:
            return ""
        return refusal(self.strategy, gpus, [row.gpus for row in self.sizes])


def rows_within(rows: Iterable[SizeLimits], any_number: bool) -> tuple[SizeLimits, ...]:
    """Return the rows with the largest numbers of GPUs, as many as `StrategyLimits.sizes` may have. With `any_number`,
    return no rows instead of too many: every number is then usable."""
    found = tuple(rows)
    if len(found) <= MAX_ROWS:
        return found
    return () if any_number else found[-MAX_ROWS:]


def refusal(strategy: str, gpus: int, fitting: list[int]) -> str:
    """Return the message for a number of GPUs that a strategy cannot use. `fitting` are usable numbers, ascending."""
    below = [size for size in fitting if size < gpus]
    nearest = [str(size) for size in (*below[-2:], *fitting[len(below) : len(below) + 2])]
    would = f"{', '.join(nearest)} would fit" if nearest else "no number would fit"
    return f"{strategy}: {gpus} GPUs cannot be used; {would}"
