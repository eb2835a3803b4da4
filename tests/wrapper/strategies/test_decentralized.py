"""Leader SGD and DecentLaM as a job's strategy: what it saves, evaluates and tells, through resizes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.group import Group
from ones_wrapper.protocol import Spec, decode_spec
from ones_wrapper.protocol.limits import StrategyLimits
from ones_wrapper.strategies.decentlam.strategy import DecentLam
from ones_wrapper.strategies.decentlam.topologies import mixing
from ones_wrapper.strategies.lsgd import Lsgd
from tests.wrapper.runs import assert_exactly_once

SAMPLES, EPOCHS = 26, 3


def strategy_of(name: str) -> Lsgd | DecentLam:
    return Lsgd(period=2) if name == "lsgd" else DecentLam("ring", momentum=0.9)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(name: str, sizes: tuple[int, ...]) -> int | None:
    """A small network in float64, resized after each four steps."""
    number = int(os.environ["SLURM_RESTART_COUNT"])
    job = ones.init(batch=2, max_batch=6, max_local_batch=2, epochs=EPOCHS, strategy=strategy_of(name))
    torch.manual_seed(job.rank)
    model = job.ddp(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = job.register(model=model, optimizer=optimizer)
    begun = job.progress.step
    for put in testing.values():
        if put.start == number - 1:  # what the checkpoint of the start before was said to hold
            assert torch.equal(flat(model), put.value["saved"])
            assert torch.equal(
                optimizer.state[model.get_parameter("0.weight")]["momentum_buffer"], put.value["momentum"]
            )
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    loader = job.loader(data, seed=3)
    evaluated = torch.zeros(0)
    for _ in job.epochs():
        model.train()
        for inputs, target in loader:
            if job.progress.step == begun + 4 and number + 1 < len(sizes):
                apart = flat(model)
                saved = flat(job.unwrap(model))
                assert torch.equal(flat(model), apart)
                exchange = next(iter(job._run.loop.exchanges))
                with exchange.published():
                    assert torch.allclose(flat(model), saved, rtol=0, atol=1e-15)
                    momentum = optimizer.state[model.get_parameter("0.weight")]["momentum_buffer"].clone()
                    saved = flat(model)
                job.checkpoint()
                assert torch.equal(flat(model), apart)
                testing.put({"saved": saved, "momentum": momentum, "apart": apart})
                return sizes[number + 1]
            loss = (model(inputs) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            job.loss(loss)
            optimizer.step()
            assert job.batch == min(6, 2 * job.world) if name == "lsgd" else job.batch == 2
            assert job.lr_factor == 1.0
        model.eval()
        before = flat(model)
        for _ in job.evaluate(data, batch=3):
            evaluated = flat(model)
        assert torch.equal(flat(model), before)
    spec = decode_spec((Path(os.environ["ONES_JOB_DIR"]) / "spec.json").read_bytes())
    assert job.unwrap(model).get_submodule("0") is model.get_submodule("0")
    testing.put({"final": flat(model), "evaluated": evaluated, "limits": spec.limits, "noise": job.progress.noise})
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsgd", "decentlam"])
def test_one_model_is_saved_evaluated_and_published(name: str, tmp_path: Path) -> None:
    """Ranks train apart; checkpoints, evaluations and the end hold one model, the same on all of them."""
    trace = {"ONES_TRACE": str(tmp_path / "trace-{restart}-{rank}.jsonl")}
    found = testing.run(partial(train, name, (3, 2)), ranks=3, env=trace)
    assert_exactly_once(tmp_path, EPOCHS, SAMPLES)
    first = [one.value for one in found if one.start == 0]
    assert all(torch.equal(one["saved"], first[0]["saved"]) for one in first)
    assert not torch.equal(first[0]["apart"], first[1]["apart"])
    if name == "lsgd":
        assert sum(torch.equal(one["apart"], one["saved"]) for one in first) == 1  # the leader's own
    else:
        mean = torch.stack([one["apart"] for one in first]).mean(0)
        torch.testing.assert_close(first[0]["saved"], mean, rtol=1e-12, atol=1e-14)
    last = [one.value for one in found if one.start == 1]
    for one in last:
        assert torch.equal(one["final"], last[0]["final"]) and torch.equal(one["evaluated"], last[0]["evaluated"])
        assert one["noise"] == 0
        # 19 numbers of 8 bytes: to the one neighbour, or from the leader to the other every second step.
        wanted = 19 * 8 if name == "decentlam" else 19 * 8 // 4
        assert (one["limits"].strategy, one["limits"].at(2).data_bytes) == (name, wanted)


def told(strategy: Lsgd | DecentLam, ranks_per_node: int = 4) -> StrategyLimits:
    strategy.model_bytes = 1200
    return strategy.limits(Spec(8, 8, 8, 0, 1), 32, ranks_per_node)


def test_limits() -> None:
    """Any number of GPUs, bytes by size, and how many steps a resize wants to be away from the last."""
    found = told(Lsgd(period=8))
    assert [found.at(n).data_bytes for n in (1, 2, 4, 12)] == [0, 75, 112, (11 + 9 * 4) * 1200 // 96]  # type: ignore[union-attr]
    assert told(Lsgd(period=8, local_period=8)).at(12).data_bytes == 11 * 1200 // 96  # type: ignore[union-attr]
    assert (found.exact, found.min_steps) == (False, 8)
    assert Lsgd().limits(Spec(8, 8, 8, 0, 1), 32, 4).sizes == ()
    ring = told(DecentLam("ring"))
    assert [ring.at(n).data_bytes for n in (1, 2, 3, 32)] == [0, 1200, 2400, 2400]  # type: ignore[union-attr]
    assert (ring.exact, ring.min_steps) == (False, 10)
    pairs = told(DecentLam(lambda world: mixing("ring", world) if world % 2 == 0 else [[0.0]]))
    assert pairs.at(3) is None and pairs.at(4) is not None


def test_wrong_uses_are_said() -> None:
    with pytest.raises(ValueError, match=r"momentum=1\.0"):
        DecentLam(momentum=1.0)
    group = Group(rank=0, world=1, local_rank=0, nodes=1, gpus_per_node=1, device=torch.device("cpu"))
    for strategy in (Lsgd(), DecentLam()):
        with pytest.raises(ValueError, match=f"{strategy.name}: .*leave out backend='mpi'"):
            strategy.exchange(group, None)


def refused(name: str) -> None:
    """What a job with the strategy says to other exchanges and to a gradient scaler."""
    job = ones.init(batch=2, strategy=strategy_of(name))
    with pytest.raises(ValueError, match=f"fsdp: {name} brings a gradient exchange of its own"):
        job.fsdp(torch.nn.Linear(1, 1))
    model = job.ddp(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    if name == "decentlam":
        with pytest.raises(ValueError, match="decentlam: a gradient scaler"):
            job.register(model=model, optimizer=optimizer, scaler=scaler)


@pytest.mark.parametrize("name", ["lsgd", "decentlam"])
def test_what_excludes_each_other(name: str) -> None:
    testing.run(partial(refused, name))
