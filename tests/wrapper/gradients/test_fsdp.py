"""The gradient exchange of FSDP2: the mean over a step's samples, in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ones_wrapper.data.feed import Cut, step_passes
from ones_wrapper.gradients.exchanges import Exchanges
from ones_wrapper.gradients.fsdp import FsdpExchange
from ones_wrapper.gradients.noise import NoiseScale
from ones_wrapper.group import Group
from tests.marks import examples
from tests.wrapper.forked import Team
from tests.wrapper.steps import (
    Model,
    Seen,
    Sizes,
    flat,
    in_one_process,
    local_batch,
    loss,
    made,
    on_ranks,
    passes_of,
    step_sizes,
)

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [{}, {"modules": nn.Linear}, {"reshard_after_forward": False}]


@given(data=st.data(), world=st.sampled_from([1, 2, 3]), options=st.sampled_from(OPTIONS))
@examples(4)
def test_gradients_are_the_mean_over_all_samples(
    teams: dict[int, Team], data: st.DataObject, world: int, options: dict[str, Any]
) -> None:
    steps = data.draw(st.lists(step_sizes(world), min_size=1, max_size=3))
    noise, to_none = data.draw(st.booleans()), data.draw(st.booleans())
    expected = in_one_process(steps)
    for found in teams[world].run(on_ranks, "fsdp", steps, options, noise, to_none, False):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])


def in_two_dimensions(group: Group, steps: list[Sizes]) -> list[Any]:
    return on_ranks(group, "fsdp", steps, {"mesh": mesh_of((2, 2))}, True, True, False)


def test_a_mesh_of_copies_of_shards(teams: dict[int, Team]) -> None:
    """The same where two groups of ranks each hold the whole model (HSDP)."""
    steps: list[Sizes] = [[[3, 2], [2, 2], [2, 2], [2, 2]], [[1], [1], [0], [0]], [[1, 1], [1, 0], [1, 0], [1, 0]]]
    for found in teams[4].run(in_two_dimensions, steps):
        np.testing.assert_allclose(found, in_one_process(steps), rtol=1e-9, atol=1e-13)


def noise_of(group: Group, sizes: Sizes, shape: tuple[int, ...]) -> tuple[list[tuple[float, int, int]], list[float]]:
    seen = Seen(group)
    exchange = FsdpExchange(group, seen)
    model = exchange.wrap(made(), mesh=mesh_of(shape))
    for part in passes_of(sizes, group.rank, 0):
        with exchange.during(part):
            loss(model(local_batch(part.start, part.samples))).backward()
    return seen.locals, seen.wholes


def square_of(cursor: int, samples: int) -> float:
    """|g|² of the mean over some samples."""
    model = made()
    loss(model(local_batch(cursor, samples))).backward()
    return float(np.square(flat([p.grad for p in model.parameters()], list(model.parameters()))).sum())


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("total", [1, 9, 12])
def test_the_noise_scale_sees_each_pass_and_the_whole(
    teams: dict[int, Team], shape: tuple[int, ...], total: int
) -> None:
    """`local` gets the mean over a pass's samples, and all ranks' `whole_shard` together that over all samples."""
    world, cursor = int(np.prod(shape)), 0
    sizes = [[one.samples for one in step_passes(0, total, Cut(total, world, rank, 2))] for rank in range(world)]
    shown = teams[world].run(noise_of, sizes, shape)
    for own, (locals_, _) in zip(sizes, shown, strict=True):
        for index, samples in enumerate(own):
            modules = locals_[3 * index : 3 * index + 3]  # two blocks and the rest
            assert {of for _, of, _ in modules} == {samples}
            if samples:
                assert sum(square for square, _, _ in modules) == pytest.approx(square_of(cursor, samples))
            cursor += samples
        assert {count for _, _, count in locals_} == {len(own)}
    assert sum(sum(wholes) for _, wholes in shown) == pytest.approx(square_of(0, total))


def layout(group: Group, modules: Any) -> tuple[list[str], int, int]:
    """Names of what is sharded on its own, this rank's numbers of parameters, and the model's."""
    exchange = FsdpExchange(group, None)
    model = exchange.wrap(made(), modules=modules)
    assert exchange.model is model
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    shards = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
    return names, sum(shards), sum(p.numel() for p in made().parameters())


def a_tanh_in_it(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(module) == 3


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, ["", "blocks.0", "blocks.1"]),
        (a_tanh_in_it, ["", "blocks.0", "blocks.1"]),
        ((nn.Linear,), ["", "first", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "last", "seldom"]),
    ],
)
def test_what_is_sharded(teams: dict[int, Team], modules: Any, expected: list[str]) -> None:
    """The modules that were chosen, and every parameter on one rank only."""
    shown = teams[3].run(layout, modules)
    assert [names for names, _, _ in shown] == [expected] * 3
    assert sum(own for _, own, _ in shown) == shown[0][2]


def stated_bytes(group: Group) -> tuple[int, int]:
    """Bytes of the gradients as they are stated, and those of the whole model."""
    exchanges = Exchanges()
    exchanges.add(FsdpExchange(group, None), made(), {})
    return exchanges.gradient_bytes, sum(p.numel() * p.element_size() for p in made().parameters())


def test_the_bytes_of_the_whole_gradients_are_stated(teams: dict[int, Team]) -> None:
    """Protects predictions of speed: a rank holds a part of them alone."""
    assert all(stated == whole for stated, whole in teams[3].run(stated_bytes))


def in_low_precision(group: Group, sizes: Sizes) -> Any:
    exchange = FsdpExchange(group, NoiseScale(group))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = exchange.wrap(made().float(), mp_policy=policy)
    for part in passes_of(sizes, group.rank, 0):
        with exchange.during(part):
            loss(model(local_batch(part.start, part.samples).float()).float()).backward()
    return flat([p.grad for p in model.parameters()], list(made().parameters()))


@pytest.mark.parametrize("sizes", [[[3, 2]], [[3, 2], [2, 2]]])
def test_mixed_precision(teams: dict[int, Team], sizes: Sizes) -> None:
    """`fully_shard`'s policy is in force; gradients agree as far as 8 bits do, and they are no exact copy."""
    expected = in_one_process([sizes])[0]
    for found in teams[len(sizes)].run(in_low_precision, sizes):
        np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
        assert np.abs(found - expected).max() > 1e-6 * np.abs(expected).max()


