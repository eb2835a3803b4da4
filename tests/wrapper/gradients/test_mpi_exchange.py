"""Gradients over MPI: those of one process, whatever the shares; and what happens where MPI is not as it should be.

As a program (`python -m tests.wrapper.gradients.test_mpi_exchange CHECK`) this is one rank that makes one check.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ones_wrapper.api import join
from ones_wrapper.data.feed import AccumulationStep, Cut, step_passes
from ones_wrapper.group import Group
from tests.waiting import until
from tests.wrapper.steps import Seen
from tests.wrapper.test_group import TIMEOUT_S, TOP, clean_env, under_mpi

pytestmark = pytest.mark.slow

STEPS = [(7, 100), (12, 100), (2, 100), (1, 100), (11, 2), (4, 1), (2, 1), (9, 3)]
"""Samples of each step, and the most of them in one pass on one rank. With 1 and 2 samples some ranks have none."""


class Odd(nn.Module):
    """Tied weights, a branch that few samples take, one that none takes, and no bias where it would be easy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner.weight
        self.branch = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.ones(6), requires_grad=False)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tied(torch.tanh(self.inner(x))) * self.scale + self.fixed
        chosen = x[:, 0].detach() > 1.3
        if chosen.any():
            x = x.index_add(0, chosen.nonzero().ravel(), self.branch(x[chosen]))
        return {"y": self.head(x).squeeze(1)}


def accumulation_steps(total: int, most: int, group: Group) -> list[AccumulationStep]:
    return list(step_passes(0, total, Cut(total, group.world, group.rank, most)))


def batch(step: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return (
        torch.randn(total, 6, generator=random, dtype=torch.float64),
        torch.randn(total, generator=random, dtype=torch.float64),
    )


def cut(x: torch.Tensor, part: AccumulationStep) -> torch.Tensor:
    """The pass's samples; where it counts none, NaN in place of the borrowed one, which must not be counted."""
    return x[part.start : part.start + part.samples] if part.samples else torch.full_like(x[:1], torch.nan)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x)["y"] - y) ** 2).mean()


def joined() -> tuple[Any, Any]:
    """This rank's group and the kind of exchange, which are imported only where there is MPI."""
    from ones_wrapper.gradients.mpi_exchange import MpiExchange
    from ones_wrapper.group.mpi_group import MpiGroup

    group = join("mpi")
    assert isinstance(group, MpiGroup)
    return group, MpiExchange


