"""Replicas: the ranks of one get the same samples, the data is used exactly once, the result is the plain job's."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.feed import Cut, plan
from ones_wrapper.frameworks import steps
from ones_wrapper.protocol import MAX_INT, MAX_SPEC, Batch, Order, Spec, decode_report, decode_spec, encode
from ones_wrapper.protocol.fields import MAX_ROWS, ProtocolError
from ones_wrapper.protocol.limits import MAX_NOTE, MAX_NOTES, SizeLimits, StrategyLimits
from ones_wrapper.run.replicas import divide, in_force, look_at
from ones_wrapper.strategies.optimus.strategy import Optimus2D
from ones_wrapper.strategies.ring.strategy import Ring
from ones_wrapper.strategy import Strategy
from ones_wrapper.testing import RankFailed
from tests.wrapper.paired import Paired
from tests.wrapper.runs import assert_exactly_once, write_order

SAMPLES, EPOCHS = 22, 2
SPEC = Spec(8, 64, 6, 0, EPOCHS, 4)


def train(strategy: Paired | None, sizes: tuple[int, ...]) -> int | None:
    """A linear regression in float64, resized after each two steps."""
    job = ones.init(
        batch=8, max_batch=64, max_local_batch=6, max_accumulation_steps=4, epochs=EPOCHS, strategy=strategy
    )
    part, parts = (strategy.half, strategy.halves) if strategy else (0, 1)
    torch.manual_seed(0)
    model = job.ddp(torch.nn.Linear(4, 1).double())
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    loader = job.loader(data, seed=3)
    begun, coming = job.progress.step, sizes[1 + int(os.environ["SLURM_RESTART_COUNT"]) :]
    seen, counted = [], 0
    for _ in job.epochs():
        for inputs, target in loader:
            if job.progress.step == begun + 2 and coming:
                job.checkpoint()
                return coming[0]
            seen.append(inputs)
            optimizer.zero_grad()
            loss = ((model(inputs) - target)[part::parts] ** 2).sum() / len(inputs)
            loss.backward()
            job.loss(loss)
            optimizer.step()
        counted = sum(len(inputs) for inputs, _ in job.evaluate(data, batch=3))
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    spec = decode_spec((Path(os.environ["ONES_JOB_DIR"]) / "spec.json").read_bytes())
    testing.put((job.replicas, job.replica, torch.cat(seen), counted, parameters, spec))
    return None


def ran(strategy: Paired | None, sizes: tuple[int, ...], folder: Path) -> list[Any]:
    """What the ranks of the last start put, by rank. Every sample of every epoch was used once."""
    trace = {"ONES_TRACE": str(folder / "trace-{restart}-{rank}.jsonl")}
    put = [one.value for one in testing.run(partial(train, strategy, sizes), ranks=sizes[0], env=trace)]
    assert_exactly_once(folder, EPOCHS, SAMPLES)
    return put


@pytest.mark.slow
def test_replicas_train_as_one_rank_does(tmp_path: Path) -> None:
    """Through resizes 4 → 2 → 4: the plain job's parameters in float64, exactly-once data, limits in the spec."""
    for name in ("plain", "pairs"):
        (tmp_path / name).mkdir()
    plain = ran(None, (1,), tmp_path / "plain")
    put = ran(Paired(), (4, 2, 4), tmp_path / "pairs")
    assert [one[:2] for one in put] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for rank, (_, _, seen, counted, parameters, spec) in enumerate(put):
        assert torch.equal(seen, put[rank - rank % 2][2])
        assert counted == put[rank - rank % 2][3]
        assert (parameters - plain[0][4]).abs().max() < 1e-12
        assert spec.limits == replace(Paired().limits(SPEC, 64, 4), memory_bytes=0)
    assert put[0][3] + put[2][3] == SAMPLES


def test_a_number_of_ranks_that_does_not_fit() -> None:
    """Ends at once, with what would fit."""
    with pytest.raises(RankFailed, match="paired: 3 GPUs cannot be used; 1, 2, 4 would fit"):
        testing.run(partial(train, Paired(), (3,)), ranks=3)


def test_frameworks_take_no_strategy() -> None:
    """Their loops count in ranks, so what they would train is something else."""
    with pytest.raises(ValueError, match="Lightning trains in plain data parallel, and paired is another strategy"):
        steps.join("Lightning", 8, 1, {"strategy": Paired()})


