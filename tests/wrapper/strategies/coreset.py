"""The row of coresets: the result is that of one process that chooses and weighs as CRAIG does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ones_wrapper.data.coreset import NORM_BITS, Chosen, FeaturesOf, Floats, Ints, select
from ones_wrapper.data.feed import permutation
from ones_wrapper.group import Group
from ones_wrapper.protocol import decode_spec
from tests.wrapper.runs import samples_used
from tests.wrapper.strategies import script
from tests.wrapper.strategies.coreset_script import BATCH, EPOCHS, EVERY, SEED, SHARD, SIZE, features, labels
from tests.wrapper.strategies.paired_script import SAMPLES, model_and_data, optimizer_of
from tests.wrapper.strategies.rows import HERE, Row


def expected(group: Group) -> list[float]:
    """Without feed, checkpoints and resizes."""
    model, data = model_and_data()
    optimizer = optimizer_of(model)

    def features_of(members: Ints) -> Floats:
        with torch.no_grad():
            found: Floats = features(model, data[torch.from_numpy(members)]).numpy()
        return found

    chosen: Chosen | None = None
    for epoch in range(EPOCHS):
        if chosen is None or epoch % EVERY == 0:
            chosen = clearly(features_of, labels(data).numpy(), group)
        order = permutation(SIZE, SEED, epoch, True)
        for cursor in range(0, SIZE, BATCH):
            step = order[cursor : cursor + BATCH]
            inputs, target = data[torch.from_numpy(chosen.indices[step])]
            weights = torch.from_numpy(chosen.weights[step].astype(np.float32)).double()
            optimizer.zero_grad()
            (weights * (model(inputs) - target).square().flatten()).mean().backward()
            optimizer.step()
    return script.flat(model.parameters())


def clearly(features_of: FeaturesOf, classes: Ints, group: Group) -> Chosen:
    """A selection that stays the same if each feature is ten quanta off: a model's may be, by rounding."""
    rows = features_of(np.arange(len(classes)))
    ten = 10 * np.linalg.norm(rows, axis=1).max() / 2**NORM_BITS
    chosen = select(rows.__getitem__, classes, SIZE, group, SHARD)
    for seed in range(5):
        off = rows + ten * np.random.default_rng(seed).uniform(-1, 1, rows.shape)
        again = select(off.__getitem__, classes, SIZE, group, SHARD)
        np.testing.assert_array_equal(again.indices, chosen.indices)
        np.testing.assert_array_equal(again.weights, chosen.weights)
    return chosen


def once(job: Path) -> None:
    """Each epoch uses the chosen samples, the same until they are chosen anew; the companion is told their number."""
    used = samples_used(job)
    assert sorted(used) == list(range(EPOCHS))
    assert all(len(each) == SIZE and set(each.values()) == {1} for each in used.values())
    assert all(set(used[epoch]) == set(used[epoch - epoch % EVERY]) for epoch in used)
    assert len({tuple(sorted(each)) for each in used.values()}) > 1, "nothing was chosen anew"
    assert decode_spec((job / "spec.json").read_bytes()).dataset == SIZE < SAMPLES


ROW = Row(None, HERE / "coreset_script.py", SAMPLES, EPOCHS, expected, tolerance=1e-9, once=once, label="coreset")
