"""A mode that refuses what makes the processor wait for a GPU, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
"""Operations whose result, or its size, the processor reads."""


class NoWaits(TorchDispatchMode):
    """Raises RuntimeError for an operation on tensors of `device` that would wait for a GPU: a value that is read, an
    index of flags, or a copy that is not `non_blocking`. It stands for `set_sync_debug_mode`, where there is no GPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = any(one.device.type == self._device for one in args if isinstance(one, torch.Tensor))
        flags = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in self._indices(function, args))
        to = torch.device(kwargs.get("device") or "cpu").type
        copies = function is aten._to_copy.default and self._device != "cpu" and self._device in (to, there and to)
        if (there and (flags or function in _READS)) or (copies and not kwargs.get("non_blocking")):
            raise RuntimeError(f"{function} waits for the GPU")
        return function(*args, **kwargs)

    @staticmethod
    def _indices(function: Any, args: Any) -> Any:
        indexes = str(function).startswith(("aten.index.", "aten.index_put", "aten._index_put"))
        return args[1] if indexes else ()
