"""Ways to train besides plain data parallel, one room each, exported here by name. Torch is imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ones_wrapper.process.lazy import at_first_use

if TYPE_CHECKING:
    from ones_wrapper.data.coreset import Coreset, last_layer_gradient
    from ones_wrapper.strategies.decentlam.strategy import DecentLam
    from ones_wrapper.strategies.fusion import Fused, fuse
    from ones_wrapper.strategies.fusion.sweep import sweep
    from ones_wrapper.strategies.lsgd import Lsgd
    from ones_wrapper.strategies.onebit_lamb import OneBitLamb
    from ones_wrapper.strategies.optimus import Optimus2D
    from ones_wrapper.strategies.ring.strategy import Ring

__all__ = [
    "Coreset",
    "DecentLam",
    "Fused",
    "Lsgd",
    "OneBitLamb",
    "Optimus2D",
    "Ring",
    "fuse",
    "last_layer_gradient",
    "sweep",
]

_HOMES = {
    "Coreset": "ones_wrapper.data.coreset",
    "DecentLam": "ones_wrapper.strategies.decentlam.strategy",
    "Fused": "ones_wrapper.strategies.fusion",
    "Lsgd": "ones_wrapper.strategies.lsgd",
    "OneBitLamb": "ones_wrapper.strategies.onebit_lamb",
    "Optimus2D": "ones_wrapper.strategies.optimus",
    "Ring": "ones_wrapper.strategies.ring.strategy",
    "fuse": "ones_wrapper.strategies.fusion",
    "last_layer_gradient": "ones_wrapper.data.coreset",
    "sweep": "ones_wrapper.strategies.fusion.sweep",
}


def __getattr__(name: str) -> Any:
    return at_first_use(__name__, name, _HOMES)
