"""A small language model on the bytes of Python's own library, its weights and activations split over a q × q mesh of
ranks (Optimus-2D): an ordinary training script, made elastic by `ones`.
"""

from __future__ import annotations

import math
import time

import torch
from common import library, options
from torch import nn

import ones_wrapper as ones
from ones_wrapper.strategies.optimus import Optimus2D

BYTES = 256
CONTEXT = 32


class LanguageModel(nn.Module):
    """Predicts the next byte after each byte. Each layer takes and gives this rank's block of the activations."""

    def __init__(self, strategy: Optimus2D, width: int, layers: int) -> None:
        super().__init__()
        self.byte = strategy.embedding(BYTES, width)
        self.place = strategy.positions(CONTEXT, width)
        self.blocks = nn.Sequential(*(strategy.block() for _ in range(layers)))
        self.norm = strategy.layer_norm(width)
        self.next = strategy.linear(width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        guess: torch.Tensor = self.next(self.norm(self.blocks(self.place(self.byte(text)))))
        return guess


def main() -> None:
    parser = options(__doc__, epochs=3, lr=0.003)
    parser.add_argument("--q", type=int, nargs="+", default=[1, 2], help="sides of the mesh that may be used")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--text-kb", type=int, default=128, help="how much of the library is read")
    args = parser.parse_args()
    strategy = Optimus2D(q=args.q, hidden=args.width, heads=args.heads, vocab=BYTES, layers=args.layers, length=CONTEXT)
    job = ones.init(
        batch=args.batch,
        max_batch=args.max_batch,
        max_local_batch=args.max_local_batch,
        epochs=args.epochs,
        strategy=strategy,
    )
    torch.manual_seed(0)
    model = job.ddp(LanguageModel(strategy, args.width, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, test = library(args.text_kb, CONTEXT)
    optimizer = job.register(model=model, optimizer=optimizer)
    loader = job.loader(train)
    for epoch in job.epochs():
        model.train()
        for (pieces,) in loader:
            rows = strategy.rows(pieces.to(job.device))  # of the replica's samples, those of this row of the mesh
            loss = strategy.cross_entropy(model(rows[:, :-1]), rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            if job.updates:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            job.loss(loss)
            time.sleep((args.pace * len(pieces) + args.pace_step) / 1000)
        model.eval()
        with torch.no_grad():  # all ranks: the forward pass goes through all of the mesh
            rows = strategy.rows(test.to(job.device))
            logits = model(rows[:, :-1])
            bits = strategy.cross_entropy(logits, rows[:, 1:]).item() / math.log(2)
            guess = strategy.whole(logits).argmax(-1)
            accuracy = (guess == test[:, 1:].to(job.device)).float().mean().item()
        if job.rank == 0:
            print(
                f"epoch {epoch}: {bits:.2f} bits a byte, accuracy {accuracy:.3f}, batch {job.batch} on {job.world} "
                f"ranks in {job.replicas} replicas",
                flush=True,
            )
        job.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
