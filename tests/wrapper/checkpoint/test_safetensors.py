"""Tensor files: those of the safetensors library, and no header is believed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load

from ones_wrapper.checkpoint import Checkpoints, PartReader, SavedState
from ones_wrapper.checkpoint.files import write_tensors
from ones_wrapper.checkpoint.safetensors import DTYPES, TensorPart, decode, encode, whole
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.files.checksums import checksum
from ones_wrapper.group import Group, RankError
from tests.wrapper.checkpoint.test_checkpoints import group, state, step
from tests.wrapper.checkpoint_ranks import Net, make, train
from tests.wrapper.checkpoint_ranks import whole as gathered
from tests.wrapper.forked import Team

pytestmark = pytest.mark.slow

__all__ = ["group"]

ONE = "tensors-00000.safetensors"


def test_the_library_opens_whole_tensors(tmp_path: Path, group: Group) -> None:
    """Protects researchers' tools: each parameter and each quantity of the optimizer by its path, nothing else."""
    saved = state(1.0, width=300)
    saved.model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    step(saved)
    folder = tmp_path / "checkpoints" / Checkpoints(tmp_path, group, 7, 0).save(saved, TrainingProgress(step=1)).name
    found = safetensors.torch.load_file(folder / ONE)
    expected = {f"model.{name}": value for name, value in saved.model.state_dict().items()}
    for (name, _), entry in zip(saved.model.named_parameters(), saved.optimizers[""].state.values(), strict=True):
        expected |= {f"optimizer.state.{name}.{quantity}": value for quantity, value in entry.items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


def save(group: Group, job: Path, layout: str) -> dict[str, Any]:
    saved = make(layout, group, seed=1)
    train(saved, 2)
    with closing(Checkpoints(job, group, 7, 0)) as box:
        box.save(saved, TrainingProgress(step=2))
    return gathered(saved)


@pytest.fixture(scope="module")
def sharded(teams: dict[int, Team], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a model over three ranks, and what the model held."""
    job = tmp_path_factory.mktemp("sharded")
    expected = teams[3].run(save, job, "fsdp")[0]
    return job / "checkpoints" / "step-000000002", expected


def test_torch_opens_it_by_itself(sharded: tuple[Path, dict[str, Any]]) -> None:
    """Protects the format from being ours alone: torch's own reader of safetensors files, none of our code, puts three
    ranks' blocks together, of parameters, buffers and the optimizer's state."""
    folder, expected = sharded
    tensors = {f"model.{name}": value for name, value in Net().state_dict().items()}
    moment = torch.full((7, 5), -1.0)
    reader = HuggingFaceStorageReader(str(folder))
    dcp_load({**tensors, "optimizer.state.a.weight.exp_avg": moment}, storage_reader=reader, no_dist=True)
    for name, value in {**tensors, "model.a.weight/exp_avg": moment}.items():
        assert np.array_equal(value.numpy(), expected[name.removeprefix("model.")]), name
    blocks = [part for path in folder.glob("*.safetensors") for part, _ in decode(path)]
    assert [part.path for part in blocks].count("model.a.weight") > 1


def test_a_checkpoint_becomes_one_file_of_the_model(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Protects the way out that the decision describes: torch.distributed.checkpoint's own load, on no ranks."""
    folder, expected = sharded
    reader = PartReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(entry.size, -1, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in saved.items()
        if key.startswith("model.")
    }
    dcp_load(tensors, storage_reader=reader, no_dist=True)
    model = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    safetensors.torch.save_file(model, tmp_path / "model.safetensors")
    for key, tensor in safetensors.torch.load_file(tmp_path / "model.safetensors").items():
        assert np.array_equal(tensor.numpy(), expected[key]), key
    assert set(model) == set(Net().state_dict())


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
dtypes = st.sampled_from(list(DTYPES))
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).map("model.{}".format)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(names, shapes, dtypes), max_size=6, unique_by=lambda item: item[0]))
def test_every_dtype_and_shape_there_and_back(
    tmp_path: Path, made: list[tuple[str, tuple[int, ...], torch.dtype]]
) -> None:
    """Protects the bytes: what we write the library reads, what it writes we read, and the checksum is the file's."""
    made = sorted(made, key=lambda item: -item[2].itemsize)
    values = {
        name: torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
        for name, shape, dtype in made
    }
    parts = [TensorPart(name, (0,) * len(shape), shape, dtype) for name, shape, dtype in made]
    file = tmp_path / ONE
    file.unlink(missing_ok=True)
    assert write_tensors(file, encode(parts), list(values.values())) == checksum(file)
    found = safetensors.torch.load_file(file)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].contiguous().reshape(-1).view(torch.uint8).tolist() == (
            value.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    other = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(values, other)
    for path in (file, other):
        assert sorted(map(repr, parts)) == sorted(repr(part) for part, _ in decode(path))
    assert all(start % part.dtype.itemsize == 0 for part, start in decode(file))


def bare(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def block_of(info: Any, shape: list[int]) -> bytes:
    return bare({"__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)}, "w": entry(shape=shape)})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"abc", "a header of"),
        (bare({"w": entry()}, length=2**63), "a header of 9223372036854775808 bytes"),
        (bare({"w": entry()}, length=90_000_000), "a header of 90000000 bytes in a file of"),
        (bare(b"{"), "Expecting property name"),
        (bare(b"\xff\xfe\x00"), "utf|decode"),
        (bare(b"[" * 500_000), "recursion|depth|Expecting"),
        (bare([1]), "no JSON object"),
        (bare({"w": 1}), "has not dtype"),
        (bare({"w": entry(dtype="F128")}), "unknown dtype 'F128'"),
        (bare({"w": entry(dtype=["F32"])}), "unknown dtype"),
        (bare({"w": entry(shape=[-2])}), "whole numbers"),
        (bare({"w": entry(shape=[2.0])}), "whole numbers"),
        (bare({"w": entry(shape=[True, 2])}), "whole numbers"),
        (bare({"w": entry(shape=[10**9])}), "4000000000 bytes by shape"),
        (bare({"w": entry(-8, 0)}), "whole numbers"),
        (bare({"w": entry(8, 16)}), "bytes 0 to 8 belong to no"),
        (bare({"w": entry(), "v": entry()}), "bytes 0 to 8 belong to two"),
        (bare({"w": entry(), "v": entry(4, 12)}), "bytes 4 to 8 belong to two"),
        (bare({"w": entry(), "v": entry(12, 20)}), "bytes 8 to 12 belong to no"),
        (bare({"w": entry(0, 4, [1])}), "take 4 bytes, and 8 are there"),
        (bare({"w": entry()}, data=bytes(7)), "take 8 bytes, and 7 are there"),
        (bare({"__metadata__": 3, "w": entry()}), "__metadata__ is not"),
        (bare({"__metadata__": {"DCP_SHARDING_INFO": 3}, "w": entry()}), "__metadata__ is not"),
        (bare({"__metadata__": {"DCP_SHARDING_INFO": "{"}, "w": entry()}), "Expecting property name"),
        (block_of({"w": 3}, [2]), "__metadata__ is not"),
        (block_of({"w": {}}, [2]), "whole numbers"),
        (block_of({"w": {"saved_offsets": "2"}}, [2]), "whole numbers"),
        (block_of({"w": {"saved_offsets": [-1]}}, [2]), "whole numbers"),
        (block_of({"w": {"saved_offsets": [1, 1]}}, [2]), "begins at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes, named: str) -> None:
    """Protects from headers of any content: one clear error, before any memory is taken on their word."""
    file = tmp_path / ONE
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{ONE} is no sound safetensors file: .*({named})"):
        decode(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.integers(0, 3))
def test_no_change_to_a_header_leads_out_of_the_file(tmp_path: Path, where: int, change: bytes, cut: int) -> None:
    """Protects: whatever is changed, it is refused by ValueError, or all tensors lie within the file."""
    parts = [TensorPart("w", (2, 0), (2, 2), torch.float32), TensorPart("v", (0,), (3,), torch.int8)]
    content = encode(parts)
    where %= len(content)
    content = content[:where] + change + content[where + len(change) :]
    file = tmp_path / ONE
    file.write_bytes(content + bytes(19 - cut))
    try:
        found = decode(file)
    except ValueError:
        return
    assert all(start >= 0 and start + part.bytes <= file.stat().st_size for part, start in found)
    assert sum(part.bytes for part, _ in found) <= 19


def block(offsets: tuple[int, int], shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> TensorPart:
    return TensorPart("w", offsets, shape, dtype)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([block((0, 0), (4, 4))], ""),
        ([block((0, 0), (2, 4)), block((2, 0), (2, 4))], ""),
        ([block((2, 2), (2, 2)), block((0, 0), (2, 2)), block((2, 0), (2, 2)), block((0, 2), (2, 2))], ""),
        ([block((0, 0), (3, 2)), block((0, 2), (1, 2)), block((1, 2), (3, 2)), block((3, 0), (1, 2))], ""),
        ([block((2, 0), (2, 4))], "only in part"),
        ([block((0, 0), (2, 2)), block((2, 2), (2, 2))], "only in part"),
        ([block((0, 0), (2, 4)), block((1, 0), (2, 4))], "twice"),
        ([block((0, 0), (4, 4)), block((0, 0), (4, 4))], "twice"),
        ([block((0, 0), (4, 2)), block((1, 1), (2, 2)), block((0, 3), (4, 1))], "twice"),
        ([block((0, 0), (2, 4)), block((2, 0), (2, 4), torch.float64)], "two dtypes"),
    ],
)
def test_parts_make_up_the_whole(parts: list[TensorPart], named: str) -> None:
    """Protects from elements that silently stay as they were initialised, because no part has them."""
    for order in (parts, parts[::-1]):
        if named:
            with pytest.raises(ValueError, match=f"w is .*{named}"):
                whole(order)
        else:
            assert whole(order) == (4, 4)


class Wide(torch.nn.Module):
    """A parameter of a dtype that few use."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex128))


def test_what_the_files_cannot_hold_is_refused_at_the_start(tmp_path: Path, group: Group) -> None:
    """Protects hours of training: said when it is registered, and not at the first checkpoint."""
    model = Wide()
    with pytest.raises(RankError, match=r"model\.w is of torch\.complex128, which safetensors files cannot hold"):
        Checkpoints(tmp_path, group, 7, 0).load(SavedState(model, {"": torch.optim.SGD(model.parameters())}, {}))


def test_two_blocks_of_a_tensor_in_a_file_are_refused() -> None:
    """Protects from losing the first: a file has one entry by path."""
    with pytest.raises(ValueError, match="two blocks"):
        encode([block((0, 0), (1, 4)), block((2, 0), (1, 4))])
