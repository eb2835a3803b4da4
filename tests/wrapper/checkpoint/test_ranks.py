"""Checkpoints on real ranks: other world sizes, both layouts, behind the training, killed at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from ones_wrapper.checkpoint import Checkpoints, Failed, Saved
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import Group, RankError
from tests.marks import NIGHTLY, nightly
from tests.wrapper.checkpoint_ranks import make, start, train, whole
from tests.wrapper.forked import Team

pytestmark = pytest.mark.slow


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both hold the same, to the last bit."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert np.array_equal(value, other[key]) if isinstance(value, np.ndarray) else value == other[key], key


def save(group: Group, job: Path, layout: str, steps: int, behind: bool) -> dict[str, Any]:
    state = make(layout, group, seed=1)
    box = Checkpoints(job, group, 7, 0)
    train(state, steps)
    if group.world > 1 and layout == "ddp":
        state.model.module.norm.running_mean.add_(group.rank)  # type: ignore[operator, union-attr]
    kept = whole(state)
    progress = TrainingProgress(step=steps, epoch=2, noise=1.5, world=group.world)
    if behind:
        box.begin(state, progress)
        train(state, 2, steps)  # must not reach the checkpoint
        box.close()
        end = box.ended()
        assert isinstance(end, Saved) and end.progress == progress and end.stall_s <= end.seconds
        assert box.ended() is None
    else:
        box.save(state, progress)
    box.close()
    return kept


def load(group: Group, job: Path, layout: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was loaded, and the same after more steps."""
    state = make(layout, group, seed=2)
    with closing(Checkpoints(job, group, 7, 1)) as box:
        found = box.load(state)
    assert found.progress.epoch == 2 and found.progress.noise == 1.5 and not found.note
    loaded = whole(state)
    train(state, steps, found.progress.step)
    return loaded, whole(state)


@pytest.mark.parametrize(
    ("wrote", "reads", "behind"),
    [
        nightly("ddp", "ddp", False),
        nightly("ddp", "ddp", True),
        nightly("fsdp", "fsdp", False),
        nightly("fsdp", "fsdp", True),
        ("ddp", "fsdp", True),
        ("fsdp", "ddp", False),
    ],
)
def test_loads_at_other_world_sizes(
    teams: dict[int, Team], tmp_path: Path, wrote: str, reads: str, behind: bool
) -> None:
    """Protects the resize: what three ranks saved two and one load, in either layout; rank 0's buffers count."""
    saved = teams[3].run(save, tmp_path, wrote, 3, behind)[0]
    for world in (2, 1):
        layout = "plain" if world == 1 and reads == "ddp" else reads
        for loaded, _ in teams[world].run(load, tmp_path, layout, 2):
            equal(saved, loaded)


class Average:
    """A moving average of a sharded model, sharded as it is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "values": self.values}

    def load_state_dict(self, state: Any, /) -> None:
        assert state["decay"] == 0.5
        self.values = state["values"]


def with_average(group: Group, job: Path, layout: str, seed: int, saves: bool) -> dict[str, Any]:
    state = make(layout, group, seed)
    average = Average(state.model)
    train(state, 1)
    state.extras["ema"] = average
    with closing(Checkpoints(job, group, 7, 0)) as box:
        if saves:
            box.save(state, TrainingProgress(step=1))
        else:
            box.load(state)
    return {
        name.removeprefix("module."): (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
        for name, value in average.values.items()
    }


def test_sharded_extras_load_at_other_world_sizes(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects moving averages of sharded models: resized as the model is, and refused where they are whole here."""
    saved = teams[3].run(with_average, tmp_path, "fsdp", 1, True)[0]
    for world in (1, 2):
        for loaded in teams[world].run(with_average, tmp_path, "fsdp", 2, False):
            equal(saved, loaded)
    with pytest.raises(AssertionError, match=r"ema\.values\.a\.weight is in the checkpoint and not here"):
        teams[2].run(with_average, tmp_path, "ddp", 2, False)


def save_untrained(group: Group, job: Path) -> dict[str, Any]:
    state = make("ddp", group, seed=1)
    with closing(Checkpoints(job, group, 7, 0)) as box:
        box.save(state, TrainingProgress(epoch=2, noise=1.5))
    train(state, 2)
    return whole(state)


