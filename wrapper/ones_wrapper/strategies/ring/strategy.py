"""Sequence parallelism: the tokens of each sequence are split over a ring of ranks.

    ring = Ring(length=4096, causal=True)
    job = ones.init(batch=64, ..., strategy=ring)
    ...
    tokens = ring.shard(text)                       # in the model: this rank's tokens of whole sequences
    x = embed(tokens) + place(ring.positions())
    x = x + attention(norm(x))                      # attention = RingAttention(ring, width, heads)
    ...
    loss = ring.mean(cross_entropy(..., reduction="none"))

Weights are whole on every rank, so checkpoints are those of data parallel training.
"""

from __future__ import annotations

import torch

from ones_wrapper.group import Group, check_torch
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.limits import MEMORY_SHARE, SizeLimits, StrategyLimits, refusal, rows_within
from ones_wrapper.strategies.ring.circle import Circle
from ones_wrapper.strategies.ring.ring_attention import Arrangement, fits, padded_length, ring_attention
from ones_wrapper.strategies.ring.tile import Dropout, uniform
from ones_wrapper.strategies.ring.transformer_sizes import Transformer
from ones_wrapper.strategies.ring.two_pass import two_pass_attention
from ones_wrapper.strategy import Strategy


class Ring(Strategy):
    """Sequence parallelism: the ranks form rings of consecutive ranks. Each sequence is split over a ring, and the
    samples of a step over the rings."""

    name = "ring"
    hot = True
    losses_add_up = True
    same_numbers = True

    def __init__(
        self,
        length: int,
        *,
        causal: bool = False,
        ranks: int | None = None,
        two_pass: bool = False,
        model: Transformer | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """`length` is the number of tokens in a sequence: a multiple of the ranks of a ring, or of twice that number if
        `causal`.

        A ring has `ranks` ranks; by default all ranks form one ring. If `model` and the `memory_bytes` of a GPU are
        given, a ring instead has the fewest ranks that hold one sequence. The companion then also knows memory and
        traffic. `two_pass` selects the paper's ring self-attention in place of blocks with an online softmax; it has
        the same result, but needs more memory. Raises ValueError for numbers below 1, and if no ring can be made.
        """
        for name, value in {"length": length, "ranks": 1 if ranks is None else ranks}.items():
            if value < 1:
                raise ValueError(f"ring: {name}={value} must be 1 or more")
        if causal and length % 2:
            raise ValueError(f"ring: length={length} must be even, since a causal ring has two pieces a rank; "
                             f"pad to {length + 1}")  # fmt: skip
        if ranks is not None and not fits(length, ranks, causal):
            Arrangement(Circle(0, ranks), length, causal)  # raises with what would fit
        self.length, self.causal, self.ranks, self.two_pass = length, causal, ranks, two_pass
        self.model, self.memory_bytes = model, memory_bytes
        self._arrangement = Arrangement(Circle(), length, causal)
        self._positions = self._arrangement.positions(0)

    # -- what the scheduler sees --------------------------------------------------------------------------------------

    def size(self, world: int) -> int:
        """Return the number of ranks in a ring at this world size; 0 if no ring can be made."""
        if self.ranks is not None:
            return self.ranks if world % self.ranks == 0 else 0
        holds = self._memory_known
        for size in range(1 if holds else world, world + 1):
            if world % size == 0 and fits(self.length, size, self.causal) and (not holds or self._holds(size)):
                return size
        return 0

    @property
    def _memory_known(self) -> bool:
        return self.model is not None and self.memory_bytes > 0

    def _holds(self, size: int) -> bool:
        return self._row(size, size).most_local(self.memory_bytes) != 0

    def replicas(self, world: int) -> int:
        if size := self.size(world):
            return world // size
        fitting = [some for some in range(1, 2 * world + 1) if self.size(some)]
        raise ValueError(f"{refusal(self.name, world, fitting)} ({self._why(world)})")

    def _why(self, world: int) -> str:
        if self.ranks is not None:
            return f"rings have ranks={self.ranks}"
        if self._memory_known:
            room = f"{MEMORY_SHARE:.0%} of {self.memory_bytes} bytes"
            return f"no ring of up to {world} splits length={self.length} and holds a sequence in {room} a GPU"
        longer = padded_length(self.length, world, self.causal)
        pieces = world * (2 if self.causal else 1)
        return f"length={self.length} is no multiple of {pieces}; padded to {longer} it would be"

    def limits(self, spec: Spec, most_gpus: int, ranks_per_node: int) -> StrategyLimits:
        sizes = ((gpus, self.size(gpus)) for gpus in range(1, most_gpus + 1))
        rows = rows_within((self._row(gpus, size) for gpus, size in sizes if size), any_number=False)
        if not rows:
            raise ValueError(f"ring: none of 1 to {most_gpus} GPUs can be used: {self._why(most_gpus)}")
        return StrategyLimits(self.name, rows, self.memory_bytes)

    def _row(self, gpus: int, size: int) -> SizeLimits:
        # A ring shares a node if a node can hold it: each layer waits for the ring's messages.
        if self.model is None:
            return SizeLimits(gpus, gpus // size, together=size)
        return SizeLimits(
            gpus,
            gpus // size,
            together=size,
            fixed_bytes=self.model.fixed_bytes,
            sample_bytes=self.model.sample_bytes(self.length, size, self.two_pass),
            replica_bytes=self.model.ring_bytes(self.length, size),
            data_bytes=self.model.gradient_bytes(gpus),
        )

    # -- what the script does with it ---------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        """Set this rank's ring. Raises ValueError if the number of ranks cannot be used, or if they use MPI."""
        check_torch(self.name, group)
        size = group.world // self.replicas(group.world)
        circle = Circle(group.rank % size, size, group.rank - group.rank % size)
        self._arrangement = Arrangement(circle, self.length, self.causal)
        self._positions = self._arrangement.positions(circle.rank, group.device)

    @property
    def tokens(self) -> int:
        """Number of tokens of a sequence on each rank."""
        return self._arrangement.tokens

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent around its ring since `bind`."""
        return self._arrangement.circle.sent_bytes

    def positions(self) -> torch.Tensor:
        """Return the positions of this rank's tokens in the whole sequence, (tokens,), for position embeddings. Call
        this in each step, since the ranks may change."""
        return self._positions

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's tokens of whole sequences. Raises ValueError if the sequences do not have the ring's
        length."""
        if x.shape[dim] != self.length:
            shorter = x.shape[dim] < self.length
            raise ValueError(
                f"ring: sequences of {x.shape[dim]} tokens, where length={self.length}; "
                f"{'pad them with ring.pad, or' if shorter else 'cut them, or'} give Ring their length"
            )
        return x.index_select(dim, self._positions.to(x.device))

    def pad(self, x: torch.Tensor, value: float = 0, dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sequences padded with `value` to the ring's length, mask). The mask (batch, length) is False for
        padding."""
        missing = self.length - x.shape[dim]
        if missing < 0:
            raise ValueError(f"ring: sequences of {x.shape[dim]} tokens are longer than length={self.length}")
        shape = list(x.shape)
        shape[dim] = missing
        real = torch.arange(self.length, device=x.device) < x.shape[dim]
        return torch.cat((x, x.new_full(shape, value)), dim), real.expand(x.shape[0], -1)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        real: torch.Tensor | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to the whole sequences. Tensors are (batch, heads, tokens,
        width).

        `real`, (batch, length), is False for padding tokens of the whole sequences. `dropout` is the fraction of
        probabilities that are dropped, selected by their positions in the whole sequences, whatever the size of the
        ring. Collective.
        """
        function = two_pass_attention if self.two_pass else ring_attention
        dropped = Dropout(dropout, _key(), self.length) if dropout else None
        return function(q, k, v, self._arrangement, real=real, dropout=dropped, scale=scale)

    def dropout(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """Return `x`, (batch, tokens, …), with dropout that depends on the tokens' positions in the whole sequences.
        Ordinary dropout would draw the same mask on all ranks of a ring, although they have different tokens."""
        if not rate:
            return x
        samples = torch.arange(len(x), device=x.device)[:, None] * self.length + self._positions.to(x.device)
        each = x[0, 0].numel()
        places = samples[..., None] * each + torch.arange(each, device=x.device)
        return x * (uniform(places, _key()) >= rate).view(x.shape).to(x.dtype) / (1 - rate)

    def mean(self, losses: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's part of the loss, from the losses of its tokens, (batch, tokens). The parts of a ring's
        ranks add up to the mean over the sequences, where a sequence's loss is the mean over its tokens. Only tokens
        for which `real` (batch, length) is True count.

        Do not divide by the number of ranks: `job.ddp` adds up the gradients of a ring.
        """
        if real is None:
            return losses.sum() / (len(losses) * self.length)
        counts = real.sum(1, keepdim=True).clamp(min=1)
        return (losses * self.shard(real) / counts).sum() / len(losses)


def _key() -> int:
    """Return 64 random bits, equal on all ranks of a ring: in each step these seed their generators alike."""
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, ()).item())