def refused(group: Group, make: Callable[[Group], dict[str, Any]]) -> str:
    with pytest.raises(ValueError) as error:
        FsdpExchange(group, None).wrap(made(), **make(group))
    return str(error.value)


def no_such_module(group: Group) -> dict[str, Any]:
    return {"modules": nn.Conv2d}


def copies_alone(group: Group) -> dict[str, Any]:
    return {"mesh": mesh_of((2, 1))}


def trained_but_ignored(group: Group) -> dict[str, Any]:
    return {"ignored_params": set(Model().last.parameters())}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (no_such_module, "no submodule that this selects"),
        (copies_alone, "mesh (2, 1) does not shard over the 2 ranks"),
        (trained_but_ignored, "ignored_params"),
    ],
)
def test_bad_options_are_refused(teams: dict[int, Team], make: Callable[[Group], dict[str, Any]], why: str) -> None:
    """With what is wrong, on every rank, before anything is sharded."""
    assert all(why in text for text in teams[2].run(refused, make))


def only_inside(group: Group) -> str:
    exchange = FsdpExchange(group, None)
    exchange.wrap(made())
    (part,) = passes_of([[1], [1]], group.rank, 0)
    with exchange.during(part), pytest.raises(RuntimeError) as error:
        exchange.finish()
    return str(error.value)


def test_a_step_without_an_exchange_is_refused(teams: dict[int, Team]) -> None:
    assert all("not exchanged" in text for text in teams[2].run(only_inside))
