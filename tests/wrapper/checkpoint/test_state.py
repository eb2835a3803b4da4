"""State beside the tensors: kept as plain data, or refused by name."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.checkpoint import Checkpoints, SavedState
from ones_wrapper.checkpoint.state import KIND, CannotSaveError, pack, unpack
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import Group, RankError
from tests.wrapper.checkpoint.test_checkpoints import group, state

__all__ = ["group"]


def there_and_back(value: Any) -> Any:
    """Through a file that is read without running code."""
    file = io.BytesIO()
    torch.save(pack(value, "extra"), file)
    file.seek(0)
    return unpack(torch.load(file, weights_only=True), {})


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


atoms = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
keys = st.text(max_size=5) | st.integers() | st.just(KIND) | st.tuples(st.integers(), st.text(max_size=2))
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(st.text(max_size=3), max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(values)
def test_plain_data_comes_back(value: Any) -> None:
    """Protects extras: value and type come back, whatever the nesting."""
    assert same(value, there_and_back(value))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.zeros((0, 3), dtype=bool),
        np.array(["a", "bc"]),
        np.datetime64("2024-05-01"),
        np.float32(1.5),
        np.random.default_rng(3).bit_generator.state,
        np.random.RandomState(3).get_state(),
        random.Random(3).getstate(),
        torch.get_rng_state(),
        torch.ones(2, 3, dtype=torch.bfloat16),
        Counter({2: 1, 4: 3}),
        defaultdict(list, {"a": [1]}),
        bytearray(b"ab"),
        torch.float16,
        torch.Size([1, 2]),
        2**200,
        1 + 2j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_common_types_come_back(value: Any) -> None:
    """Protects what schedulers, scalers and random generators hold."""
    back = there_and_back(value)
    assert same(value, back)
    if isinstance(value, defaultdict):
        assert back.default_factory is list


class Custom:
    """Any class of a script's own."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Custom(), "Custom"),
        (lambda: 1, "function"),
        (Path("a"), "Path"),
        (np.array([Custom()]), "ndarray"),
        (type("Sub", (dict,), {})(a=1), "Sub"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
    ids=["object", "function", "path", "objects", "subclass", "sparse"],
)
def test_what_names_code_is_refused(value: Any, named: str) -> None:
    """Protects: no pickle of code; the error names where and what."""
    with pytest.raises(CannotSaveError, match=rf"scaler\.a\.1 .*{named}"):
        pack({"a": [0, value]}, "scaler")


class Extra:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any, /) -> None:
        self.value = state["value"]


def with_extra(name: str, value: Any) -> SavedState:
    made = state()
    made.extras[name] = Extra(value)
    return made


def test_state_that_cannot_be_saved_is_said_at_the_start(tmp_path: Path, group: Group) -> None:
    """Protects hours of training: refused when it is registered, and again when it only later becomes so."""
    box = Checkpoints(tmp_path, group, 7, 0)
    with pytest.raises(RankError, match=r"ema\.value is a .*Custom.* cannot hold"):
        box.load(with_extra("ema", Custom()))
    good = with_extra("ema", 1)
    box.save(good, TrainingProgress(step=1))
    good.extras["ema"].value = Custom()  # type: ignore[attr-defined]
    with pytest.raises(RankError, match=r"ema\.value"):
        box.save(good, TrainingProgress(step=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]


def test_missing_extra_is_named(tmp_path: Path, group: Group) -> None:
    """Protects from going on with half of the state."""
    box = Checkpoints(tmp_path, group, 7, 0)
    box.save(state(), TrainingProgress(step=1))
    with pytest.raises(RankError, match=r"holds no 'ema' \(besides model and optimizer it has scheduler\)"):
        box.load(with_extra("ema", 1))


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_with_code_is_not_run(tmp_path: Path, group: Group) -> None:
    """Protects whoever loads a checkpoint: even where its checksums are right, no code in it runs."""
    box = Checkpoints(tmp_path, group, 7, 0)
    folder = tmp_path / "checkpoints" / box.save(state(), TrainingProgress(step=1)).name
    manifest = folder / "manifest.json"
    for file in folder.iterdir():
        if file != manifest:
            content = file.read_bytes()
            before = len(content), _crc(content)
            evil = pickle.dumps(Evil(tmp_path / "ran")) if file.suffix != ".pt" else _zip(Evil(tmp_path / "ran"))
            file.write_bytes(evil)
            text = manifest.read_text()
            manifest.write_text(_resealed(text, file.name, before, (len(evil), _crc(evil))))
            with pytest.raises(RankError):
                box.load(state())
            file.write_bytes(content)
            manifest.write_text(text)
    assert not (tmp_path / "ran").exists()
    assert box.load(state()).name == folder.name


def _crc(content: bytes) -> int:
    import zlib

    return zlib.crc32(content)


def _zip(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _resealed(text: str, file: str, before: tuple[int, int], after: tuple[int, int]) -> str:
    import json

    manifest = json.loads(text)
    assert tuple(manifest["files"][file]) == before
    manifest["files"][file] = after
    return json.dumps(manifest)
