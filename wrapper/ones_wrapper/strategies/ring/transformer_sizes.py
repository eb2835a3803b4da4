"""GPU memory and network traffic of a transformer whose sequences are split over ranks. Imports no torch.

A layer has attention, two layer norms, a feed-forward layer of four times the width, and no dropout. For a sequence of
L tokens and width H, it keeps 16 LH elements for the backward pass: inputs and outputs of its linear layers and norms.
The norms' statistics add 4 L. Attention with Z heads adds ZL for one logsumexp per query and head, or ZL² for the
probabilities. All of these are split over the N ranks of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer, from which its memory is computed."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 0
    """Rows of the embedding, and outputs of the last layer; 0 for a model without these two layers."""
    element_bytes: int = 4
    """Bytes of a number in activations. A number in parameters has 4 bytes, or 8 if activations have 8."""

    parameters: int = 0
    """Number of parameters; 0 estimates it from the weights of linear layers and embeddings."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("vocabulary", "parameters") else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"Transformer: {field.name}={getattr(self, field.name)} must be {least} or more")
        if not self.parameters:
            about = self.layers * 12 * self.width**2 + 2 * self.vocabulary * self.width
            object.__setattr__(self, "parameters", about)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a number in parameters, gradients and moments."""
        return max(4, self.element_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of parameters, gradients and two moments, which every rank has whole."""
        return 4 * self.parameters * self.parameter_bytes

    def layer_bytes(self, length: int, ranks: int, two_pass: bool = False) -> int:
        """Return the bytes that a layer keeps of one sequence on each of `ranks` ranks."""
        scores = self.heads * length * (length if two_pass else 1) * self.parameter_bytes
        return ((16 * self.width + 4) * length * self.element_bytes + scores) // ranks

    def sample_bytes(self, length: int, ranks: int, two_pass: bool = False) -> int:
        """Return the bytes on a GPU for one sequence: activations of all layers, and for a language model also the last
        layers, tokens and targets. Leaves out memory that a layer needs only while it computes."""
        kept = self.layers * self.layer_bytes(length, ranks, two_pass)
        if self.vocabulary:
            kept += length // ranks * ((self.vocabulary + 2 * self.width + 2) * self.element_bytes + 2 * 8)
        return kept

    def ring_bytes(self, length: int, ranks: int) -> int:
        """Return the bytes that each rank of a ring sends for one sequence in a forward and a backward pass: keys and
        values in both, sums of their gradients in the backward pass."""
        elements = self.layers * (ranks - 1) * (length // ranks) * self.width
        return elements * (4 * self.element_bytes + 2 * self.parameter_bytes)

    def gradient_bytes(self, ranks: int) -> int:
        """Return the bytes that each of `ranks` ranks sends in a ring all-reduce of the gradients."""
        return 2 * (ranks - 1) * self.parameters * self.parameter_bytes // ranks
