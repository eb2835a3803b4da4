"""A small language model on the bytes of Python's own library, its long sequences split over a ring of ranks: an
ordinary training script, made elastic by `ones`.
"""

from __future__ import annotations

import math
import time

import torch
from common import library, options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.ring.attention_module import RingAttention
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategies.ring.transformer_sizes import Transformer


class Block(nn.Module):
    """Causal attention over the whole sequence, and a feed-forward layer."""

    def __init__(self, ring: Ring, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = RingAttention(ring, width, heads)
        self.before_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        fed: torch.Tensor = x + self.feed(self.before_feed(x))
        return fed


class LanguageModel(nn.Module):
    """Predicts the next byte after each of this rank's bytes, given whole sequences."""

    def __init__(self, ring: Ring, sizes: Transformer) -> None:
        super().__init__()
        self.ring = ring
        self.byte = nn.Embedding(256, sizes.width)
        self.place = nn.Embedding(ring.length, sizes.width)
        self.blocks = nn.ModuleList(Block(ring, sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.next = nn.Sequential(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.byte(self.ring.shard(text)) + self.place(self.ring.positions())
        for block in self.blocks:
            x = block(x)
        guess: torch.Tensor = self.next(x)
        return guess


def losses(model: nn.Module, ring: Ring, pieces: torch.Tensor) -> torch.Tensor:
    """Return the loss of each of this rank's bytes in nats, [batch, tokens]."""
    guess, target = model(pieces[:, :-1]), ring.shard(pieces[:, 1:])
    return cross_entropy(guess.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def main() -> None:
    parser = options(__doc__, epochs=3, lr=0.003)
    parser.set_defaults(batch=4, max_batch=16, max_local_batch=16)
    parser.add_argument("--text-kb", type=int, default=128, help="how much of the library is read")
    parser.add_argument("--length", type=int, default=512, help="bytes of a sequence")
    parser.add_argument("--ring", type=int, help="ranks of a ring; as few as the memory asks for, or all")
    parser.add_argument("--memory-mb", type=int, default=0, help="of a rank, as if it were a GPU with so little")
    parser.add_argument("--double", action="store_true", help="in double precision, to compare results")
    args = parser.parse_args()
    sizes = Transformer(layers=2, width=64, heads=4, vocabulary=256, element_bytes=8 if args.double else 4)
    ring = Ring(args.length, causal=True, ranks=args.ring, model=sizes, memory_bytes=args.memory_mb << 20)
    job = ones.init(
        batch=args.batch,
        max_batch=args.max_batch,
        max_local_batch=args.max_local_batch,
        max_accumulation_steps=args.max_batch,
        epochs=args.epochs,
        strategy=ring,
    )
    torch.manual_seed(0)
    model: nn.Module = LanguageModel(ring, sizes)
    model = job.ddp(model.double() if args.double else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    train, test = library(args.text_kb, args.length)
    optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = job.loader(train)
    for epoch in job.epochs():
        model.train()
        for (pieces,) in loader:
            loss = ring.mean(losses(model, ring, pieces.to(job.device)))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            job.loss(loss)
            time.sleep((args.pace * len(pieces) + args.pace_step) / 1000)
        scheduler.step()
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for (pieces,) in job.evaluate(TensorDataset(test), batch=args.max_local_batch):
                found = losses(model, ring, pieces.to(job.device))
                total, count = total + found.sum().item(), count + found.numel()
        bits = job.mean(total, count) / math.log(2)
        if job.rank == 0:
            print(
                f"epoch {epoch}: {bits:.6f} bits a byte, batch {job.batch}, "
                f"{job.replicas} rings of {job.world // job.replicas} ranks",
                flush=True,
            )


if __name__ == "__main__":
    main()
