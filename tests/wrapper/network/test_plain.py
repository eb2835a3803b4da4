"""Values that ranks send each other: they arrive as they were, and hold no code."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.network.frames import fields
from ones_wrapper.network.plain import decode, encode

KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner), st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_was_sent_arrives(value: Any) -> None:
    found = decode(encode(value))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_, np.uint8, np.complex64, ">i4", "<M8[s]", "U3"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    found = decode(encode([array, {"x": array}]))
    for one in (found[0], found[1]["x"]):
        assert (one.dtype, one.shape) == (array.dtype, array.shape) and (one == array).all() and one.flags.writeable
    number = decode(encode(np.ones(1, np.float32)[0]))
    assert number == 1 and type(number) is np.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = decode(encode((tensor, tensor.t() if len(shape) == 2 else tensor)))
    assert torch.equal(found[0], tensor) and found[0].dtype == dtype and found[0].shape == tensor.shape
    found[0].fill_(0)


@given(st.binary(max_size=300))
def test_any_bytes_are_plain_data_or_a_value_error(data: bytes) -> None:
    with suppress(ValueError):
        decode(data)


TREES = st.recursive(
    st.one_of(st.none(), st.integers(-3, 9), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["tuple", "dict", "bytes", "tensor", "array", "number", "dtype", "shape", "x"]), inner
        ),
    ),
    max_leaves=12,
)


TYPES = ["float32", "O", "load", "<i8", "", "nn", "S0", "V8", "(1,", "x" * 999]


@given(TREES, st.sampled_from(TYPES), st.lists(st.integers(-1, 5)))
def test_any_tree_is_plain_data_or_a_value_error(tree: Any, dtype: str, shape: list[int]) -> None:
    """Names of types lead only to types, and messages are short."""
    for one in (tree, {"tensor": 0, "dtype": dtype, "shape": shape}, {"array": 0, "dtype": dtype, "shape": shape}):
        try:
            decode(fields(json.dumps(one).encode(), b"\0" * 8))
        except ValueError as error:
            assert len(str(error)) <= 300


class Code:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was run",))


def test_code_is_neither_sent_nor_run() -> None:
    for value in (Code(), {"x": [Code()]}, {1, 2}, np.array([Code()], object), print, torch.float32):
        with pytest.raises(TypeError, match="cannot be sent"):
            encode(value)
    for data in (pickle.dumps(Code()), fields(pickle.dumps(Code()))):
        with pytest.raises(ValueError):
            decode(data)
