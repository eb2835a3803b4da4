"""1-bit LAMB over real ranks: the compressed mean, the optimizer, and both against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from ones_wrapper.group import Group
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean
from ones_wrapper.strategies.onebit_lamb.optimizer import CompressedLamb
from tests.wrapper.forked import Team

WORLD = 4


def _sums(group: Group, n: int, sizes: list[int], carry: bool) -> tuple[float, float]:
    """Of means over changing numbers of ranks: how far their sum is from that of exact means, without and with what is
    kept back."""
    groups = {size: dist.new_group(list(range(size))) for size in sorted(set(sizes))}
    mean, error, exact, found = OneBitMean(), torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for step, size in enumerate(sizes):
        mean.group = groups[size]
        mean.ranks_changed()
        for turn in range(3):
            everyone = [
                torch.randn(n, generator=torch.Generator().manual_seed(100 * step + 10 * turn + rank))
                for rank in range(size)
            ]
            exact += torch.stack(everyone).mean(0)
            if group.rank < size:
                out, error = mean(everyone[group.rank], error)
                found += out
        kept = mean.carried(error) if group.rank < size else torch.zeros(n)
        dist.broadcast(kept, 0)
        dist.broadcast(found, 0)
        error = kept if carry else torch.zeros(n)
    return (found - exact).abs().max().item(), (found + kept - exact).abs().max().item()


def test_nothing_is_lost_through_resizes(team: Team) -> None:
    """Protects the residual: result + residual is the mean + the residual before, over 4, 3, 2, 1 and 4 ranks, at a
    length that no number of ranks divides. Dropped at resizes instead, what is missing shows."""
    for missing, kept in team.run(_sums, 1003, [4, 3, 2, 1, 4], True):
        assert missing > 0.1
        assert kept < 1e-5
    assert all(kept > 0.1 for _, kept in team.run(_sums, 1003, [4, 3, 2, 1, 4], False))


# -- the optimizer ----------------------------------------------------------------------------------------------------


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def _gradients(model: torch.nn.Module, step: int, share: slice, scale: float) -> list[torch.Tensor]:
    """The gradients of a share of the step's 8 samples; input 0 is constantly zero, as a black pixel."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x[:, 0] = 0
    y = x.square().sum(1, keepdim=True)
    loss = mse_loss(model(x[share]), y[share]) * scale
    return list(torch.autograd.grad(loss, list(model.parameters())))


SHARES = (slice(0, 4), slice(4, 6), slice(6, 7), slice(7, 8))
HYPER: dict[str, Any] = {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.01}


