"""The largest local batch: found by doubling and bisecting, kept, and told to the companion as a corrected formula."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.process.exit_codes import OUT_OF_MEMORY
from ones_wrapper.protocol import Spec, decode_spec
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from ones_wrapper.run.local_batch import keep_for_first_step, largest
from ones_wrapper.run.memory import LargestBatch
from ones_wrapper.run.replicas import as_found, divide
from tests.wrapper.paired import Paired

SAMPLE, MEMORY = 1000, 20_000
HELD = 13
"""Samples of a pass that two ranks really hold, where the formula says 18."""


class Apart(Paired):
    """Limits by size, and passes in which no rank waits for another."""

    def replicas(self, world: int) -> int:
        return world


@given(st.integers(1, 300), st.integers(0, 400), st.integers(1, 7))
def test_doubling_then_bisecting(most: int, held: int, unit: int) -> None:
    """The largest multiple that fits, in a few tries."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= held

    wanted = min(most, held)
    assert largest(fits, most, unit) == wanted - wanted % unit
    assert len(set(tried)) == len(tried) <= 20
    assert all(0 < size <= most and size % unit == 0 for size in tried)


def _probed(sizes: tuple[int, ...]) -> int | None:
    """Each start asks; passes of more than `HELD` samples run out of an emulated memory, on the last rank alone."""
    strategy = Apart(sample_bytes=SAMPLE)
    job = ones.init(batch=64, max_batch=64, max_local_batch=60, max_accumulation_steps=8, epochs=1, strategy=strategy)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    model = job.ddp(plain)
    with pytest.raises(RuntimeError, match=r"after job\.prepare or job\.register"):
        job.probe(lambda samples: None)
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(TensorDataset(torch.ones(64, 4)))
    before, tracked, calls = torch.get_rng_state(), int(plain[1].num_batches_tracked), []
    held: list[int] = []

    def one_pass(samples: int) -> None:
        calls.append(samples)
        held.append(sum(type(one) is torch.Tensor and one.shape == (1, 4) for one in gc.get_objects()))
        plain(torch.rand(samples + 1, 4)).sum().backward()
        if samples > HELD and job.rank == job.world - 1:
            raise torch.OutOfMemoryError("emulated")

    found = job.probe(one_pass) if job.world < 4 else 0
    assert all(found >= 3 for found in held)  # of the weight: what the first step will make
    assert torch.equal(torch.get_rng_state(), before)
    assert int(plain[1].num_batches_tracked) == tracked and plain[0].weight.grad is None
    for _ in job.epochs():
        for (x,) in loader:
            assert found == 0 or len(x) <= found
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        break
    job.checkpoint()
    spec = decode_spec((Path(os.environ["ONES_JOB_DIR"]) / "spec.json").read_bytes())
    testing.put((found, len(calls), divide(spec, 2, 0).max_local, divide(spec, 4, 0).max_local))
    coming = sizes[1 + int(os.environ["SLURM_RESTART_COUNT"]) :]
    return coming[0] if coming else None


@pytest.mark.slow
def test_a_probe_corrects_the_formula_at_all_sizes() -> None:
    """Tried once; what follows for another size is in the spec that the companion reads, in later runs, too."""
    put = testing.run(partial(_probed, (2, 2, 4)), ranks=2, env={"ONES_MEMORY_BYTES": str(MEMORY)})
    first, second, third = put[0].value, put[2].value, put[4].value
    assert first[0] == second[0] == HELD
    assert first[1] > 5 and second[1] == 0
    assert first[2:] == second[2:] == third[2:] == (HELD, HELD)


def _waiting() -> int | None:
    """A probe whose ranks wait for each other in a pass; too large a one fails on the last rank alone."""
    job = ones.init(batch=8, max_batch=64, max_local_batch=60, epochs=1, strategy=Paired())
    model = job.ddp(torch.nn.Linear(4, 1))
    job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []

    def one_pass(samples: int) -> None:
        calls.append(samples)
        if samples > 5 and job.rank == job.world - 1:
            raise torch.OutOfMemoryError("emulated")
        if samples > 5:
            raise SystemExit(0)  # would wait until it is killed
        dist.all_reduce(torch.zeros(1))

    first = os.environ["SLURM_RESTART_COUNT"] == "0"
    try:
        found = job.probe(one_pass)
    except torch.OutOfMemoryError as error:
        verdict = job._run.failed(error)
        assert verdict is not None and verdict[0] == OUT_OF_MEMORY
        found = 0
    except SystemExit:
        found = 0
    testing.put((found, calls[-1] if calls else 0))
    return 2 if first else None


