"""What measures the limits of strategies counts what it says: bytes sent by a rank, and what a forward pass keeps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ones_wrapper.group import Group
from tests.wrapper.forked import Team
from tests.wrapper.traffic import Traffic, saved_bytes

NUMBERS = 60


def _sent(group: Group) -> dict[str, int]:
    own, all_ = torch.ones(NUMBERS), torch.ones(NUMBERS * group.world)
    right, left = (group.rank + 1) % group.world, (group.rank - 1) % group.world
    pair = dist.new_subgroups(2)[0]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(NUMBERS, 1, bias=False))
    with Traffic() as sent:
        dist.all_reduce(own)
        dist.all_reduce(own, group=pair)
        dist.broadcast(own, 0)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(all_, own)
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, all_)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, torch.empty(NUMBERS), left)]
        ):
            work.wait()
    with Traffic(group_size=group.world) as step:
        dist.all_reduce(own, group=pair)
        model(torch.ones(2, NUMBERS)).sum().backward()
    return {**sent.by_operation, "step": step.bytes}


def _kept(group: Group) -> tuple[int, int]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    found = []
    for samples in (1, 10):
        with saved_bytes(model) as kept:
            model(torch.ones(samples, 8, dtype=torch.float64)).sum()
        found.append(kept[0])
    return found[0], found[1]


def test_bytes_that_a_rank_sends(teams: dict[int, Team]) -> None:
    """Of four ranks, each operation by its usual algorithm; DDP's in its backward pass, too."""
    for sent in teams[4].run(_sent):
        assert sent == {
            "allreduce_": 4 * NUMBERS * 3 // 2 + 4 * NUMBERS,
            "broadcast_": 4 * NUMBERS * 3 // 4,
            "_allgather_base_": 4 * NUMBERS * 3,
            "_reduce_scatter_base_": 4 * NUMBERS * 3,
            "send": 4 * NUMBERS,
            "step": 4 * NUMBERS * 3 // 2,
        }
    # Of each sample the input and tanh's result: the parameters are not counted.
    assert teams[4].run(_kept)[0] == (8 * (8 + 16), 10 * 8 * (8 + 16))
