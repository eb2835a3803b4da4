"""What the ranks of the tests of Optimus-2D do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from ones_wrapper.checkpoint import Checkpoints, SavedState
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import Group
from ones_wrapper.strategies.optimus import modules
from ones_wrapper.strategies.optimus.costs import MeshTransformer
from ones_wrapper.strategies.optimus.exchange import MeshExchange
from ones_wrapper.strategies.optimus.mesh import Mesh
from tests.wrapper.layouts import dense as reference
from tests.wrapper.layouts.dense import texts, twins
from tests.wrapper.steps import Sizes, passes_of
from tests.wrapper.traffic import Traffic, saved_bytes
from tests.wrapper.waits import NoWaits

_meshes: dict[int, Mesh] = {}


def mesh_of(group: Group, q: int) -> Mesh:
    """The mesh of this rank; its groups are made once."""
    if q not in _meshes:
        _meshes[q] = Mesh(q, group.device)
    return _meshes[q]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((_plain(one) - _plain(other)).detach().abs().max())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_bfloat16(group: Group, q: int) -> dict[str, float]:
    """The relative errors of the loss of 1000 tokens, of its gradient and of a norm, given in bfloat16."""
    mesh, numbers = mesh_of(group, q), torch.Generator().manual_seed(4)
    whole = (3 * torch.randn(1000, 32 * q, generator=numbers) + 20).bfloat16()
    targets = torch.randint(0, 32 * q, (1000,), generator=numbers)
    dense = whole.float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(dense, targets)
    expected.backward()
    block = mesh.rows(whole).chunk(q, 1)[mesh.column].clone().requires_grad_()
    found = modules.cross_entropy(block, mesh.rows(targets), mesh)
    found.backward()
    normal = modules.LayerNorm(mesh, 32 * q)(block.detach())
    assert dense.grad is not None and block.grad is not None

    def error(mine: torch.Tensor, whole: torch.Tensor) -> float:
        its = mesh.rows(whole.detach()).chunk(q, 1)[mesh.column]
        return float((mine.detach() - its).norm() / its.norm())

    return {
        "loss": float(abs(found - expected).detach() / expected.detach()),
        "gradient": error(block.grad, dense.grad),
        "norm": error(normal, torch.nn.functional.layer_norm(whole.float(), (32 * q,))),
    }


def without_waits(group: Group, q: int) -> None:
    """Embed, normalise and judge tokens, and back."""
    mesh = mesh_of(group, q)
    layers = modules.Embedding(mesh, 8 * q, 4 * q), modules.LayerNorm(mesh, 4 * q)
    tokens = torch.arange(6 * q).view(2 * q, 3) % (8 * q)
    with NoWaits("cpu"):
        found = layers[1](layers[0](mesh.rows(tokens)))
        modules.cross_entropy(found, mesh.rows(tokens) % (4 * q), mesh).backward()


def training(group: Group, q: int, samples: int) -> dict[str, float]:
    """The largest errors of two steps of a whole model against the dense one, by what they are of."""
    mesh = mesh_of(group, q)
    dense, ours = twins(mesh)
    names = [name for name, _ in dense.named_parameters()]
    assert names == [name for name, _ in ours.named_parameters()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (dense, ours)]
    worst = dict.fromkeys(("start", "logits", "loss", "gradients", "parameters"), 0.0)

    def note(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        worst[what] = max(worst[what], apart(one, other))

    def each(what: str, of: Callable[[nn.Parameter], Any]) -> None:
        for one, other in zip(dense.parameters(), ours.parameters(), strict=True):
            note(what, of(one), of(other))

    each("start", lambda p: p)
    for step in range(2):
        text = texts(samples, step)
        text[0, 3] = modules.IGNORED if step else text[0, 3]
        tokens, targets = text[:, :-1].clamp_min(0), text[:, 1:]
        logits, blocks = dense(tokens), ours(mesh.rows(tokens))
        note("logits", logits, mesh.whole(blocks))
        losses = [
            cross_entropy(logits.flatten(0, 1), targets.flatten()),
            modules.cross_entropy(blocks, mesh.rows(targets), mesh),
        ]
        note("loss", *losses)
        for one, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            one.backward()
        each("gradients", lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
    each("parameters", lambda p: p)
    return worst


def by_autocast(group: Group, q: int) -> tuple[float, float]:
    """How far, as shares, the loss and all gradients are from the dense model's if both compute by autocast."""
    mesh = mesh_of(group, q)
    dense, ours = (model.float() for model in twins(mesh))
    text = texts(5, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(dense(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        found = modules.cross_entropy(ours(mesh.rows(text[:, :-1])), mesh.rows(text[:, 1:]), mesh)
    loss.backward()
    found.backward()
    pairs = [(_plain(one.grad), other.grad) for one, other in zip(ours.parameters(), dense.parameters(), strict=True)]  # type: ignore[arg-type]
    error = sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5  # type: ignore[operator]
    whole = sum(float(other.square().sum()) for _, other in pairs) ** 0.5  # type: ignore[union-attr]
    return apart(found, loss) / float(loss.detach()), error / whole


def tied(group: Group, q: int) -> float:
    """The largest error of a model whose output layer is its embedding."""
    mesh = mesh_of(group, q)
    dense, ours = twins(mesh)
    text = texts(2 * q, 0)
    logits = dense.token(text) @ dense.token.weight.t()
    cross_entropy(logits.flatten(0, 1), text.flatten()).backward()
    rows = mesh.rows(text)
    modules.cross_entropy(ours.token.logits(ours.token(rows)), rows, mesh).backward()
    assert dense.token.weight.grad is not None and ours.token.weight.grad is not None
    return apart(dense.token.weight.grad, ours.token.weight.grad)


def exchanged(group: Group, q: int, sizes: Sizes) -> float:
    """The largest error of the gradients of a step of unequal replicas and passes, whose models began differently."""
    mesh = mesh_of(group, q)
    dense, _ = twins(mesh)
    _, ours = twins(mesh, seed=mesh.replica)
    exchange = MeshExchange(group, mesh)
    assert exchange.wrap(ours, bucket_mb=0.01) is ours
    exchange.trying = True  # as in a probe
    rows = mesh.rows(texts(1, 0))
    modules.cross_entropy(ours(rows[:, :-1]), rows[:, 1:], mesh).backward()
    exchange.trying = False
    for turn in range(2):
        ours.zero_grad()
        dense.zero_grad()
        text = texts(sum(map(sum, sizes)), turn)
        cross_entropy(dense(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        for part in passes_of(sizes, mesh.replica, 0):
            with exchange.during(part):
                rows = mesh.rows(text[part.start : part.start + max(1, part.samples)])
                modules.cross_entropy(ours(rows[:, :-1]), rows[:, 1:], mesh).backward()
        worst = max(apart(one.grad, other.grad) for one, other in _pairs(dense, ours))
    return worst


def _pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple[Any, Any]]:
    return zip(one.parameters(), other.parameters(), strict=True)


def refused(group: Group, q: int) -> list[str]:
    """What is said of a model that has a layer of torch's own, and of an option of DistributedDataParallel's."""
    mesh = mesh_of(group, q)
    said = []
    for model, its in ((nn.Sequential(nn.Linear(2, 2)), {}), (twins(mesh)[1], {"static_graph": True})):
        try:
            MeshExchange(group, mesh).wrap(model, **its)
        except ValueError as error:
            said.append(str(error))
    return said


def unlike(group: Group, q: int) -> str:
    """What is said where the last replica made another model."""
    mesh = mesh_of(group, q)
    model = nn.Sequential(modules.Linear(mesh, 8, 8 if mesh.replica + 1 < mesh.replicas else 16))
    try:
        MeshExchange(group, mesh).wrap(model)
    except ValueError as error:
        return str(error)
    return ""


def _state(mesh: Mesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, SavedState]:
    _, ours = twins(mesh, seed)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    return ours, optimizer, SavedState(ours, {"": optimizer}, {})


def _step(mesh: Mesh, ours: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    rows = mesh.rows(texts(6, seed))
    modules.cross_entropy(ours(rows[:, :-1]), rows[:, 1:], mesh).backward()
    optimizer.step()


def _whole_state(ours: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [_plain(p).detach() for p in ours.parameters()]
    for parameter in ours.parameters():
        state = optimizer.state[parameter]
        found += [_plain(state["exp_avg"]), _plain(state["exp_avg_sq"])]
    return found


def saved(group: Group, q: int, directory: Path) -> list[torch.Tensor]:
    """Train two steps and write a checkpoint; parameters and moments."""
    mesh = mesh_of(group, q)
    ours, optimizer, state = _state(mesh, seed=0)
    for seed in range(2):
        _step(mesh, ours, optimizer, seed)
    checkpoints = Checkpoints(directory, group, 1, 0)
    checkpoints.save(state, TrainingProgress(step=2))
    checkpoints.close()
    return _whole_state(ours, optimizer) if group.rank == 0 else _whole_state(ours, optimizer)[:0]


def loaded(group: Group, q: int, directory: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and moments as they are in the checkpoint, and after one more step."""
    mesh = mesh_of(group, q)
    ours, optimizer, state = _state(mesh, seed=1)
    checkpoints = Checkpoints(directory, group, 1, 1)
    assert checkpoints.load(state).name
    there = [tensor.clone() for tensor in _whole_state(ours, optimizer)]
    _step(mesh, ours, optimizer, 2)
    checkpoints.close()
    after = _whole_state(ours, optimizer)
    return (there, after) if group.rank == 0 else ([], [])


def into_dense(group: Group, directory: Path) -> list[torch.Tensor]:
    """The parameters of an ordinary model that has loaded a checkpoint of a mesh's, in this one process."""
    model = reference.in_double(reference.Dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = Checkpoints(directory, group, 1, 1)
    assert checkpoints.load(SavedState(model, {"": optimizer}, {})).name
    checkpoints.close()
    return [p.detach() for p in model.parameters()]


def into_oblong(group: Group, shape: tuple[int, int], directory: Path) -> list[torch.Tensor]:
    """The same for a model that torch alone has cut over a mesh of this shape, with its moments."""
    mesh = init_device_mesh("cpu", shape)
    model = reference.in_double(reference.Dense)
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(1)] if whole.ndim == 2 else [Replicate(), Shard(0)]
            setattr(module, name, nn.Parameter(distribute_tensor(whole.detach(), mesh, placements)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = Checkpoints(directory, group, 1, 1)
    assert checkpoints.load(SavedState(model, {"": optimizer}, {})).name
    checkpoints.close()
    return _whole_state(model, optimizer)


def kept_bytes(group: Group, q: int, samples: int, length: int, hidden: int, heads: int) -> int:
    """Bytes that a block's forward pass keeps on this rank for the backward pass, but parameters."""
    mesh = mesh_of(group, q)
    block = modules.TransformerBlock(mesh, hidden, heads)
    x = torch.randn(len(mesh.rows(torch.empty(samples))), length, hidden // q).requires_grad_()
    plain = nn.ParameterList([p.detach().to_local() for p in block.parameters()])  # type: ignore[attr-defined]
    with saved_bytes(plain) as kept:
        block(x)
    return kept[0]


def sent_on_mesh(group: Group, q: int, samples: int, length: int, hidden: int, heads: int) -> int:
    """Bytes that this rank sends in a block's forward and backward pass."""
    mesh = mesh_of(group, q)
    block = modules.TransformerBlock(mesh, hidden, heads)
    x = torch.randn(len(mesh.rows(torch.empty(samples))), length, hidden // q).requires_grad_()
    with Traffic() as sent:
        block(x).sum().backward()
    return sent.bytes


def sent_by_megatron(group: Group, world: int, samples: int, length: int, hidden: int, heads: int) -> int:
    """The same where torch's own tensor parallelism splits the block over as many ranks in one dimension."""
    line = init_device_mesh("cpu", (group.world // world, world), mesh_dim_names=("replicas", "line"))["line"]
    block = reference.Block(hidden, heads)
    out_in = {"attention.packed": ColwiseParallel(), "attention.joined": RowwiseParallel()}
    parallelize_module(block, line, {**out_in, "mlp.wide": ColwiseParallel(), "mlp.back": RowwiseParallel()})
    x = torch.randn(samples, length, hidden).requires_grad_()
    with Traffic() as sent:
        block(x).sum().backward()
    return sent.bytes


def largest_memory(group: Group, q: int, sizes: MeshTransformer, samples: int) -> float:
    """Bytes that this rank holds at most in a step with AdamW in single precision, as torch's tracker sees it."""
    from torch.distributed._tools.mem_tracker import MemTracker  # slow to import, and the benchmark's alone

    mesh = mesh_of(group, q)
    torch.manual_seed(0)
    model = reference.Meshed(mesh, sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = MemTracker()
    for measured in (False, True):
        rows = mesh.rows(texts(samples, 0, sizes))
        if measured:
            tracker.track_external(model, optimizer)
        with tracker if measured else nullcontext():
            optimizer.zero_grad()
            modules.cross_entropy(model(rows[:, :-1]), rows[:, 1:], mesh).backward()
            optimizer.step()
    return float(tracker.get_tracker_snapshot("peak")[group.device]["Total"])
