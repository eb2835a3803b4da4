"""Optimus-2D as a strategy: the meshes for a number of GPUs, and layers for a script's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import torch

from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group, check_torch
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import MEMORY_SHARE, SizeLimits, StrategyLimits, rows_within
from ones_wrapper.strategies.optimus import modules
from ones_wrapper.strategies.optimus.costs import MeshTransformer
from ones_wrapper.strategies.optimus.exchange import MeshExchange
from ones_wrapper.strategies.optimus.mesh import Mesh
from ones_wrapper.strategy import Strategy


class Optimus2D(Strategy):
    """2D tensor parallelism (Xu et al. 2021, arXiv 2104.05343): each replica is a mesh of q × q consecutive ranks.

        strategy = Optimus2D(q=(1, 2), hidden=512, heads=8, vocab=32000, layers=12, length=1024)
        job = ones.init(batch=64, ..., strategy=strategy)
        model = job.ddp(Model(strategy))        # of strategy.embedding, strategy.block, strategy.linear, …

    Weights, activations, gradients and moments are split over all q² ranks.
    """

    name = "optimus2d"
    measures_noise = False

    def __init__(
        self,
        *,
        q: int | Sequence[int],
        hidden: int,
        heads: int,
        vocab: int,
        layers: int = 0,
        length: int = 0,
        memory_bytes: int = 0,
        element_bytes: int = 4,
    ) -> None:
        """`q` is the side of the mesh, or a list of sides. The strategy uses the largest side whose square divides the
        number of GPUs. If `memory_bytes` of a GPU is given, it uses the smallest such side that holds the model. With
        `layers` and `length` (tokens of a sample) the companion knows the costs; `element_bytes` is the size of a
        number. Raises ValueError if q does not divide a size."""
        sides = (q,) if isinstance(q, int) else tuple(q)
        if not sides or any(type(side) is not int or side < 1 for side in sides):
            raise ValueError(f"optimus2d: q={q!r} is no side of a mesh of q × q ranks; give 1 or more, or several")
        for what, size in (("hidden", hidden), ("heads", heads), ("vocab", vocab)):
            for side in sides:
                if size < 1 or size % side:
                    raise ValueError(
                        f"optimus2d: {what}={size} does not divide over a mesh of {side} × {side} ranks; "
                        f"{what}={max(1, -(-size // side)) * side} would, or leave {side} out of q"
                    )
        if hidden % heads:
            raise ValueError(f"optimus2d: hidden={hidden} does not divide over {heads} heads")
        self.sides, self.costs = tuple(sorted(set(sides))), MeshTransformer(hidden, heads, vocab, layers, length)
        if memory_bytes and not self.costs.known:
            raise ValueError("optimus2d: memory_bytes says which mesh holds the model only with layers and length")
        self._memory_bytes, self._element_bytes = memory_bytes, element_bytes
        self._mesh: Mesh | None = None

    def side(self, world: int) -> int | None:
        """Return the side of the mesh at this world size; None if the strategy cannot use it."""
        sides = [q for q in self.sides if world % (q * q) == 0 and self._fits(q)]
        if not sides:
            return None
        return sides[0] if self._memory_bytes else sides[-1]

    def _fits(self, q: int) -> bool:
        if not self._memory_bytes:
            return True
        elements = self.costs.fixed(q) + q * self.costs.sample(q)
        return elements * self._element_bytes <= self._memory_bytes * MEMORY_SHARE

    def replicas(self, world: int) -> int:
        side = self.side(world)
        if side is None:
            least = self.sides[0] ** 2
            near = range(max(1, world - 2 * least), world + 2 * self.sides[-1] ** 2 + 1)
            raise self.refuse(world, [size for size in near if self.side(size) is not None])
        return world // (side * side)

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        usable = [(gpus, side) for gpus in range(1, most_gpus + 1) if (side := self.side(gpus)) is not None]
        if not usable:
            raise ValueError(
                f"optimus2d: no number of GPUs up to {most_gpus} makes a mesh of side {', '.join(map(str, self.sides))}"
                + (f" that holds the model in {self._memory_bytes} bytes a GPU" if self._memory_bytes else "")
            )
        rows = (self._row(gpus, side, spec.base_batch) for gpus, side in usable)
        sizes = rows_within(rows, any_number=False)
        return StrategyLimits(self.name, sizes, memory_bytes=self._memory_bytes, reshards=len(self.sides) > 1)

    def _row(self, gpus: int, q: int, batch: int) -> SizeLimits:
        costs, each, replicas = self.costs, self._element_bytes, gpus // (q * q)
        row = SizeLimits(gpus, replicas, quantum=replicas * q, together=q * q)
        if not costs.known:
            return row
        # The parameters travel in each pass whatever its samples; counted with the samples of the base batch.
        wire = costs.sample_wire(q) + costs.pass_wire(q) / max(1, batch // replicas)
        return replace(
            row,
            fixed_bytes=ceil(each * costs.fixed(q)),
            sample_bytes=ceil(each * costs.sample(q)),
            replica_bytes=ceil(each * wire),
            data_bytes=ceil(each * costs.data_wire(q, replicas)),
        )

    def bind(self, group: Group) -> None:
        check_torch(self.name, group)
        side = self.side(group.world)
        assert side is not None  # `init` has asked for the replicas
        self._mesh = Mesh(side, group.device)

    def exchange(self, group: Group, noise: NoiseScale | None) -> MeshExchange:
        return MeshExchange(group, self.mesh)

    @property
    def mesh(self) -> Mesh:
        """Position of this rank in its mesh, and the mesh's collectives. Raises RuntimeError before `init`."""
        if self._mesh is None:
            raise RuntimeError("optimus2d: the ranks are not known yet; make the model after ones.init(strategy=…)")
        return self._mesh

    def linear(self, inputs: int, outputs: int, bias: bool = True) -> modules.Linear:
        """Return `torch.nn.Linear` on the mesh."""
        return modules.Linear(self.mesh, inputs, outputs, bias)

    def layer_norm(self, size: int) -> modules.LayerNorm:
        """Return `torch.nn.LayerNorm` on the mesh."""
        return modules.LayerNorm(self.mesh, size)

    def embedding(self, count: int, size: int) -> modules.Embedding:
        """Return `torch.nn.Embedding` on the mesh."""
        return modules.Embedding(self.mesh, count, size)

    def positions(self, length: int, size: int) -> modules.Positions:
        """Return learned positions, to be added to an embedding's blocks."""
        return modules.Positions(self.mesh, length, size)

    def block(self, causal: bool = True) -> modules.TransformerBlock:
        """Return a transformer block: attention and MLP, each with a norm before it."""
        return modules.TransformerBlock(self.mesh, self.costs.hidden, self.costs.heads, causal)

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the samples of this rank's row from the local batch, which `job.loader` gives to all ranks of a
        replica."""
        return self.mesh.rows(batch)

    def cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the tokens of the replica's local batch, from blocks of logits and the row's
        targets."""
        return modules.cross_entropy(logits, targets, self.mesh)

    def whole(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor on all ranks of the replica, from its blocks. It has no gradient."""
        return self.mesh.whole(blocks)