def check_gradients(bucket_cap_mb: float) -> None:
    """The gradient after backward, the parameters after the step, as one process has them."""
    group, exchange_of = joined()
    noise = Seen(group)
    exchange = exchange_of(group, noise)
    torch.manual_seed(group.rank)  # rank 0's parameters count
    model = exchange.wrap(Odd().double(), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=True)
    assert exchange.model is model and model.module is model
    assert not any(name.startswith("module") for name in model.state_dict())
    torch.manual_seed(0)
    alone = Odd().double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01) for m in (model, alone)]
    optimizers[0].register_step_pre_hook(lambda *arguments: exchange.finish())
    for step, (total, most) in enumerate(STEPS):
        x, y = batch(step, total)
        noise.locals.clear(), noise.wholes.clear()
        mine = accumulation_steps(total, most, group)
        for part in mine:
            with exchange.during(part):
                loss_of(model, cut(x, part), cut(y, part)).backward()
        loss_of(alone, x, y).backward()
        for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), f"step {step}: {name}"
            if one.grad is not None and other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
        trained = [p for p in alone.parameters() if p.grad is not None]
        assert sum(noise.wholes) == pytest.approx(sum(float((p.grad**2).sum()) for p in trained))  # type: ignore[operator]
        if share := mine[0].share.samples:
            own = copy.deepcopy(alone)
            own.zero_grad()
            mine_alone = slice(mine[0].share.start, mine[0].share.start + share)
            loss_of(own, x[mine_alone], y[mine_alone]).backward()
            expected = sum(float((p.grad**2).sum()) for p in own.parameters() if p.grad is not None)
            assert sum(square for square, _, _ in noise.locals) == pytest.approx(expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    for parameter in model.parameters():
        assert all(torch.equal(parameter, theirs) for theirs in group.gather(parameter.data)), "ranks drift apart"


def check_short_types() -> None:
    """bfloat16 gradients are summed in single precision; buffers become rank 0's."""
    group, exchange_of = joined()
    exchange = exchange_of(group, None)
    inner = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 1, dtype=torch.bfloat16))
    inner[2].register_forward_pre_hook(lambda module, arguments: arguments[0].bfloat16())
    model = exchange.wrap(inner)
    shadow = copy.deepcopy(inner)
    torch.manual_seed(group.rank)
    (part,) = accumulation_steps(8, 100, group)
    x = torch.randn(part.samples, 40)
    with exchange.during(part):
        model(x).float().mean().backward()
        exchange.finish()
    assert shadow.module is shadow, "a copy is one of the model alone, and is not exchanged"
    shadow(x).float().mean().backward()
    for one, own in zip(model.parameters(), shadow.parameters(), strict=True):
        assert own.grad is not None
        parts = group.gather(own.grad.float() * (part.samples / 8))
        expected = torch.stack(parts).sum(0).to(own.dtype)
        torch.testing.assert_close(one.grad, expected, rtol=1e-2 if own.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    for name, buffer in model.named_buffers():
        assert all(torch.equal(buffer, theirs) for theirs in group.gather(buffer)), name
    assert int(model.state_dict()["1.num_batches_tracked"]) == 1


def check_refusals() -> None:
    """What cannot be averaged is an error on every rank, not a hang and not a wrong model."""
    group, exchange_of = joined()
    with pytest.raises(ValueError, match="process_group cannot be given"):
        exchange_of(group, None).wrap(nn.Linear(2, 1), process_group=None)
    with pytest.raises(ValueError, match="no parameter"):
        exchange_of(group, None).wrap(nn.ReLU())
    with pytest.raises(ValueError, match=r"complex"):
        exchange_of(group, None).wrap(nn.Linear(2, 1, dtype=torch.complex64))
    if group.world > 1:
        try:
            exchange_of(group, None).wrap(nn.Linear(2 + (group.rank == 1), 1))
            raise AssertionError("ranks with different models go on")
        except ValueError as error:
            assert "another model" in str(error)
    (part,) = accumulation_steps(6, 100, group)
    exchange = exchange_of(group, None)
    model = exchange.wrap(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="outside the loader's loop"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="twice in one step"), exchange.during(part):
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    with exchange.during(part):  # and the next step is sound
        model(torch.full((1, 2), float(group.rank))).sum().backward()
    assert model.weight.grad[0, 0] == sum(range(group.world)) / group.world  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match="sparse"), exchange.during(part):
        words = exchange_of(group, None)
        embedding = words.wrap(nn.Embedding(3, 2, sparse=True))
        with words.during(part):
            embedding(torch.tensor([1])).sum().backward()


def check_clipping() -> None:
    """Gradients are whole when backward ends, also if a script calls a model's parts: it clips what the step takes."""
    group, exchange_of = joined()
    exchange = exchange_of(group, None)
    model = exchange.wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    (part,) = accumulation_steps(6, 100, group)
    with exchange.during(part):
        model[1](model[0](torch.full((1, 2), group.rank + 1.0))).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        exchange.finish()  # as the optimizer's step does
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert norm == pytest.approx(1e-3, rel=1e-3), norm


class Calls(torch.autograd.Function):
    """Nothing, but backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


class Noted:
    """A communicator or a request, whose calls are noted by name."""

    def __init__(self, real: Any, calls: list[str]) -> None:
        self.real, self._calls = real, calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            self._calls.append(name)
            found = getattr(self.real, name)(*arguments)
            return Noted(found, self._calls) if name == "Iallreduce" else found

        return call


def check_overlap() -> None:
    """Each bucket's all-reduce starts at the bucket's last gradient, MPI is called at each gradient from then on, and
    all buckets but the last are reduced although backward's last gradient has not come."""
    group, exchange_of = joined()
    calls: list[str] = []

    class Noting(exchange_of):  # type: ignore[misc, valid-type]
        def _arrive(self, *arguments: Any) -> None:
            calls.append("gradient")
            super()._arrive(*arguments)

    exchange = Noting(group, None)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(24)]
    exchange.wrap(nn.ModuleList(layers), bucket_cap_mb=1)  # 4 layers a bucket
    exchange._comm = Noted(exchange._comm, calls)
    (part,) = accumulation_steps(6, 100, group)

    def reduced() -> bool:
        return len(exchange._requests) == 5 and all(request.real.Test() for request in exchange._requests)

    with exchange.during(part):
        x = Calls.apply(layers[0](torch.ones(1, 256)), lambda: until(reduced, "five buckets' sums"))  # type: ignore[no-untyped-call]
        for layer in layers[1:]:
            x = layer(x)
        x.sum().backward()
        exchange.finish()
    wanted: list[str] = []
    for gradients in range(1, 25):
        wanted += ["gradient"] + ["Iallreduce"] * (gradients % 4 == 0) + ["Test"] * (gradients >= 4)
    assert calls == wanted + ["Wait"] * 6, calls


