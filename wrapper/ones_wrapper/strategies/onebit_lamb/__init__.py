"""1-bit LAMB: an optimizer whose exchange between ranks is its own."""

from ones_wrapper.strategies.onebit_lamb.strategy import OneBitLamb

__all__ = ["OneBitLamb"]
