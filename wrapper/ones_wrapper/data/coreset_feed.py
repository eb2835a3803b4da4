"""The feed of a coreset: epochs over the chosen samples, each local batch with its samples' weights.

Checkpoints and new blocks get the selection, so that a resize in the middle of an epoch keeps it. All counts (length of
an epoch, cursor, progress) are counts of chosen samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ones_wrapper.data.coreset import Chosen, Coreset, Floats, Ints
from ones_wrapper.data.feed import AccumulationStep, Cut, Feed, fetched_indices, permutation

LABELS = (
    "coreset: the class of each sample of {kind} is not known; give them: Coreset(labels=...), a whole number for each "
    "of the {samples} samples, zeros without classes"
)


class Selection:
    """The chosen samples of the present coreset, with a state for checkpoints."""

    def __init__(self) -> None:
        self.epoch = -1
        """First epoch that uses the selection; -1 before the first selection."""
        self.samples = 0
        """Number of samples in the dataset when the selection was made."""
        self.chosen = Chosen(np.empty(0, np.int64), np.empty(0))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples": self.samples, **vars(self.chosen)} if self.epoch >= 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.samples = state.get("epoch", -1), state.get("samples", 0)
        if state:
            self.chosen = Chosen(state["indices"], state["weights"])


class CoresetFeed(Feed):
    """Feed that yields (local batch, weights) of the chosen samples."""

    def __init__(
        self, dataset: Dataset[Any], coreset: Coreset, selection: Selection, *, whole: int = 1, **options: Any
    ) -> None:
        """`options` are keywords of `Feed`. Raises the errors of `Feed`, and ValueError if the samples' classes are
        unknown."""
        super().__init__(dataset, **options)
        size = coreset.size(self._held)
        self.samples = size - size % whole
        if self.samples == 0:
            raise ValueError(f"loader: drop_last leaves none of {size} chosen samples, fewer than a batch of {whole}")
        self.coreset, self.size = coreset, size
        self.labels = labels_of(dataset, coreset.labels)
        self._selection = selection

    def due(self, epoch: int, cursor: int) -> bool:
        """Return True if samples must be chosen before the epoch continues; equal on all ranks. Raises ValueError if
        the checkpoint's selection has another fraction, or is of a dataset of another length."""
        selection = self._selection
        if selection.epoch < 0:
            return True
        if selection.samples != self._held:
            raise ValueError(
                f"coreset: the checkpoint's was chosen of {selection.samples} samples, the dataset now has "
                f"{self._held}; use the same dataset, or another job directory (ONES_JOB_DIR)"
            )
        if (chosen := len(selection.chosen.indices)) != self.size:  # both may have equally many whole batches
            raise ValueError(
                f"coreset: the checkpoint's has {chosen} samples, and fraction={self.coreset.fraction} are "
                f"{self.size}; use the same fraction, or another job directory (ONES_JOB_DIR)"
            )
        return cursor == 0 and selection.epoch != self._since(epoch)

    def _since(self, epoch: int) -> int:
        return epoch - epoch % self.coreset.every if self.coreset.every else 0

    def take(self, epoch: int, chosen: Chosen) -> None:
        """Use this selection from epoch `epoch` on."""
        selection = self._selection
        selection.epoch, selection.samples, selection.chosen = self._since(epoch), self._held, chosen
        self._order = None

    def features(self, epoch: int, members: Ints, most: int) -> Floats:
        """Return the features of these samples, [samples, width], computed for at most `most` samples at a time."""
        pieces = np.array_split(members, -(-len(members) // most))
        make = self.coreset.features or first_of
        rows = [
            torch.as_tensor(make(batch)).detach().flatten(1).to("cpu", torch.float64).numpy()
            for batch in self.fetch_samples(epoch, [piece.tolist() for piece in pieces])
        ]
        return np.concatenate(rows)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            order = permutation(self.size, self._seed, epoch, self._shuffle)
            self._order = epoch, self._selection.chosen.indices[order][: self.samples]
        return self._order[1]

    def batches(
        self, epoch: int, cursor: int, cut: Cut, *, seeded: bool = False
    ) -> Iterator[tuple[AccumulationStep, Any]]:
        for part, local in super().batches(epoch, cursor, cut, seeded=seeded):
            yield part, (local, self.weights(fetched_indices(self.order(epoch), part)))

    def weights(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the weights of these samples in torch's default type."""
        chosen = self._selection.chosen
        found = chosen.weights[np.searchsorted(chosen.indices, np.asarray(indices))]
        return torch.as_tensor(found, dtype=torch.get_default_dtype())


def first_of(batch: Any) -> torch.Tensor:
    """Return the first part of a batch, the model's inputs. Raises ValueError if it is no tensor."""
    found = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(found, torch.Tensor):
        raise ValueError(
            f"coreset: a batch of {type(batch).__name__} has no tensor first; give Coreset(features=...), a function "
            "from a batch to a row for each of its samples"
        )
    return found


def labels_of(dataset: Any, given: Any) -> Ints:
    """Return the class of each sample. Raises ValueError if classes are unknown."""
    samples = len(dataset)
    found = given if given is not None else _own_labels(dataset)
    if found is None:
        raise ValueError(LABELS.format(kind=type(dataset).__name__, samples=samples))
    labels = np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found)
    if labels.shape != (samples,) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"coreset: labels of shape {labels.shape} and type {labels.dtype}; give a whole number for each of the "
            f"{samples} samples"
        )
    return labels.astype(np.int64)


def _own_labels(dataset: Any) -> Any:
    if isinstance(dataset, Subset):
        found = _own_labels(dataset.dataset)
        return None if found is None else np.asarray(found)[np.asarray(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        whole = last.ndim == 1 and not last.is_floating_point() and len(dataset.tensors) > 1
        return last if whole else None
    return next((getattr(dataset, name) for name in ("targets", "labels") if hasattr(dataset, name)), None)
