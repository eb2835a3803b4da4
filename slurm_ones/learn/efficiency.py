"""Statistical efficiency: how much a sample is worth at a batch."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.policy import Floats, Ints


class ConstantEfficiency:
    """Every sample is worth the same at every batch.

    This is what ONES assumes (its score counts samples), and it is wrong for large batches. It stands in for
    a model from the gradient noise scale, which needs figures that jobs do not report yet.
    """

    def efficiency(self, batches: Ints) -> Floats:
        """1 for each batch; same shape as `batches`."""
        return np.ones(np.shape(batches), dtype=np.float64)
