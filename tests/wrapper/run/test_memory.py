"""The largest local batch, found by trying."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.files.job_directory import MEMORY
from ones_wrapper.group import Group
from ones_wrapper.process.exit_codes import OUT_OF_MEMORY
from ones_wrapper.run.memory import DoesNotFitError, classify_error, is_out_of_memory, look_up, remember
from tests.wrapper.forked import Team

GPU = "NVIDIA H100 80GB HBM3, 81079 MiB"


def find(directory: Path, declared: int, device: str) -> int:
    found = look_up(directory, declared, device)
    return declared if found is None else found.samples


def test_what_the_allocator_really_says_is_recognised() -> None:
    """Protects the retry on CPU nodes, with the error that torch itself raises."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("Caught RuntimeError in worker: DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("It is possible that dataloader's workers are out of shared memory."), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("the script ran out of memory cards"), False),
        (KeyboardInterrupt(), False),
    ],
)  # fmt: skip
def test_no_other_error_is_taken_for_one(error: BaseException, is_one: bool) -> None:
    """Protects jobs with another error from being tried again and again with half the batch."""
    assert is_out_of_memory(error) is is_one


def test_halved_until_one_sample_then_clearly_given_up(tmp_path: Path) -> None:
    assert find(tmp_path, 100, GPU) == 100
    sizes = [100]
    while sizes[-1] > 1:
        sizes.append(remember(tmp_path, 100, sizes[-1], GPU))
        assert find(tmp_path, 100, GPU) == sizes[-1]
    assert sizes == [100, 50, 25, 12, 6, 3, 1]
    with pytest.raises(DoesNotFitError, match=r"H100.*activation checkpointing"):
        remember(tmp_path, 100, 1, GPU)
    assert [path.name for path in tmp_path.iterdir()] == [MEMORY]


def test_counts_for_this_script_and_device_alone(tmp_path: Path) -> None:
    """Protects larger GPUs and changed scripts from what another once did not hold."""
    remember(tmp_path, 100, 100, GPU)
    assert find(tmp_path, 200, GPU) == 200
    assert find(tmp_path, 100, "NVIDIA H200, 143771 MiB") == 100
    assert find(tmp_path, 100, GPU) == 50


@given(st.lists(st.integers(2, 128), min_size=1, max_size=6))
def test_what_was_found_never_rises(tmp_path_factory: pytest.TempPathFactory, failures: list[int]) -> None:
    """Protects against going back up to a size that failed: ranks with unlike shares fail in any order."""
    directory = tmp_path_factory.mktemp("job")
    for failed in failures:
        remember(directory, 128, failed, GPU)
    assert find(directory, 128, GPU) == min(failures) // 2


def fail_often(group: Group, folder: Path) -> None:
    for _ in range(50):
        remember(folder, 64, 64, "cpu")
        assert find(folder, 64, "cpu") == 32


@pytest.mark.slow
def test_ranks_that_fail_at_once(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects the file from torn writes, and the size from being halved once for each rank."""
    teams[4].run(fail_often, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MEMORY]


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "{}", '{"found": true}', "\x00" * 50, "[" * 4000, "x" * 5000]
    + [json.dumps({"declared": 64, "found": found, "device": "cpu"}) for found in (0, -1, 1.5, "8", None, True)],
)
def test_nonsense_is_not_believed(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects the start of a run from a damaged file, and says that it is ignored."""
    (tmp_path / MEMORY).write_text(content)
    assert find(tmp_path, 64, "cpu") == 64
    assert "is ignored" in capsys.readouterr().err
    assert remember(tmp_path, 64, 64, "cpu") == 32


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    """Protects against what another user may have put there, without waiting for a pipe's other end."""
    other = tmp_path / "other"
    other.write_text(json.dumps({"declared": 64, "found": 1, "device": "cpu"}))
    (tmp_path / MEMORY).symlink_to(other)
    assert find(tmp_path, 64, "cpu") == 64
    (tmp_path / MEMORY).unlink()
    os.mkfifo(tmp_path / MEMORY)
    assert find(tmp_path, 64, "cpu") == 64


def test_found_is_bounded_by_what_is_declared(tmp_path: Path) -> None:
    (tmp_path / MEMORY).write_text(json.dumps({"declared": 64, "found": 10**9, "device": "cpu"}))
    assert find(tmp_path, 64, "cpu") == 64


def test_what_ones_run_is_told(tmp_path: Path) -> None:
    """Protects the restart: only with a smaller size written down is it asked for, and not for other errors."""
    error = torch.OutOfMemoryError("CUDA out of memory.")
    assert classify_error(ValueError("?"), tmp_path, 64, 64, GPU) is None
    assert classify_error(error, tmp_path, 64, 40, GPU) == (
        OUT_OF_MEMORY,
        f"a pass of 40 samples is too large for this device ({GPU}); the next takes 20",
    )
    code, note = classify_error(error, tmp_path, 64, 1, GPU) or (0, "")
    assert code == 1
    assert "one sample" in note
    code, note = classify_error(error, tmp_path / "missing", 64, 40, GPU) or (0, "")
    assert code == 1
    assert "No such file" in note