def _train(group: Group, warm: int, steps: int) -> list[torch.Tensor]:
    """The parameters after so many steps over uneven shares."""
    model = _model()
    optimizer = CompressedLamb(model.parameters(), OneBitMean(), warmup_steps=warm, **HYPER)
    share = SHARES[group.rank]
    weight = (share.stop - share.start) * group.world / 8
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), _gradients(model, step, share, weight), strict=True):
            if not optimizer.frozen:
                dist.all_reduce(gradient)
                gradient /= group.world
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _reference(warm: int, steps: int) -> list[torch.Tensor]:
    """The same by the paper's formulas, all ranks in one process, one element list a tensor."""
    model, beta1, beta2, lr, eps, decay = _model(), 0.9, 0.999, HYPER["lr"], HYPER["eps"], HYPER["weight_decay"]
    x = list(model.parameters())
    zeros = [torch.zeros_like(p) for p in x]
    m, v = [z.clone() for z in zeros], [z.clone() for z in zeros]
    trust = [1.0] * len(x)
    n = sum(p.numel() for p in x)
    each = 8 * -(-n // (8 * WORLD))
    padded = each * WORLD
    e_w, e_s = (
        [torch.zeros(padded, dtype=torch.float64) for _ in range(WORLD)],
        torch.zeros(padded, dtype=torch.float64),
    )
    chunks = [slice(i * each, min((i + 1) * each, n)) for i in range(WORLD)]

    def signs(z: torch.Tensor, used: int) -> torch.Tensor:
        size = z.norm() / used**0.5
        return torch.where(z >= 0, size, -size)

    for step in range(steps):
        per_rank = [_gradients(model, step, s, (s.stop - s.start) * WORLD / 8) for s in SHARES]
        if step < warm:
            for i, p in enumerate(x):
                g = sum(own[i] for own in per_rank) / WORLD
                m[i], v[i] = beta1 * m[i] + (1 - beta1) * g, beta2 * v[i] + (1 - beta2) * g * g
                update = m[i] / (v[i].sqrt() + eps) + decay * p.detach()
                c = min(max(float(p.detach().norm() / update.norm()), 0.01), 10.0)
                trust[i] = c if step == 0 else 0.9 * trust[i] + 0.1 * c
                p.data -= lr * c * update
            rms = [float(one.norm()) / one.numel() ** 0.5 for one in m]
            scale = [sum(rms) / len(rms) / one for one in rms]
            fresh, factor = [one.clone() for one in v], [1.0] * len(x)
            continue
        sent = []
        for rank, own in enumerate(per_rank):
            z = torch.zeros(padded, dtype=torch.float64)
            z[:n] = torch.cat([(scale[i] * (beta1 * m[i] + (1 - beta1) * own[i])).flatten() for i in range(len(x))])
            z[:n] += e_w[rank][:n]
            sent.append(signs(z[:n], n))
            e_w[rank][:n] = z[:n] - sent[-1]
        mean = torch.zeros(n, dtype=torch.float64)
        for chunk in chunks:
            y = torch.stack([s[chunk] for s in sent]).mean(0) + e_s[chunk]
            mean[chunk] = signs(y, y.numel())
            e_s[chunk] = y - mean[chunk]
        start = 0
        for i, p in enumerate(x):
            here = slice(start, start + p.numel())
            start += p.numel()
            mask = (v[i] > 0).double()
            for rank in range(WORLD):
                e_w[rank][here] *= mask.flatten()
            old, m[i] = m[i], mean[here].view_as(p) / scale[i] * mask
            g = (m[i] - beta1 * old) / (1 - beta1)
            fresh[i] = beta2 * fresh[i] + (1 - beta2) * g * g
            before = m[i] / (v[i].sqrt() + eps)
            update = before + decay * p.detach()
            f = float(((v[i].sqrt() + eps) / (fresh[i].sqrt() + eps)).max())
            r = min(1.0, float(before.norm() / update.norm()))
            f = min(max(f * r + 1 - r, 0.5), 4.0)
            factor[i] = min(max(f, factor[i] * 0.9), factor[i] * 1.1)
            p.data -= lr * trust[i] * factor[i] * update
    return [p.detach() for p in x]


def test_equals_the_formulas_in_both_phases(team: Team) -> None:
    """Protects the algorithm, over uneven local batches: all ranks end where the formulas do, in double precision."""
    wanted, begun = _reference(6, 18), [p.detach() for p in _model().parameters()]
    for found in team.run(_train, 6, 18):
        for one, other, first in zip(found, wanted, begun, strict=True):
            assert (one - other).abs().max() < 1e-11
            assert (one - first).abs().max() > 1e-4


def test_never_moves_what_has_no_gradient(team: Team) -> None:
    """Protects from the trap of signs, which cannot say zero: a constantly zero gradient, of a black pixel say, would
    get momentum over a variance of nothing."""
    first = next(_model().parameters()).detach()
    weight = team.run(_train_without_decay, 6, 18)[0]
    assert torch.equal(weight[:, 0], first[:, 0])
    assert (weight[:, 1:] - first[:, 1:]).abs().min() > 0


def _train_without_decay(group: Group, warm: int, steps: int) -> torch.Tensor:
    HYPER["weight_decay"] = 0.0
    try:
        return _train(group, warm, steps)[0]
    finally:
        HYPER["weight_decay"] = 0.01


def test_restart_releases_the_variance_and_what_was_kept_back(team: Team) -> None:
    """Protects a change of the batch: after it the variance moves again, and the momentum has what was kept back."""
    for before, after, frozen, moved in team.run(_restarted):
        assert not frozen
        assert moved
        assert (after - before).abs().max() < 1e-12


def _restarted(group: Group) -> tuple[torch.Tensor, torch.Tensor, bool, bool]:
    """What the next step's momentum would be before and after, beside the new gradient; whether the variance moves."""
    model = _model()
    optimizer = CompressedLamb(model.parameters(), OneBitMean(), warmup_steps=3, **HYPER)
    for step in range(9):
        for parameter, gradient in zip(model.parameters(), _gradients(model, step, slice(0, 8), 1.0), strict=True):
            parameter.grad = gradient
        optimizer.step()
    states = list(optimizer.state.values())
    optimizer.settle()
    mask = torch.cat([(s["exp_avg_sq"] > 0).flatten() for s in states])
    before = torch.cat([(0.9 * s["exp_avg"] + s["residual"] / s["scale"]).flatten() for s in states]) * mask
    optimizer.restart(16)
    after = torch.cat([0.9 * s["exp_avg"].flatten() for s in states])
    variance = states[0]["exp_avg_sq"].clone()
    optimizer.step()
    return before, after, optimizer.frozen, not torch.equal(variance, states[0]["exp_avg_sq"])


def test_what_cannot_be_trained_is_refused_with_what_to_do() -> None:
    mean = OneBitMean()
    with pytest.raises(ValueError, match="float32"):
        CompressedLamb([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], mean, lr=0.1, warmup_steps=1)
    with pytest.raises(ValueError, match="lr=-1"):
        CompressedLamb([torch.nn.Parameter(torch.zeros(2))], mean, lr=-1, warmup_steps=1)
    optimizer = CompressedLamb([torch.nn.Parameter(torch.zeros(2))], mean, lr=0.1, warmup_steps=1)
    with pytest.raises(RuntimeError, match="bfloat16"):
        optimizer.grad_scale = torch.ones(())
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_first_gradient_after_the_warm_up_is_refused(team: Team) -> None:
    """Protects from layers that would silently never train."""
    assert team.run(_late) == ["onebit_lamb: 1 parameters (one of shape (3,))"] * WORLD


def _late(group: Group) -> str:
    early, late = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = CompressedLamb([early, late], OneBitMean(), lr=0.1, warmup_steps=2)
    try:
        for step in range(4):
            early.grad = torch.ones(2)
            late.grad = torch.ones(3) if step == 3 else None
            optimizer.step()
    except ValueError as error:
        return str(error).split(" got their")[0]
    return "it trained"
