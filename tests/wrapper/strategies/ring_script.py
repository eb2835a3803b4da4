"""A language model in float64 over a ring of all ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategies.ring.transformer_sizes import Transformer
from tests.wrapper.strategies import script
from wrapper.examples.lm_ring import LanguageModel, losses

SAMPLES, EPOCHS, BATCH, SEED, LENGTH = 48, 4, 8, 3, 16
SIZES = Transformer(layers=2, width=16, heads=2, vocabulary=256, element_bytes=8, parameters=15_296)


def ring() -> Ring:
    return Ring(LENGTH, causal=True, model=SIZES)


def model_of(its: Ring) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(its, SIZES).double()


def data() -> TensorDataset:
    """Sequences in which each byte follows from the one before, with noise."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 4, (SAMPLES, LENGTH + 1), generator=generator)
    return TensorDataset(steps.cumsum(1) % 256)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


class Dense(nn.Module):
    """torch's own attention, with the parameters of the ring's."""

    def __init__(self, layer: nn.Module, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
        self.layer.load_state_dict(layer.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        seen: torch.Tensor = self.layer(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return seen


def dense_model() -> nn.Module:
    """The same model with torch's own attention, for whole sequences in one process."""
    model = model_of(ring())
    for block in model.blocks:  # type: ignore[union-attr]
        block.attention = Dense(block.attention, SIZES.width, SIZES.heads)
    return model


def dense_loss(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def main() -> None:
    its = ring()
    job = ones.init(batch=BATCH, max_local_batch=4, max_accumulation_steps=8, epochs=EPOCHS, strategy=its)
    plain = model_of(its)
    model = job.ddp(plain)
    optimizer = job.register(model=model, optimizer=optimizer_of(model))
    loader = job.loader(data(), seed=SEED)
    for _ in job.epochs():
        for (pieces,) in loader:
            loss = its.mean(losses(model, its, pieces))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            job.loss(loss)
            script.pace()
    script.end(job, plain.parameters())


if __name__ == "__main__":
    main()