def check_failing_rank() -> None:
    """One rank ends with an error while the others wait for it."""
    from ones_wrapper.group import mpi_group

    mpi_group.EXIT_WAIT_S = 0.3
    group = join("mpi")
    if group.rank == 1:
        group.close(7)
        sys.exit(7)
    group.maximum([0])


def check_all_end() -> None:
    """All ranks end with an error, a moment apart: none is brought down."""
    from ones_wrapper.group import mpi_group

    mpi_group.EXIT_WAIT_S = 60.0
    group = join("mpi")
    time.sleep(0.2 * group.rank)
    sys.stdout.write("bye\n")
    group.close(143)
    sys.exit(143)


def check_everything() -> None:
    """In one start of the ranks, which costs seconds of importing torch."""
    for check in (
        partial(check_gradients, 25.0),
        partial(check_gradients, 1e-4),
        check_short_types,
        check_refusals,
        check_clipping,
        check_overlap,
        check_alone,
    ):
        check()


def check_alone() -> None:
    """What ones-run and the launchers say of a rank that MPI takes to be alone, or of two."""
    from ones_wrapper.group.mpi_group import MpiError, check_world

    for env in (
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
        {"PMI_SIZE": "2"},
        {"ONES_NODES": "2", "ONES_GPUS_PER_NODE": "1"},
    ):
        with pytest.raises(MpiError, match="each rank is by itself"):
            check_world(1, env)
    with pytest.raises(MpiError, match="MPI found 2 ranks, but ones-run asked for 3"):
        check_world(2, {"ONES_NODES": "1", "ONES_GPUS_PER_NODE": "3"})
    check_world(2, {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})  # Hydra's proxies: one task a node
    check_world(1, {"PMI_SIZE": "1", "SLURM_NTASKS": "4"})  # one rank by hand, in a job of four tasks
    check_world(1, {})


def say() -> None:
    """In one piece, so that ranks' lines do not mix."""
    sys.stdout.write("holds\n")
    sys.stdout.flush()


CHECKS = {
    "everything": check_everything,
    "everything and a failing rank": lambda: (check_everything(), say(), check_failing_rank()),
    "gradients": partial(check_gradients, 25.0),
    "all-end": check_all_end,
}


@pytest.mark.nightly
@pytest.mark.parametrize(("check", "ranks"), [("everything", 3), ("gradients", 1)])
def test_exchange(check: str, ranks: int) -> None:
    done = under_mpi("-m", "tests.wrapper.gradients.test_mpi_exchange", check, ranks=ranks)
    assert (done.returncode, done.stdout) == (0, "holds\n" * ranks), done.stderr


def test_exchange_until_a_failing_rank_brings_down_the_others() -> None:
    """Protects the allocation: MPI tells nobody that a rank is gone, and the others would wait for ever."""
    done = under_mpi("-m", "tests.wrapper.gradients.test_mpi_exchange", "everything and a failing rank", ranks=2)
    assert done.returncode != 0
    assert done.stdout == "holds\n" * 2, done.stderr


@pytest.mark.nightly
def test_ranks_that_all_end_are_left_in_peace() -> None:
    """Protects the goodbye of rank 0, and the exit code, at a stop that all agreed on."""
    done = under_mpi("-m", "tests.wrapper.gradients.test_mpi_exchange", "all-end", ranks=2)
    assert (done.returncode, done.stdout) == (143, "bye\n" * 2), done.stderr
    assert "abort" not in done.stderr.lower()


@pytest.mark.nightly
def test_a_rank_alone_says_so() -> None:
    """As where mpi4py's MPI is not the launcher's: each rank would train the whole batch, and write the same files."""
    done = subprocess.run(
        [sys.executable, "-c", "from ones_wrapper.api import join; join()"],
        env=clean_env(ONES_BACKEND="mpi", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1"),
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert "MpiError: each rank is by itself" in done.stderr
    assert "mpi4py was built for another MPI" in done.stderr


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    say()
