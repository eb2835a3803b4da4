"""Optimizers whose exchange between ranks is their own."""

from ones_wrapper.optimizers.onebit_strategy import OneBitLamb

__all__ = ["OneBitLamb"]
