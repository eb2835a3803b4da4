"""Products of matrices in blocks on a q × q mesh: SUMMA (van de Geijn and Watts, 1997), as in Optimus's forward and
backward passes of a transformer (Xu et al. 2021, arXiv 2104.05343).

Rank (i, j) has the blocks A_ij and B_ij, and gets C_ij. Each product takes q rounds; in round l

- AB:  A_il is sent along row i, B_lj along column j;   C_ij += A_il B_lj
- ABᵀ: B_lj is sent along column j;                     C_il = Σ_j A_ij B_ljᵀ, summed along row i
- AᵀB: A_il is sent along row i;                        C_lj = Σ_i A_ilᵀ B_ij, summed along column j

A rank never has more than a few blocks in memory, each 1/q² of a matrix. The gradients of each product are the two
other products. A's rows may be split unevenly over the mesh, so that any number of samples fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ones_wrapper.strategies.optimus.mesh import Mesh


def product(a: torch.Tensor, b: torch.Tensor, mesh: Mesh, transposed: bool = False) -> torch.Tensor:
    """Return this rank's block [m, n] of C = AB, from its blocks a [m, k] and b [k, n]. If `transposed`, C = ABᵀ, with
    b [n, k]. Forward and backward pass are collective."""
    # Autocast would cast each product's blocks, but neither products in place nor those of the backward pass. Blocks
    # that are cast here travel in half the bytes, too.
    if torch.is_autocast_enabled(a.device.type) and a.dtype != torch.float64:  # as torch's own products
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = a.to(dtype), b.to(dtype)
    found: torch.Tensor = _Product.apply(transposed, a, b, mesh)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """Autograd function of a product with b, or with its transpose. Its gradients are products on the mesh, too."""

    @staticmethod
    def forward(ctx: Any, transposed: bool, a: torch.Tensor, b: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.transposed, ctx.mesh = transposed, mesh
        return (_abt if transposed else _ab)(a, b, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None, None]:
        (a, b), mesh = ctx.saved_tensors, ctx.mesh
        _, wants_a, wants_b, _ = ctx.needs_input_grad
        of_a = (_ab if ctx.transposed else _abt)(gradient, b, mesh) if wants_a else None
        left, right = (gradient, a) if ctx.transposed else (a, gradient)
        return None, of_a, _atb(left, right, mesh) if wants_b else None, None


def _ab(a: torch.Tensor, b: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    product: torch.Tensor | None = None
    lefts, rights = arriving(a, mesh.in_row, mesh.column, mesh.q), arriving(b, mesh.in_column, mesh.row, mesh.q)
    for left, right in zip(lefts, rights, strict=True):
        product = left @ right if product is None else product.addmm_(left, right)
    assert product is not None
    return product


def _abt(a: torch.Tensor, b: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    blocks = arriving(b, mesh.in_column, mesh.row, mesh.q)
    return summed((a @ right.t() for right in blocks), mesh.in_row, mesh.column)


def _atb(a: torch.Tensor, b: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    blocks = arriving(a, mesh.in_row, mesh.column, mesh.q)
    return summed((left.t() @ b for left in blocks), mesh.in_column, mesh.row)


def arriving(block: torch.Tensor, group: Any, mine: int, q: int) -> Iterator[torch.Tensor]:
    """Yield the blocks of all ranks of a row or column in order, on each of these ranks. `mine` is this rank's position
    in the row or column. The next block is sent while the caller uses the present one."""
    if q == 1 or not block.numel():
        for _ in range(q):
            yield block
        return
    # A transposed weight travels as it lies in memory.
    turned = not block.is_contiguous() and block.t().is_contiguous()
    own = block.t() if turned else block.contiguous()

    def send(source: int) -> tuple[torch.Tensor, Any]:
        buffer = own if source == mine else torch.empty_like(own)
        return buffer, dist.broadcast(buffer, group=group, group_src=source, async_op=True)

    coming = send(0)
    for source in range(q):
        (buffer, work), coming = coming, send(source + 1) if source + 1 < q else coming
        work.wait()
        yield buffer.t() if turned else buffer


def summed(terms: Iterator[torch.Tensor], group: Any, mine: int) -> torch.Tensor:
    """Reduce-scatter over a row or column. `terms` yields this rank's term for each rank, in order. Return the sum of
    all ranks' terms for rank `mine`, which is this one. A sum is sent while the next term is computed."""
    kept: torch.Tensor | None = None
    under_way: tuple[torch.Tensor, Any] | None = None
    for target, term in enumerate(terms):
        if under_way is not None:
            under_way[1].wait()
            under_way = None
        if dist.get_world_size(group) > 1 and term.numel():
            term = term.contiguous()
            under_way = term, dist.reduce(term, group=group, group_dst=target, async_op=True)
        if target == mine:
            kept = term
    if under_way is not None:
        under_way[1].wait()
    assert kept is not None
    return kept