def test_a_batch_comes_down_to_a_multiple_and_is_reported(tmp_path: Path) -> None:
    """An order for 30 samples, where each replica takes multiples of 4, and the script multiples of 8 in all; the
    companion is told so, and the batch in force."""

    def body() -> None:
        limits = {"max_local_batch": 8, "max_accumulation_steps": 4, "multiple_of": 8}
        job = ones.init(batch=8, max_batch=63, epochs=500, strategy=Paired(quantum=4), **limits)  # type: ignore[arg-type]
        model = job.ddp(torch.nn.Linear(4, 1))
        optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
        loader = job.loader(TensorDataset(torch.ones(64, 4)))
        for _ in job.epochs():
            for (x,) in loader:
                if job.progress.step == 2 and job.rank == 0:
                    write_order(tmp_path, Order(1, 0, batch=30))
                if job.batch != 8:
                    testing.put((job.batch, len(x)))
                    return
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    put = testing.run(body, ranks=2, env={"ONES_JOB_DIR": str(tmp_path), "ONES_REPORT_EVERY_S": "0.1"})
    assert [one.value for one in put] == [(24, 8)] * 2
    lines = (tmp_path / "reports-0.jsonl").read_bytes().splitlines(keepends=True)
    (batch,) = [report for _, _, report in map(decode_report, lines) if isinstance(report, Batch)]
    assert (batch.batch, batch.order, batch.passes) == (24, 1, 3)
    spec = decode_spec((tmp_path / "spec.json").read_bytes())
    assert (spec.multiple_of, spec.max_batch) == (8, 56)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_shares_and_passes_come_in_units(samples: int, replicas: int, unit: int, units: int, count: int) -> None:
    """Each sample once; only an epoch's last step has less than a multiple, in one pass of one replica."""
    batch, most = unit * count * replicas, unit * units
    each = [list(plan(0, samples, Cut(batch, replicas, replica, most, unit))) for replica in range(replicas)]
    used = [n for parts in each for part in parts for n in range(part.start, part.start + part.samples)]
    assert sorted(used) == list(range(samples))
    assert len({len(parts) for parts in each}) == 1
    for parts in zip(*each, strict=True):
        assert len({(part.index, part.count, part.share.total, part.largest) for part in parts}) == 1
        assert max(part.samples for part in parts) <= min(most, parts[0].largest)
        odd = [part for part in parts if part.samples % unit]
        assert len(odd) <= (parts[0].share.total % unit > 0)
        assert all(0 <= part.start < samples for part in parts)


def test_batches_are_multiples_of_the_quantum() -> None:
    """Brought down to one; and where none fits, a sentence with the number."""
    spec = replace(SPEC, limits=Paired(quantum=4).limits(SPEC, 64, 8))
    division = divide(spec, 4, 3)
    assert (division.replicas, division.replica, division.first, division.unit, division.max_local) == (
        2,
        1,
        False,
        4,
        4,
    )
    assert [in_force(spec, wanted, division) for wanted in (1, 8, 15, 30, 64)] == [8, 8, 8, 24, 32]
    assert in_force(replace(spec, multiple_of=6, max_batch=60), 30, division) == 24
    assert in_force(replace(spec, multiple_of=5, max_batch=30), 30, division) == 24
    with pytest.raises(ValueError, match="paired: global batches are multiples of 8 with 2 replicas"):
        in_force(replace(spec, max_batch=7), 7, division)


def test_the_memory_of_a_gpu() -> None:
    """A formula lowers the local batch; where not one sample fits, it says which sizes hold one."""
    limits = replace(Paired(sample_bytes=1000).limits(SPEC, 8, 8), memory_bytes=3000)
    spec = replace(SPEC, limits=limits)
    assert [divide(spec, world, 0).max_local for world in (1, 2, 8)] == [2, 5, 5]
    assert look_at(spec, 1) == ""
    spec = replace(spec, limits=replace(limits, memory_bytes=800))
    assert "paired: with 1 GPUs one sample needs 1000 bytes" in look_at(spec, 1)
    assert look_at(spec, 1).endswith("2, 4, 6 GPUs would hold it")


def test_the_largest_limits_can_be_read() -> None:
    """A spec of as many rows and texts as there may be is within the bytes that a companion reads."""
    row = SizeLimits(1, 1, MAX_INT, 1, MAX_INT, MAX_INT, MAX_INT, MAX_INT)
    notes = ("\U0001f600" * MAX_NOTE,) * MAX_NOTES
    rows = tuple(replace(row, gpus=MAX_INT - MAX_ROWS + n) for n in range(MAX_ROWS))
    spec = replace(SPEC, limits=StrategyLimits("\U0001f600" * MAX_NOTE, rows, MAX_INT, carries=notes, resets=notes))
    assert len(encode(spec)) <= MAX_SPEC
    assert decode_spec(encode(spec)) == spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 3, "replicas": 2},
        {"gpus": 0},
        {"together": 3},
        {"quantum": 0},
        {"sample_bytes": -1},
        {"sample_bytes": MAX_INT + 1},
    ],
)
def test_rows_that_contradict_themselves(wrong: dict[str, int]) -> None:
    """Are made by no strategy, and believed of none."""
    with pytest.raises(ProtocolError):
        SizeLimits(**{"gpus": 4, "replicas": 2} | wrong)
    text = encode(replace(SPEC, limits=StrategyLimits("s", (SizeLimits(4, 2),)))).decode()
    for name, value in wrong.items():
        text = text.replace(f'"{name}": {getattr(SizeLimits(4, 2), name)}', f'"{name}": {value}')
    with pytest.raises(ProtocolError):
        decode_spec(text.encode())


@pytest.mark.parametrize("strategy", [Ring(64, ranks=1), Optimus2D(q=1, hidden=8, heads=2, vocab=8)])
def test_more_gpus_than_rows_where_some_numbers_fit(strategy: Strategy) -> None:
    """The largest are kept: the job's own is among them."""
    rows = strategy.limits(SPEC, 300, 8).sizes
    assert [row.gpus for row in rows] == list(range(45, 301))


def test_limits_that_contradict_themselves() -> None:
    for wrong in (
        {"strategy": ""},
        {"sizes": (SizeLimits(2, 1), SizeLimits(2, 2))},
        {"sizes": tuple(SizeLimits(n + 1, 1) for n in range(MAX_ROWS + 1))},
        {"resets": ("x",) * (MAX_NOTES + 1)},
    ):
        with pytest.raises(ProtocolError):
            StrategyLimits(**{"strategy": "s"} | wrong)  # type: ignore[arg-type]
