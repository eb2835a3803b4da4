"""Limits and costs of a training strategy, by the number of GPUs: plain data that the companion reads.

A strategy (`ones_wrapper.strategy`) makes these limits, `spec.json` holds them, and every schedule keeps them. Their
classes refuse contradictory numbers, in the job and in the companion. Needs only the standard library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ones_wrapper.protocol.fields import MAX_INT, MAX_ROWS, ProtocolError

MEMORY_SHARE = 0.92
"""Share of a GPU's memory that formulas may plan with; the allocator needs the rest."""
MOST_GPUS = 256
"""Number of GPUs up to which a strategy reports its limits, or the job's own number if larger."""
MAX_NOTES = 16
MAX_NOTE = 100
"""Most texts of `carries` and `resets`, and most characters of each text and of a strategy's name."""


@dataclass(frozen=True)
class SizeLimits:
    """Limits at one number of GPUs. Raises `ProtocolError` for numbers that contradict each other."""

    gpus: int
    """World size."""
    replicas: int
    """Data-parallel degree: parts into which a step's samples are split. Each replica has consecutive ranks."""
    quantum: int = 1
    """Divisor of all global batches but an epoch's last."""
    together: int = 1
    """Number of consecutive ranks to place on one node; 1 for no such wish. If a node cannot hold all ranks, the
    companion takes the greatest common divisor of this number and the node's GPUs."""
    fixed_bytes: int = 0
    """Fixed bytes of a GPU: weights, gradients, optimizer, workspace. 0 here and below: unknown."""
    sample_bytes: int = 0
    """Bytes of a GPU for each sample of a replica's local batch."""
    replica_bytes: int = 0
    """Bytes that a rank sends within its replica in an optimizer step, for each sample of the replica's local batch."""
    data_bytes: int = 0
    """Bytes that a rank sends between replicas in an optimizer step."""

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
        """Return the most samples of a replica's pass that fit into `memory_bytes` of each GPU; 0 for none. None if the
        memory or its use is unknown."""
        if not memory_bytes or not self.sample_bytes:
            return None
        return self._usable(memory_bytes) // self.sample_bytes

    def _usable(self, memory_bytes: int) -> int:
        """Bytes of a GPU's memory that are left for samples."""
        return max(0, int(memory_bytes * MEMORY_SHARE) - self.fixed_bytes)

    def measured_sample_bytes(self, memory_bytes: int, samples: int) -> int:
        """Return the bytes of a sample, given that at most `samples` samples were found to fit into this memory."""
        return max(1, self._usable(memory_bytes) // samples)


@dataclass(frozen=True)
class StrategyLimits:
    """Limits of a strategy at all numbers of GPUs. Raises `ProtocolError` for contradictory values."""

    strategy: str
    """Name of the strategy, for reasons shown to people."""
    sizes: tuple[SizeLimits, ...] = ()
    """Limits for each valid number of GPUs, ascending; empty if any number is valid and each GPU is a replica."""
    memory_bytes: int = 0
    """Memory of a GPU; 0 if unknown."""
    exact: bool = True
    """True if training is mathematically unchanged by another number of GPUs at the same global batch."""
    batch_fixed: bool = False
    """True if the global batch must not change now."""
    carries: tuple[str, ...] = ()
    """Descriptions of state that a resize carries over besides model and optimizer."""
    resets: tuple[str, ...] = ()
    """Descriptions of state that a resize begins again."""
    reshards: bool = False
    """True if a checkpoint is split again for another number of GPUs, so that a resize reads and writes all of it."""
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
        """Return the limits corrected by a measurement: at `gpus` GPUs the largest pass has `samples` samples. The
        bytes of a sample change by the same factor at all sizes. Unchanged if the formula or the memory is unknown."""
        row = self.at(gpus)
        if row is None or not row.most_local(self.memory_bytes):
            return self
        factor = row.measured_sample_bytes(self.memory_bytes, samples) / row.sample_bytes
        rows = (replace(one, sample_bytes=min(MAX_INT, max(1, int(one.sample_bytes * factor)))) for one in self.sizes)
        return replace(self, sizes=tuple(rows))

    def refusal(self, gpus: int) -> str:
        """Return the reason why the strategy cannot use `gpus` GPUs, and which numbers would fit; empty if it can."""
        if self.at(gpus) is not None:
            return ""
        return refusal(self.strategy, gpus, [row.gpus for row in self.sizes])


def rows_within(rows: Iterable[SizeLimits], any_number: bool) -> tuple[SizeLimits, ...]:
    """Return the rows of the largest numbers of GPUs, as many as `StrategyLimits.sizes` takes. With `any_number`,
    return none if there are too many: a number without a row would be refused."""
    found = tuple(rows)
    if len(found) <= MAX_ROWS:
        return found
    return () if any_number else found[-MAX_ROWS:]


def refusal(strategy: str, gpus: int, fitting: list[int]) -> str:
    """Return the sentence for a number of GPUs that a strategy cannot use; `fitting` are valid numbers, ascending."""
    below = [size for size in fitting if size < gpus]
    nearest = [str(size) for size in (*below[-2:], *fitting[len(below) : len(below) + 2])]
    would = f"{', '.join(nearest)} would fit" if nearest else "no number would fit"
    return f"{strategy}: {gpus} GPUs cannot be used; {would}"
