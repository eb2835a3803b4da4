"""A small GPT on the characters of Python's own library: AdamW, warm-up and cosine by step, bfloat16, clipping, loader
workers, a validation loss, a CSV file that stays open. An ordinary training script, made elastic by `ones`.
"""

from __future__ import annotations

import argparse
import csv
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import ones_wrapper as ones

CONTEXT = 64
"""Characters that the model sees at once."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.dropout(self.attended(seen.transpose(1, 2).flatten(2)))
        fed: torch.Tensor = x + self.dropout(self.feed(self.before_feed(x)))
        return fed


class GPT(nn.Module):
    """Predicts the next character after each character."""

    def __init__(self, characters: int, width: int = 64, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.next = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters, bias=False))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.character(text) + self.place(torch.arange(text.shape[1], device=text.device))
        guess: torch.Tensor = self.next(self.blocks(x))
        return guess


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text, each with the characters that follow."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


def library(kilobytes: int) -> tuple[Text, Text, int]:
    """Return (training set, test set from the last tenth of the text, number of different characters)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in files)[: 1024 * kilobytes]
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    data = torch.tensor([numbers[character] for character in text])
    return Text(data[: len(data) * 9 // 10]), Text(data[len(data) * 9 // 10 :]), len(numbers)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="global batch that --lr is meant for")
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--max-local-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--warm-up", type=int, default=50, help="steps until then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--text-kb", type=int, default=128, help="how much of the library is read")
    parser.add_argument("--log", type=Path, default=Path("gpt.csv"))
    parser.add_argument("--pace", type=float, default=0.0, metavar="MS", help="sleep per step, as a GPU would compute")
    return parser.parse_args()


def main() -> None:
    args = options()
    job = ones.init(
        batch=args.batch, max_batch=args.max_batch, max_local_batch=args.max_local_batch, epochs=args.epochs,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    train, test, characters = library(args.text_kb)
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(train, args.batch, shuffle=True, num_workers=args.workers, generator=order)
    model = GPT(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = args.epochs * len(loader)  # at the base batch; the schedule is as far as the samples are

    def schedule(step: int) -> float:
        if step < args.warm_up:
            return (step + 1) / args.warm_up
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warm_up) / (steps - args.warm_up)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model, optimizer, scheduler, loader = job.prepare(model, optimizer, scheduler, loader)
    # Open until the end, on every rank: another may be the first one later.
    log = csv.writer(args.log.open("a", newline=""))
    for epoch in job.epochs():
        model.train()
        for x, y in loader:
            with torch.autocast(job.device.type, torch.bfloat16):
                guess = model(x.to(job.device))
                loss = cross_entropy(guess.flatten(0, 1), y.to(job.device).flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr = scheduler.get_last_lr()[0]
            scheduler.step()
            job.loss(loss)
            if job.rank == 0:
                log.writerow([job.progress.step, epoch, job.batch, job.world, lr, loss.item()])
            time.sleep(args.pace / 1000)
        if job.rank == 0:
            validation, lr = evaluate(model.module, test, job.device), scheduler.get_last_lr()[0]
            print(f"epoch {epoch}: validation loss {validation:.4f}, learning rate {lr:.6g}", flush=True)


def evaluate(model: nn.Module, data: Text, device: torch.device) -> float:
    """Return the mean loss of a character."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=64):
            guess = model(x.to(device))
            total += cross_entropy(guess.flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
    return total / (len(data) * CONTEXT)


if __name__ == "__main__":
    main()
