"""The example: sequences that one rank's memory (emulated) does not hold, and the dense model's result."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ones_wrapper.group import Group
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategies.ring.transformer_sizes import Transformer
from tests.wrapper.forked import Team
from tests.wrapper.runs import Run
from tests.wrapper.strategies import script
from tests.wrapper.strategies.ring_script import Dense
from tests.wrapper.traffic import saved_bytes
from wrapper.examples import lm_ring

pytestmark = pytest.mark.slow

LENGTH, KB, MEMORY_MB = 512, 16, 11
ARGUMENTS = (
    *("--double", "--epochs", "1", "--length", str(LENGTH), "--text-kb", str(KB)),
    *("--memory-mb", str(MEMORY_MB)),
)


def dense(group: Group) -> tuple[float, int]:
    """Bits a byte of the dense model after an epoch, and the bytes that its training holds with one sequence."""
    sizes = Transformer(layers=2, width=64, heads=4, vocabulary=256, element_bytes=8)
    torch.manual_seed(0)
    model = lm_ring.LanguageModel(Ring(LENGTH, causal=True), sizes).double()
    for block in model.blocks:
        block.attention = Dense(block.attention, sizes.width, sizes.heads)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    data, test = lm_ring.library(KB, LENGTH)
    train = data.tensors[0]
    for chosen in script.steps(len(train), 4, 1, 0):
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model, train[torch.from_numpy(chosen)]))
        optimizer.step()
    with saved_bytes(model) as kept:
        _loss(model, train[:1])
    held = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        return _loss(model, test).item() / math.log(2), held + kept[0]


def _loss(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


@pytest.mark.nightly
def test_sequences_that_do_not_fit_one_rank(teams: dict[int, Team], tmp_path: Path) -> None:
    """One rank is refused, with what would fit. Four ranks make two rings of two, and train to the dense result."""
    example = Path(lm_ring.__file__)
    alone = Run(tmp_path / "alone", *ARGUMENTS, ranks=1, script=example)
    four = Run(tmp_path / "four", *ARGUMENTS, ranks=4, script=example)
    assert alone.end() != 0
    assert "ring: 1 GPUs cannot be used; 2 would fit (no ring of up to 1 splits length=512" in alone.errors
    assert four.end() == 0, four.errors
    found = re.search(r"epoch 0: ([\d.]+) bits a byte, batch 4, 2 rings of 2 ranks", four.output)
    assert found, four.output
    ((bits, held),) = teams[1].run(dense)
    assert abs(float(found[1]) - bits) < 2e-6
    assert held > MEMORY_MB << 20
