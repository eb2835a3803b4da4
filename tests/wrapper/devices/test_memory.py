"""Memory for copies to and from a GPU, and what is left to NCCL: a stub stands for the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ones_wrapper.devices import host_memory, room
from ones_wrapper.devices.host_memory import Arena, bytes_of, fill
from ones_wrapper.devices.room import RESERVE, make_room, reserve_bytes, reserved

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Driver:
    """Page-locks memory, or refuses to."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:  # noqa: N802
        self.locked |= {} if self.code else {at: size}
        return self.code

    def cudaHostUnregister(self, at: int) -> int:  # noqa: N802
        del self.locked[at]
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_just_the_size_is_locked_and_given_back(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own buffers round up to a power of two, and stay."""
    driver = Driver(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tensors = [torch.randn(5, 3).double(), torch.randn(()), torch.randn(0, 2), torch.ones(7, dtype=torch.bool)]
    for _ in range(3):
        arena = Arena(tensors, GPU)
        assert sum(driver.locked.values()) == (0 if code else 5 * 3 * 8 + 4 + 7)
        for copy, tensor in zip(arena.copies, tensors, strict=True):
            assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
            copy.copy_(tensor)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(arena.copies, tensors, strict=True))
        arena.free()
        assert not driver.locked
    assert not Arena([], GPU).copies and len(Arena(tensors, CPU).copies) == 4 and not driver.locked


def test_a_row_of_bytes_is_filled_where_it_is() -> None:
    """No copy lies between on a CPU."""
    tensor = torch.zeros(3, dtype=torch.int32)

    def read(left: memoryview) -> None:
        left[:] = bytes(range(len(left)))

    fill(bytes_of(tensor), read)
    assert bytes(bytes_of(tensor).tolist()) == bytes(range(12))
    fill(bytes_of(torch.zeros(0)), read)


class Second:
    """Emulates a row on the second card: a copy ends when an event is waited for that was recorded on that card."""

    def __init__(self) -> None:
        self.device, self.size = torch.device("cuda", 1), 4 * 3
        self.current, self.under_way, self.got = 0, list[tuple[slice, torch.Tensor]](), bytearray(self.size)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Any:
        row, stop = self, min(part.stop, self.size)

        class Part:
            def __len__(self) -> int:
                return stop - part.start

            def copy_(self, chunk: torch.Tensor, non_blocking: bool) -> None:
                row.under_way.append((slice(part.start, stop), chunk))

        return Part()

    def event(self) -> Any:
        row = self

        class Event:
            device: int | None = None

            def record(self) -> None:
                self.device = row.current

            def synchronize(self) -> None:
                if self.device == row.device.index:
                    row.arrive()

        return Event()

    def arrive(self) -> None:
        """The copies under way read what their chunks hold now."""
        for where, chunk in self.under_way:
            self.got[where] = bytes(chunk.tolist())
        self.under_way.clear()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


def test_a_thread_fills_a_row_on_the_second_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA begins each thread on the first card, whose events end before the copies."""
    row, empty, given = Second(), torch.empty, iter(range(12))
    monkeypatch.setattr(host_memory, "CHUNK", 4)
    monkeypatch.setattr(host_memory.torch, "empty", lambda size, dtype, pin_memory: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", row.event)
    monkeypatch.setattr(torch.cuda, "device", row.on)

    def read(left: memoryview) -> None:
        left[:] = bytes(next(given) for _ in left)

    fill(row, read)  # type: ignore[arg-type]
    row.arrive()
    assert bytes(row.got) == bytes(range(12))


@pytest.mark.parametrize(
    ("env", "size"),
    [({}, RESERVE), ({"ONES_BLOCKS": "1"}, 2 * RESERVE), ({"ONES_BLOCKS": "1", "ONES_RESERVE_BYTES": "5"}, 5),
     ({"ONES_RESERVE_BYTES": "x"}, RESERVE), ({"ONES_RESERVE_BYTES": "-1"}, 0)],
)  # fmt: skip
def test_what_is_left_to_nccl(env: dict[str, str], size: int) -> None:
    """A change needs a second communicator."""
    assert reserve_bytes(env) == size


@pytest.mark.parametrize(
    ("device", "world", "blocks", "held"),
    [(GPU, 2, "", True), (GPU, 1, "", False), (GPU, 1, "1", True), (CPU, 2, "1", False)],
)
def test_a_probe_leaves_it(
    device: torch.device, world: int, blocks: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first collective comes after the probe, and a single block may grow."""
    sizes: list[int] = []
    empty: Callable[..., Any] = torch.empty
    monkeypatch.setenv("ONES_BLOCKS", blocks)
    monkeypatch.setenv("ONES_RESERVE_BYTES", "40")
    monkeypatch.setattr(room.torch, "empty", lambda size, **_: sizes.append(size) or empty(size))
    with reserved(device, world):
        assert sizes == [40] * held


@pytest.mark.parametrize(("device", "free", "emptied"), [(GPU, 19, 1), (GPU, 20, 0), (CPU, 0, 0)])
def test_what_torch_keeps_is_given_back(
    device: torch.device, free: int, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a change ends with 'Failed to CUDA calloc': torch's cache holds what training no longer needs."""
    calls: list[int] = []
    monkeypatch.setenv("ONES_RESERVE_BYTES", "40")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    make_room(device)
    assert len(calls) == emptied
