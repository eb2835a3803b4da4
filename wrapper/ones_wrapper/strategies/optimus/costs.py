"""Memory and network traffic of a transformer on a q × q mesh, as formulas. Imports no torch.

All results are numbers of elements. In formulas H is the hidden size, L the length, V the vocabulary, n the number of
layers. By Xu et al. 2021 (arXiv 2104.05343) each rank sends (q − 1)/q² of both matrices of every product in a forward
pass, and twice as much in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class MeshTransformer:
    """Sizes of a language model of `TransformerBlock`s, with an embedding, positions, a last norm and an output layer.
    If `layers` or `length` is 0 (unknown), all costs are unknown."""

    hidden: int
    heads: int
    vocab: int
    layers: int = 0
    length: int = 0

    @property
    def known(self) -> bool:
        """True if costs are known: `layers` and `length` are not 0."""
        return bool(self.layers and self.length)

    @property
    def matrices(self) -> int:
        """Elements of the parameters that are split over all ranks of the mesh."""
        return 12 * self.layers * self.hidden**2 + 2 * self.vocab * self.hidden

    @property
    def vectors(self) -> int:
        """Elements of the parameters that are split only over the columns of the mesh: biases, norms, positions."""
        return self.layers * 13 * self.hidden + (2 + self.length) * self.hidden + self.vocab

    def fixed(self, q: int) -> Fraction:
        """Elements on a rank that do not depend on its samples: parameters, gradients and two moments."""
        return 4 * self._held(q)

    def _held(self, q: int) -> Fraction:
        return Fraction(self.matrices, q * q) + Fraction(self.vectors, q)

    def saved(self, q: int) -> Fraction:
        """Elements that a rank keeps from the forward pass of all blocks for the backward pass, for each sample of its
        replica. This is 1/q² of the dense model's, except for two numbers per token and block, which are split only
        over the mesh's rows."""
        block = Fraction(16 * self.length * self.hidden + self.length * self.heads, q * q)
        return self.layers * (block + Fraction(2 * self.length, q))

    def sample(self, q: int) -> Fraction:
        """Elements on a rank for each sample of its replica at the peak, when the backward pass begins. These are what
        blocks, last norm and output layer keep, and the logits (or a larger activation) with their gradient. The loss
        adds about eight numbers per token."""
        ends = self.length * (2 * self.hidden + 2 * max(4 * self.hidden, self.vocab))
        return self.saved(q) + Fraction(ends, q * q) + Fraction(8 * self.length, q)

    def sample_wire(self, q: int) -> Fraction:
        """Elements that a rank sends within its mesh in a forward and backward pass, for each sample of its replica."""
        products = Fraction(3 * (7 * self.layers + 1) * self.length * self.hidden * (q - 1), q * q)
        numbers = 4 * (2 * self.layers + 1) + 3  # of a token: two sums of each norm and way, three of the loss
        return products + Fraction(2 * (q - 1) * numbers * self.length, q * q)

    def pass_wire(self, q: int) -> Fraction:
        """Elements of parameters that a rank sends within its mesh in a forward and backward pass; independent of its
        samples."""
        matrices = 3 * (12 * self.layers * self.hidden**2 + self.vocab * self.hidden) + 2 * self.vocab * self.hidden
        return Fraction(matrices * (q - 1), q * q) + Fraction(2 * (q - 1) * self.vectors, q * q)

    def data_wire(self, q: int, replicas: int) -> Fraction:
        """Elements that a rank sends to other replicas in a step, in a ring all-reduce of its blocks."""
        return Fraction(2 * (replicas - 1), replicas) * self._held(q)
