"""The row of Optimus-2D: a model on meshes of ranks."""

from __future__ import annotations

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from ones_wrapper.group import Group
from ones_wrapper.protocol import Spec
from tests.wrapper.layouts.dense import Dense, Meshed, in_double, texts
from tests.wrapper.steps import passes_of
from tests.wrapper.strategies import script
from tests.wrapper.strategies.optimus_script import BATCH, EPOCHS, SAMPLES, SEED, data, optimizer_of, optimus
from tests.wrapper.strategies.rows import HERE, Row
from tests.wrapper.traffic import Traffic

SPEC = Spec(16, 16, 16, 0, 1)


def expected(group: Group) -> list[float]:
    """The dense model in one process, without the wrapper."""
    model, pieces = in_double(Dense), data().tensors[0]
    optimizer = optimizer_of(model)
    for chosen in script.steps(SAMPLES, BATCH, EPOCHS, SEED):
        text = pieces[torch.from_numpy(chosen)]
        optimizer.zero_grad()
        cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    return script.flat(model.parameters())


def measure(group: Group) -> dict[str, float]:
    """What the optimizer's step leaves, how the largest memory of a step (as torch tracks it) grows with its samples,
    and what a step of the base batch sends."""
    its = optimus()
    its.bind(group)
    mesh = its.mesh
    exchange = its.exchange(group, None)
    model = exchange.wrap(in_double(lambda: Meshed(mesh)))
    optimizer = optimizer_of(model)
    few = SPEC.base_batch // mesh.replicas

    def step(samples: int) -> None:
        rows = mesh.rows(texts(samples, 0))
        optimizer.zero_grad()
        (part,) = passes_of([[samples]] * mesh.replicas, mesh.replica, 0)
        with exchange.during(part):
            its.cross_entropy(model(rows[:, :-1]), rows[:, 1:]).backward()
        optimizer.step()

    def most(samples: int) -> int:
        """The least of three: a message that ends late holds its blocks longer."""
        found: list[int] = []
        for _ in range(3):
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                step(samples)
            found.append(tracker.get_tracker_snapshot("peak")[group.device]["Total"])
        return min(found)

    step(few)
    with Traffic() as sent:
        step(few)
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    found = {
        "fixed_bytes": sum(one.to_local().nbytes for one in held if isinstance(one, DTensor)),
        "sample_bytes": (most(128) - most(64)) / 64,  # so many that nothing else counts
    }
    return found | ({"data_bytes": sent.bytes} if mesh.replicas > 1 else {"replica_bytes": sent.bytes / few})


ROW = Row(
    optimus,
    HERE / "optimus_script.py",
    SAMPLES,
    EPOCHS,
    expected,
    measure=measure,
    measured_at=(2, 4),
    spec=SPEC,
    within={"sample_bytes": 0.10},  # 3 % on its own; all three messages may end late on a busy machine
)
