"""Optimus-2D tensor parallelism (Xu et al. 2021, arXiv 2104.05343)."""

from ones_wrapper.strategies.optimus.strategy import Optimus2D

__all__ = ["Optimus2D"]
