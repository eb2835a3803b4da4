"""Mesh of q × q ranks with one replica, and the collectives of its rows and columns.

Rank r of a replica is in row r // q and column r % q. Rows split the samples of the replica's local batch, columns the
hidden dimension. So rank (i, j) has the samples of row i and the features of column j.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

MATRIX = (Shard(1), Shard(0))
"""Placement of weights [out, in], as in `torch.nn.Linear`: rows of the mesh split the inputs, columns the outputs."""
TABLE = (Shard(0), Shard(1))
"""Placement of embeddings [vocabulary, hidden]: rows of the mesh split the vocabulary, columns the hidden dimension."""
FEATURES = (Replicate(), Shard(-1))
"""Placement of tensors that are equal for all samples and have the hidden dimension last, such as a bias."""


class Mesh:
    """Position of this rank in its mesh, and its process groups. A method is collective over the row or column in its
    name; a mesh of one rank sends nothing."""

    def __init__(self, q: int, device: torch.device) -> None:
        """Create the groups of all meshes. Collective. Raises ValueError if the number of ranks is no multiple of
        q²."""
        world = dist.get_world_size()
        if world % (q * q):
            raise ValueError(f"a mesh of {q} × {q} ranks does not divide {world} ranks")
        whole = init_device_mesh(device.type, (world // (q * q), q, q), mesh_dim_names=("replicas", "rows", "columns"))
        self.q, self.device = q, device
        self.replicas = world // (q * q)
        self.replica, self.row, self.column = (int(place) for place in whole.get_coordinate() or ())
        self.across = whole.get_group("replicas")
        """Group of the ranks with the same blocks, one of each replica."""
        # Along the dimension "columns" lie the ranks of one row.
        self.in_row, self.in_column = whole.get_group("columns"), whole.get_group("rows")
        self.ranks = whole["rows", "columns"]
        self.ranks._flatten()  # so that DTensor sums over both in one message, as in a gradient's norm
        """Ranks of this replica, for DTensor."""

    def cut(self, whole: torch.Tensor, placements: tuple[Placement, ...]) -> torch.nn.Parameter:
        """Return this rank's block of a tensor as a parameter. Every rank has the whole tensor, so that nothing is
        sent. Raises ValueError if a dimension to be split is no multiple of q."""
        block = whole.detach()
        for place, placement in zip((self.row, self.column), placements, strict=True):
            if isinstance(placement, Shard):
                if block.shape[placement.dim] % self.q:
                    raise ValueError(
                        f"a tensor {tuple(whole.shape)} does not divide over a mesh of {self.q} × {self.q} ranks"
                    )
                block = block.chunk(self.q, placement.dim)[place]
        block = block.to(self.device, copy=True).contiguous()
        return torch.nn.Parameter(DTensor.from_local(block, self.ranks, placements, run_check=False))

    def sum_in_row(self, values: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Set `values` to their sum (or maximum, by `operation`) over the row, and return them."""
        if self.q > 1 and values.numel():
            dist.all_reduce(values, operation, group=self.in_row)
        return values

    def sum_in_column(self, values: torch.Tensor) -> torch.Tensor:
        """Set `values` to their sum over the column, and return them."""
        if self.q > 1:
            dist.all_reduce(values, group=self.in_column)
        return values

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the samples of this rank's row from the replica's local batch [samples, …]. Rows differ by at most one
        sample."""
        return batch.tensor_split(self.q)[self.row]

    @torch.no_grad()
    def whole(self, block: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor [samples, …, features] on every rank, from its blocks. It has no gradient."""
        if self.q == 1:
            return block.detach()
        block = block.contiguous()
        found = [torch.empty_like(block) for _ in range(self.q)]
        dist.all_gather(found, block, group=self.in_row)
        row = torch.cat(found, -1)
        samples = torch.zeros(self.q, dtype=torch.int64, device=block.device)
        samples[self.row] = len(row)
        counts: list[int] = self.sum_in_column(samples).tolist()
        # The gather takes blocks of one size; the first row has the most samples.
        padded = row.new_zeros(counts[0], *row.shape[1:])
        padded[: len(row)] = row
        parts = [torch.empty_like(padded) for _ in range(self.q)]
        dist.all_gather(parts, padded, group=self.in_column)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def features(parameter: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return this column's features of a parameter placed as `FEATURES`. Its gradient is summed over the rows, so that
    all copies get the same gradient."""
    assert isinstance(parameter, DTensor)
    found = parameter.to_local()
    if found.requires_grad:
        found.register_hook(lambda gradient: mesh.sum_in_column(gradient.contiguous().clone()))  # type: ignore[no-untyped-call]
    return found
