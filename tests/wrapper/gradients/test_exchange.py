"""The gradient exchange of DDP: the mean over a step's samples, whatever the passes and shares."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.gradients.exchange import DdpExchange
from ones_wrapper.group import Group
from tests.wrapper.forked import Team
from tests.wrapper.steps import Seen, Sizes, in_one_process, local_batch, loss, made, on_ranks, passes_of, step_sizes

OPTIONS: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 1e-4}]


@pytest.mark.slow
@given(data=st.data(), world=st.sampled_from([1, 2, 3]), options=st.sampled_from(OPTIONS))
def test_gradients_are_the_mean_over_all_samples(
    teams: dict[int, Team], data: st.DataObject, world: int, options: dict[str, Any]
) -> None:
    """Over several steps of any sizes, with borrowed samples that give NaN, every rank gets the gradient that one
    process gets from all samples of the step."""
    steps = data.draw(st.lists(step_sizes(world), min_size=1, max_size=3))
    noise, to_none = data.draw(st.booleans()), data.draw(st.booleans())
    expected = in_one_process(steps)
    for found in teams[world].run(on_ranks, "ddp", steps, options, noise, to_none, False):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("view", [False, True])
def test_parameters_that_some_passes_do_not_use(teams: dict[int, Team], view: bool) -> None:
    """With find_unused_parameters: a pass of an odd number of samples leaves out a layer."""
    steps: list[Sizes] = [[[1, 2], [3, 3], [4, 0]], [[2, 1], [0, 0], [1, 1]], [[1], [3], [1]], [[2], [3], [0]]]
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    expected = in_one_process(steps, skip=True)
    for found in teams[3].run(on_ranks, "ddp", steps, options, True, True, True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


def buckets_there_twice(group: Group) -> list[bool]:
    """Whether the old buckets of gradients are still there as the new ones are made."""
    exchange, seen, real = DdpExchange(group, None), [], torch.distributed.Reducer
    wrapped = exchange.wrap(made(0))
    old = [weakref.ref(wrapped.reducer), weakref.ref(wrapped.logger)]  # both hold them

    def reducer(*arguments: Any, **options: Any) -> Any:
        seen.append(any(one() is not None for one in old))
        return real(*arguments, **options)

    with patch.object(torch.distributed, "Reducer", reducer):
        exchange.ranks_changed()
    return seen


def test_ranks_that_change_need_no_room_for_a_second_copy_of_the_gradients(teams: dict[int, Team]) -> None:
    """Found on a GPU: on a full one the change would have lacked memory."""
    assert teams[1].run(buckets_there_twice) == [[False]]


def noise_of(group: Group, sizes: Sizes) -> tuple[list[tuple[float, int, int]], list[float]]:
    seen = Seen(group)
    exchange = DdpExchange(group, seen)
    model = exchange.wrap(made())
    for part in passes_of(sizes, group.rank, 0):
        with exchange.during(part):
            loss(model(local_batch(part.start, part.samples))).backward()
    return seen.locals, seen.wholes


@pytest.mark.parametrize("sizes", [[[3], [2]], [[3, 2], [2, 2]], [[2, 1], [1, 0]], [[4, 3, 3]]])
def test_the_noise_scale_sees_the_ranks_means(teams: dict[int, Team], sizes: Sizes) -> None:
    """`local` gets the mean over all samples that a rank had in the step, `whole` that over all samples."""
    whole = np.square(in_one_process([sizes])[0]).sum()
    cursor = 0
    for own, (locals_, wholes) in zip(sizes, teams[len(sizes)].run(noise_of, sizes), strict=True):
        model = made()
        loss(model(local_batch(cursor, sum(own)))).backward()
        square = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        assert sum(one for one, _, _ in locals_) == pytest.approx(square)
        assert [samples for _, samples, _ in locals_] == [sum(own)] * len(locals_)
        assert sum(wholes) == pytest.approx(whole if len(sizes) > 1 else 0)
        cursor += sum(own)


def around_the_wrapper(group: Group) -> list[str]:
    said = []
    exchange = DdpExchange(group, None)
    model = exchange.wrap(made())
    assert exchange.model is model
    (part,) = passes_of([[2], [2]], group.rank, 0)
    with exchange.during(part):
        loss(model.module(local_batch(0, 2))).backward()
        with pytest.raises(RuntimeError) as error:
            exchange.finish()
    said.append(str(error.value))
    with pytest.raises(RuntimeError) as error:
        loss(model(local_batch(0, 2))).backward()
    said.append(str(error.value))
    for wrong in (made(), torch.nn.Tanh()):
        with pytest.raises(ValueError) as refused:
            (exchange if wrong.state_dict() else DdpExchange(group, None)).wrap(wrong)
        said.append(str(refused.value))
    with pytest.raises(ValueError) as refused:
        DdpExchange(group, None).wrap(made(), process_group=torch.distributed.group.WORLD)
    return [*said, str(refused.value)]


def test_wrong_uses_are_said(teams: dict[int, Team]) -> None:
    """Gradients that were not exchanged, or whose samples are not known, never reach the optimizer."""
    for said in teams[2].run(around_the_wrapper):
        wanted = ["not exchanged", "outside the loader", "one model", "no parameter", "process_group cannot be given"]
        for text, expected in zip(said, wanted, strict=True):
            assert expected in text


def exchanged(group: Group, noise: bool, sizes: Sizes, steps: int = 1) -> bool:
    exchange = DdpExchange(group, Seen(group) if noise else None)
    model = exchange.wrap(made())
    for part in [part for _ in range(steps) for part in passes_of(sizes, group.rank, 0)]:
        with exchange.during(part):
            loss(model(local_batch(part.start, part.samples))).backward()
    return exchange._arrived


def test_one_rank_alone_does_nothing_that_it_need_not(teams: dict[int, Team]) -> None:
    """No bucket is filled for one pass of one rank, unless the noise scale is measured; but the first ones, which show
    whether the script calls the model that several ranks would need."""
    assert teams[1].run(exchanged, False, [[3]]) == [True]
    assert teams[1].run(exchanged, False, [[3]], 4) == [False]
    assert teams[1].run(exchanged, True, [[3]]) == [True]
    assert teams[1].run(exchanged, False, [[3, 2]]) == [True]
