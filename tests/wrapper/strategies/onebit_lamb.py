"""The row of 1-bit LAMB.

It is approximate: one bit an element over N ranks is another noise than over M, and after some hundred steps parameters
are nowhere near each other. What must agree is what training is for, so the results are accuracy and loss on held-out
digits. The reference is the same job on one rank, uninterrupted, where nothing is compressed.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from ones_wrapper.group import Group
from ones_wrapper.strategies.onebit_lamb import OneBitLamb
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean
from tests.wrapper.strategies import script
from tests.wrapper.strategies.onebit_script import BATCH, EPOCHS, SAMPLES, SEED, WARMUP, data_of, optimizer_of, score
from tests.wrapper.strategies.rows import HERE, Row
from tests.wrapper.traffic import Traffic
from wrapper.examples.onebit import classifier, digits


def expected(group: Group) -> list[float]:
    torch.manual_seed(0)
    model, (x, y) = classifier(), data_of(digits()[0])
    optimizer = optimizer_of(OneBitLamb(warmup_steps=WARMUP), model)
    for chosen in script.steps(SAMPLES, BATCH, EPOCHS, SEED):
        index = torch.from_numpy(chosen)
        optimizer.zero_grad()
        cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return script.flat([score(model)])


def agrees(found: list[float], wanted: list[float]) -> None:
    """Within 4 points, 14 of 360 digits: the standard error of two such accuracies is 2 points. An untrained model has
    0.1. Whether a resize carries the residual is tested by the hot run of blocks, not by these bounds."""
    accuracy, loss = found
    assert accuracy > wanted[0] - 0.04
    assert accuracy > 0.85
    assert loss < 1.0


def frozen() -> OneBitLamb:
    """As after the warm-up, when the limits hold for most of a job."""
    made = OneBitLamb(warmup_steps=WARMUP)
    for group in optimizer_of(made, classifier()).param_groups:
        group["frozen"] = True
    return made


def measure(group: Group) -> dict[str, float]:
    """What the process group is given to send in a step."""
    mean, n = OneBitMean(), sum(p.numel() for p in classifier().parameters())
    with Traffic() as sent:
        mean(torch.randn(n), torch.zeros(n))
    return {"data_bytes": sent.bytes}


ROW = Row(
    frozen, HERE / "onebit_script.py", SAMPLES, EPOCHS, expected, agrees=agrees, measure=measure, measured_at=(2, 4)
)
