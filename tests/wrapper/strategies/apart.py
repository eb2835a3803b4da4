"""What the rows of the strategies whose ranks go apart share: the optimum to compare with, and bytes on the wire."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from ones_wrapper.data.feed import AccumulationStep, Share
from ones_wrapper.group import Group
from ones_wrapper.strategies.decentlam.strategy import DecentLam
from ones_wrapper.strategies.lsgd import Lsgd
from tests.wrapper.strategies.apart_script import EPOCHS, SAMPLES, data
from tests.wrapper.strategies.rows import HERE, Row
from tests.wrapper.wire import sent_bytes

NUMBERS, STEPS = 1 << 15, 8


def optimum(group: Group) -> list[float]:
    """Least squares: weights and bias."""
    x, y = data().tensors
    with_one = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    found: list[float] = torch.linalg.lstsq(with_one, y).solution.flatten().tolist()
    return found


def close(found: list[float], wanted: list[float]) -> None:
    """The training is no exact mean over all samples at one point, but ends in the same optimum."""
    assert len(found) == len(wanted)
    assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) < 0.01


def measured(strategy: Lsgd | DecentLam, group: Group) -> dict[str, float]:
    """Bytes that the ranks send in a step, in the mean."""
    exchange = strategy.exchange(group, None)
    model = exchange.wrap(torch.nn.Linear(NUMBERS, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    optimizer.param_groups[0]["lr"] = 1e-3
    exchange.trained_by([optimizer])
    optimizer.register_step_pre_hook(lambda *_: exchange.finish())
    part = AccumulationStep(Share(group.rank, group.rank + 1, group.world), group.rank, 1, 0, 1, 1)
    x = torch.ones(1, NUMBERS)

    def train() -> None:
        for _ in range(STEPS):
            with exchange.during(part):
                loss = model(x).square().sum()
                optimizer.zero_grad()
                loss.backward()
                exchange.loss(loss)
                optimizer.step()
        dist.barrier()

    train()  # connects those that speak
    before = sent_bytes()
    train()
    (total,) = group.total([float(sent_bytes() - before)])
    return {"data_bytes": total / group.world / STEPS}


def known(strategy: Lsgd | DecentLam) -> Lsgd | DecentLam:
    """The strategy as it is once it knows the model of `measured`."""
    strategy.model_bytes = 4 * NUMBERS
    return strategy


def lsgd() -> Lsgd | DecentLam:
    return known(Lsgd(period=4))


def decentlam() -> Lsgd | DecentLam:
    return known(DecentLam("ring", momentum=0.9))


def lsgd_bytes(group: Group) -> dict[str, float]:
    return measured(lsgd(), group)


def decentlam_bytes(group: Group) -> dict[str, float]:
    return measured(decentlam(), group)


row = partial(
    Row,
    script=HERE / "apart_script.py",
    samples=SAMPLES,
    epochs=EPOCHS,
    expected=optimum,
    agrees=close,
    measured_at=(2, 4),
    within={"data_bytes": 0.05},
)
