"""1-bit LAMB: an optimizer with an exchange of its own between ranks."""

from ones_wrapper.strategies.onebit_lamb.strategy import OneBitLamb

__all__ = ["OneBitLamb"]
