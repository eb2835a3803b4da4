"""Ways to train besides plain data parallel, each in a module or package of its own. Torch is imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ones_wrapper.process.lazy import at_first_use

if TYPE_CHECKING:
    from ones_wrapper.data.coreset import Coreset as Coreset
    from ones_wrapper.data.coreset import last_layer_gradient as last_layer_gradient
    from ones_wrapper.strategies.decentlam.strategy import DecentLam as DecentLam
    from ones_wrapper.strategies.fusion import Fused as Fused
    from ones_wrapper.strategies.fusion import fuse as fuse
    from ones_wrapper.strategies.fusion.sweep import sweep as sweep
    from ones_wrapper.strategies.lsgd import Lsgd as Lsgd
    from ones_wrapper.strategies.onebit_lamb import OneBitLamb as OneBitLamb
    from ones_wrapper.strategies.optimus import Optimus2D as Optimus2D
    from ones_wrapper.strategies.ring.strategy import Ring as Ring

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
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    return at_first_use(__name__, name, _HOMES)
