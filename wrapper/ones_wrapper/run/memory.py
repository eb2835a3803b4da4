"""Largest local batch that a GPU holds, as found by running out of memory.

A pass that runs out of memory ends the run: afterwards the ranks are at different points, and the GPU's memory is
fragmented. Half of the size that failed is written to the job's directory. The ranks start again from the last
checkpoint, with passes of at most this half.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from ones_wrapper.files.job_directory import MEMORY
from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.process.exit_codes import OUT_OF_MEMORY
from ones_wrapper.process.log import log
from ones_wrapper.protocol.fields import value_of

MOST_BYTES = 4096

_OUT_OF_MEMORY = re.compile(
    r"(?<!shared )\bout of memory\b|DefaultCPUAllocator: (can't allocate|not enough) memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Failed to CUDA (calloc|malloc)",
    re.IGNORECASE,
)


class DoesNotFitError(RuntimeError):
    """Error: even one sample per pass does not fit. The message names the device, and what may help."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error due to lack of memory; a smaller local batch might avoid it. It is torch's own error, or
    a RuntimeError of CUDA, its libraries or the CPU's allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def device_name(device: torch.device) -> str:
    """Return the device's model and memory. Devices that hold different batches have different names; a MIG slice has
    less memory than its GPU."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory >> 20} MiB"


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory; 0 if unknown. `ONES_MEMORY_BYTES` sets another number, for tests."""
    if emulated := os.environ.get("ONES_MEMORY_BYTES"):
        return int(emulated)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


class LargestBatch(NamedTuple):
    """Largest local batch in samples, found by trial."""

    samples: int
    gpus: int = 0
    """World size of the trial; 0 if the result is the same at any world size."""


def look_up(directory: Path, declared: int, device: str) -> LargestBatch | None:
    """Return the largest local batch that was found on a device of this name; None if there is none.

    A result counts only if the script's limit at the trial was `declared`, too. Not collective: ranks on different
    devices may get different results, and all must use the smallest.
    """
    path = directory / MEMORY
    try:
        stored = {"gpus": 0, **read_json(path, MOST_BYTES)}
        found, gpus = (value_of(name, int, stored.get(name)) for name in ("found", "gpus"))
        if not found:
            raise ValueError("found=0 is not a batch")
        alike = (stored.get("declared"), stored.get("device")) == (declared, device)
        return LargestBatch(min(found, declared), gpus) if alike else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log(f"{path} is ignored: {error}")
        return None


def remember(directory: Path, declared: int, failed_at: int, device: str, gpus: int = 0) -> int:
    """Store half of `failed_at`, the number of samples of a pass that did not fit; return the stored number.

    Any rank may call this, even several at once: the file is replaced atomically, and its number only falls. If two
    ranks write at the same moment, the larger number may remain; then one more trial fails. Raises `DoesNotFitError` if
    `failed_at` is 1, and OSError if the file cannot be written.
    """
    if failed_at <= 1:
        raise DoesNotFitError(
            f"one sample per pass does not fit into the memory of this device ({device}), so no smaller batch helps: "
            "try activation checkpointing, a smaller or sharded model (FSDP2), or another GPU"
        )
    found = look_up(directory, declared, device)
    half = failed_at // 2 if found is None or found.gpus != gpus else min(failed_at // 2, found.samples)
    write(directory, declared, LargestBatch(half, gpus), device)
    return half


def write(directory: Path, declared: int, found: LargestBatch, device: str) -> None:
    """Write a result to the job's directory. Raises OSError."""
    text = json.dumps({"declared": declared, "found": found.samples, "device": device, "gpus": found.gpus})
    replace_small(directory / MEMORY, text.encode())


def classify_error(
    error: BaseException, directory: Path, declared: int, samples: int, device: str, gpus: int = 0
) -> tuple[int, str] | None:
    """Return (exit code, message) for an error that is due to lack of memory in a pass of `samples` samples; None for
    any other error.

    The code is OUT_OF_MEMORY if a smaller size was stored, so that `ones-run` starts the ranks again. It is 1 if there
    is no smaller size, or if it could not be stored.
    """
    if not is_out_of_memory(error):
        return None
    try:
        half = remember(directory, declared, samples, device, gpus)
    except (DoesNotFitError, OSError) as why:
        return 1, f"out of memory: {why}"
    return OUT_OF_MEMORY, f"a pass of {samples} samples is too large for this device ({device}); the next takes {half}"
