"""Options of the examples that are paced as by a GPU, and the training text of the language models."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def options(about: str | None, *, epochs: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser of the options with these defaults. A script may add its own."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch", type=int, default=32, help="global batch that --lr is meant for")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-local-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="MS", help="sleep per sample, as a GPU would compute"
    )
    parser.add_argument("--pace-step", type=float, default=0.0, metavar="MS", help="sleep per step besides")
    return parser


def library(kilobytes: int, length: int) -> tuple[TensorDataset, torch.Tensor]:
    """Return (training set, test set [samples, length + 1]) of the standard library's source as bytes. Every tenth
    sample is for the test."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= 1024 * kilobytes:
            break
    pieces = torch.frombuffer(text[: 1024 * kilobytes], dtype=torch.uint8).long().unfold(0, length + 1, length)
    held_out = torch.arange(len(pieces)) % 10 == 0
    return TensorDataset(pieces[~held_out]), pieces[held_out]
