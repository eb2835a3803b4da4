"""A small transformer on scikit-learn's digits, read row by row: trained by the loop of `cnn.py`."""

from __future__ import annotations

import torch
from cnn import train
from common import options
from torch import nn

import ones_wrapper as ones


class Transformer(nn.Module):
    """Reads a digit as a sequence of its eight rows."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.digit = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows(images.squeeze(1)) + self.place
        digit: torch.Tensor = self.digit(self.encoder(rows).mean(1))
        return digit


def main() -> None:
    args = options(__doc__, epochs=10, lr=0.002).parse_args()
    job = ones.init(
        batch=args.batch, max_batch=args.max_batch, max_local_batch=args.max_local_batch, epochs=args.epochs
    )
    torch.manual_seed(0)
    model: nn.Module = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train(job, model, optimizer, args)


if __name__ == "__main__":
    main()