def test_a_probe_whose_ranks_wait_ends_at_the_first_failure() -> None:
    """The rank leaves for a restart rather than wait; the next start takes half."""
    found = [put.value for put in testing.run(_waiting, ranks=2)]
    assert found == [(0, 8), (0, 8), (4, 0), (4, 0)]


@pytest.mark.parametrize(("stepped", "more"), [(False, 3), (True, 1)])
def test_what_the_first_step_makes_is_counted(stepped: bool, more: int) -> None:
    """Two moments and a bucket of each trained parameter are held while trying, and the bucket alone once the optimizer
    has its own."""
    numbers = 1 << 20
    model = torch.nn.Linear(numbers, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        model(torch.ones(1, numbers)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def large() -> int:
        alive = (one for one in gc.get_objects() if type(one) is torch.Tensor)
        return sum(one.numel() >= numbers for one in alive)

    before, seen = large(), []
    with keep_for_first_step([optimizer]):
        seen.append(large() - before)
    assert seen == [more] and large() == before


def _hooked(kind: str) -> None:
    """A probe where hooks on the parameters belong to the exchange, and a step after it."""
    strategy = {"lsgd": ones.strategies.Lsgd(period=4), "decentlam": ones.strategies.DecentLam()}.get(kind)
    job = ones.init(batch=8, max_batch=16, max_local_batch=8, epochs=1, strategy=strategy)
    plain = torch.nn.Linear(4, 1)
    model = job.fsdp(plain) if kind == "fsdp" else job.ddp(plain)
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = job.loader(TensorDataset(torch.ones(16, 4)))
    one_pass = job.unwrap(model)
    testing.put(job.probe(lambda samples: one_pass(torch.ones(samples, 4)).sum().backward()))
    for _ in job.epochs():
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    with pytest.raises(RuntimeError, match="outside the loader's loop"):
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("kind", ["lsgd", "decentlam", "fsdp"])
def test_a_probe_belongs_to_no_step(kind: str) -> None:
    """Exchanges with hooks on the parameters let its gradients be."""
    assert [put.value for put in testing.run(partial(_hooked, kind), ranks=2)] == [8, 8]


def _uneven() -> None:
    job = ones.init(batch=64, max_batch=64, max_local_batch=60, epochs=1, uneven=True)
    model = job.ddp(torch.nn.Linear(4, 1))
    job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def one_pass(samples: int) -> None:
        if samples > HELD:
            raise torch.OutOfMemoryError("emulated")

    job.probe(one_pass)
    assert job._run.sizes.uneven is not None
    testing.put(job._run.sizes.uneven.proposal(rank=1, world=2)[3])


def test_a_fast_rank_gets_no_more_than_the_probe_found() -> None:
    """Protects the start that probes: uneven shares of up to the declared passes ran out of memory in training."""
    assert [put.value for put in testing.run(_uneven)] == [HELD]


def test_what_fits_as_declared_says_nothing_of_more() -> None:
    """A formula that leaves as much stays; one that left less is corrected; and where there is none, a cap remains."""
    limits = replace(Paired(sample_bytes=SAMPLE).limits(Spec(8, 8, 8, 0, 1), 8, 8), memory_bytes=MEMORY)
    spec = Spec(64, 64, 8, 0, 1, limits=limits)
    assert as_found(spec, 1, LargestBatch(8, 1)) == spec
    small = replace(spec, limits=replace(limits, memory_bytes=4000))
    assert divide(small, 1, 0).max_local == 3
    assert divide(as_found(small, 1, LargestBatch(8, 1)), 1, 0).max_local == 8
    unknown = replace(spec, limits=replace(limits, memory_bytes=0))
    assert as_found(unknown, 1, LargestBatch(3, 1)).max_local_batch == 3
    assert as_found(unknown, 2, LargestBatch(3, 1)) == unknown
    each_a_replica = replace(unknown, limits=StrategyLimits("plain", tuple(SizeLimits(n, n) for n in (1, 2, 4))))
    assert as_found(each_a_replica, 2, LargestBatch(3, 1)).max_local_batch == 3
    assert as_found(replace(unknown, limits=StrategyLimits("any")), 2, LargestBatch(3, 1)).max_local_batch == 3
    assert as_found(replace(spec, limits=None), 2, LargestBatch(3)).max_local_batch == 3
