"""The functions of `tile`, computed by torch's fused kernels (flex attention) on CUDA.

A kernel returns output o and logsumexp l of a block; its own backward pass takes the gradients of both. Let O and L be
the output and logsumexp over all keys, and G the gradient of O. The block's weight in the softmax is w = exp(l − L).
Then the gradient of o is w · G, and that of l is w · (G · o − G · O). The backward pass computes o and l again, since
the forward pass does not keep them. The result is exact.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ones_wrapper.strategies.ring.tile import Above, Dropout, Place, finite, precise

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # imported at its use: it takes a second to import


def usable(q: torch.Tensor, dropout: Dropout | None) -> bool:
    """Return True if the kernels support these tensors: on CUDA, without dropout, of a supported type and width."""
    width = q.shape[-1]
    return q.is_cuda and dropout is None and q.dtype != torch.float64 and 16 <= width <= 256 and not width & width - 1


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `tile.forward`."""
    output, total = _attend(q, k, v, place)
    return precise(output), precise(total)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place, above: Above
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result of `tile.backward`."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        output, its_total = _attend(q, k, v, place)
    weight = (precise(its_total.detach()) - finite(above.total)).exp()
    of_output = weight[..., None] * above.gradient
    of_total = (of_output * precise(output.detach())).sum(-1) - weight * above.delta
    of_both = of_output.to(output.dtype), of_total.to(its_total.dtype)
    dq, dk, dv = (precise(one) for one in torch.autograd.grad((output, its_total), (q, k, v), of_both))
    return dq, dk, dv


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    options = {"block_mask": _mask(place), "scale": place.scale, "return_aux": AuxRequest(lse=True)}
    output, aux = _kernel(q.device.type)(q, k, v, **options)
    return output, aux.lse


@cache
def _kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention


def _mask(place: Place) -> BlockMask | None:
    from torch.nn.attention.flex_attention import create_block_mask

    real, rows, columns = place.real, place.rows, place.columns
    if real is None and not place.triangular:
        return None

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        before = rows[query] >= columns[key] if place.triangular else query >= 0
        return before if real is None else before & real[batch, key]

    size = None if real is None else len(real)
    return create_block_mask(seen, size, None, len(rows), len(columns), device=str(rows.device))