def test_checkpoint_before_the_first_step(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects Adam's step count: neither saving nor loading takes a step of its own."""
    saved = teams[2].run(save_untrained, tmp_path)[0]
    equal(saved, teams[2].run(load, tmp_path, "ddp", 2)[0][1])


def finished(box: Checkpoints) -> Saved | Failed:
    while (end := box.ended()) is None:
        time.sleep(0.01)
    return end


def disk_full(group: Group, job: Path) -> tuple[str, Any, str]:
    import resource

    state = make("ddp", group, seed=1)
    train(state, 1)
    box = Checkpoints(job, group, 7, 0)
    box.begin(state, TrainingProgress(step=1))  # makes the group in the background: the test's store is a file, too
    assert isinstance(finished(box), Saved)
    if group.rank == 1:  # one rank's disk takes no more than this
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        box.save(state, TrainingProgress(step=2))
    except RankError as error:
        why = str(error)
    box.begin(state, TrainingProgress(step=3))
    end = finished(box)
    train(state, 1)
    left = sorted(path.name for path in (job / "checkpoints").iterdir())
    if group.rank == 1:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    box.begin(state, TrainingProgress(step=4))
    assert isinstance(finished(box), Saved)
    box.close()
    return why, end, ",".join(left)


def test_full_disk_is_said_and_training_goes_on(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects training and the last checkpoint where one rank cannot write; the next attempt works again."""
    for why, end, left in teams[2].run(disk_full, tmp_path):
        assert "rank 1" in why and "File too large" in why
        assert isinstance(end, Failed) and end.name == "step-000000003" and "File too large" in end.why
        assert left == "step-000000001"


def another_shape(group: Group, job: Path) -> str:
    with closing(Checkpoints(job, group, 7, 1)) as box:
        try:
            box.load(make("ddp", group, 2, width=9))
        except RankError as error:
            return str(error)
    return ""


def test_another_shape_is_named_on_every_rank(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects people from pages of trace-back: the parameter and both shapes."""
    teams[2].run(save, tmp_path, "ddp", 1, False)
    for why in teams[2].run(another_shape, tmp_path):
        assert "model.a.weight is (7, 5) in the checkpoint and (9, 5) here" in why
        assert "Traceback" not in why
    assert names(tmp_path / "checkpoints") == {"step-000000001"}


def endless(group: Group, job: Path) -> None:
    """Saves without end, in front of the training and behind it in turn, the weights telling the step."""
    state = make("ddp", group, seed=1)
    train(state, 1)
    box = Checkpoints(job, group, 7, 0)
    found = box.load(state)
    if found.name and group.rank == 0:
        (job / "loaded").write_text(f"{found.progress.step} {state.model.state_dict()['module.a.bias'][0]}")
    step = found.progress.step
    while True:
        step += 1
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.fill_(step)
        if step % 2:
            box.save(state, TrainingProgress(step=step // 3 * 3))  # the same step again, at times
        else:
            box.begin(state, TrainingProgress(step=step))
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.fill_(-1)


def verify(group: Group, job: Path) -> tuple[list[str], int, float]:
    """All names without a dot that do not verify; step and weight of what loads."""
    from ones_wrapper.checkpoint.folder import Folder
    from ones_wrapper.files.checksums import damage

    folder = Folder(job, 7, 0, 2)
    bad = [f"{name}: {why}" for name in folder.names() for why in [damage(folder.path(name))] if why]
    state = make("plain", group, seed=2)
    with closing(Checkpoints(job, group, 7, 1)) as box:
        found = box.load(state)
    return bad, found.progress.step, float(state.model.state_dict()["a.bias"][0])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step-*")}


def test_killed_at_any_moment_what_is_there_is_complete(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects the last checkpoint: no SIGKILL, of one rank or all, leaves a name without a dot that is not whole."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    before = 0
    for attempt in range(20 if NIGHTLY else 4):
        store = tmp_path / f"store-{attempt}"
        ranks = start(endless, (tmp_path,), 2, store)
        folder, begun = tmp_path / "checkpoints", time.monotonic()
        there = names(folder)
        while names(folder) == there and time.monotonic() - begun < 60:  # until this run has saved something
            time.sleep(0.01)
        time.sleep(chance.random() * 0.4)
        for process in ranks if attempt % 2 else ranks[::-1]:
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(chance.random() * 0.02)
        for process in ranks:
            process.join()
        bad, step, weight = teams[1].run(verify, tmp_path)[0]
        assert not bad, f"seed {seed}"
        assert step // 3 == int(weight) // 3 and weight > 0, f"seed {seed}: step {step} has weights {weight}"
        assert step >= before, f"seed {seed}: went back from {before} to {step}"
        before = step
    assert before > 0


def test_manifest_names_every_file(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects the verification: nothing in a checkpoint is outside its checksums, and there is a file a rank."""
    teams[2].run(save, tmp_path, "fsdp", 1, True)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) | {"manifest.json"} == {path.name for path in folder.iterdir()}
    assert {"tensors-00000.safetensors", "tensors-00001.safetensors"} <= set(manifest["files"])
    assert manifest["job_id"] == 7
    assert replace(TrainingProgress(), **manifest["progress"]) == TrainingProgress(step=1, epoch=2, noise=1.5, world=2)
