"""A small language model on the bytes of Python's own library, its parameters sharded over the ranks (FSDP2): an
ordinary training script, made elastic by `ones`.
"""

from __future__ import annotations

import math
import time

import torch
from common import library, options
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ones_wrapper as ones

CONTEXT = 64
"""Bytes that the model sees at once."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in self.attention(self.before_attention(x)).chunk(3, dim=-1)
        )
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        fed: torch.Tensor = x + self.feed(self.before_feed(x))
        return fed


class LanguageModel(nn.Module):
    """Predicts the next byte after each byte; returns logits [batch × tokens, 256]."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.next = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.byte(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        guess: torch.Tensor = self.next(x.flatten(0, 1))
        return guess


def main() -> None:
    parser = options(__doc__, epochs=3, lr=0.003)
    parser.add_argument("--text-kb", type=int, default=128, help="how much of the library is read")
    args = parser.parse_args()
    job = ones.init(
        batch=args.batch, max_batch=args.max_batch, max_local_batch=args.max_local_batch, epochs=args.epochs
    )
    torch.manual_seed(0)
    model: nn.Module = LanguageModel()
    model = job.fsdp(model, modules=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    train, test = library(args.text_kb, CONTEXT)
    optimizer, scheduler = job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = job.loader(train)
    for epoch in job.epochs():
        model.train()
        for (pieces,) in loader:
            pieces = pieces.to(job.device)
            loss = cross_entropy(model(pieces[:, :-1]), pieces[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.loss(loss)
            time.sleep((args.pace * len(pieces) + args.pace_step) / 1000)
        scheduler.step()
        model.eval()
        with torch.no_grad():  # all ranks: the forward pass gathers the shards
            pieces = test.to(job.device)
            guess, target = model(pieces[:, :-1]), pieces[:, 1:].flatten()
            bits = cross_entropy(guess, target).item() / math.log(2)
            accuracy = (guess.argmax(1) == target).float().mean().item()
        if job.rank == 0:
            print(
                f"epoch {epoch}: {bits:.2f} bits a byte, accuracy {accuracy:.3f}, "
                f"batch {job.batch} on {job.world} ranks",
                flush=True,
            )
        job.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
