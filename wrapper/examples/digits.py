"""Digits of 8 × 8 pixels, read from scikit-learn's file, since the import of scikit-learn takes as long as that of
torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return (training set of 1437 digits, test set of 360)."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn")
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32)
    x, y = torch.from_numpy(rows[:, :-1]).view(-1, 1, 8, 8) / 8 - 1, torch.from_numpy(rows[:, -1]).long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])
