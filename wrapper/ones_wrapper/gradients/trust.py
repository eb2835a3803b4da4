"""LAMB's trust ratio (You et al. 2020, arXiv 1904.00962, Algorithm 2)."""

from __future__ import annotations

import torch

TRUST = (0.01, 10.0)
"""Least and largest trust ratio."""


def trust(length: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The trust ratio of tensors of this norm, whose steps have that one; 1 if either is 0."""
    return torch.where((size > 0) & (length > 0), (length / size).clamp(*TRUST), 1.0)
