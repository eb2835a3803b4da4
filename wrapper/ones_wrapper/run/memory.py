"""The largest local batch that a GPU turned out to hold, found by trial.

A pass that runs out of memory ends the run: after such an error the ranks are not at the same point any more, and a
GPU's memory is in pieces. Half of the size that failed is written to the job's directory. The ranks that start again
from the last checkpoint take no more than this half per pass.
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
    """One sample per pass is already too much; the message names the device, and what may help."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a smaller local batch might have prevented this error. It is torch's own out-of-memory error, or a
    RuntimeError of CUDA, its libraries or the CPU's allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def device_name(device: torch.device) -> str:
    """Return a name that tells apart devices that hold different batches: model and memory (a MIG slice has less)."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory >> 20} MiB"


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device; 0 if it is not known. `ONES_MEMORY_BYTES` emulates another size, for tests."""
    if emulated := os.environ.get("ONES_MEMORY_BYTES"):
        return int(emulated)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


class LargestBatch(NamedTuple):
    """A largest local batch, found by trial."""

    samples: int
    gpus: int = 0
    """World size at which the batch was found; 0 if the world size makes no difference."""


def look_up(directory: Path, declared: int, device: str) -> LargestBatch | None:
    """Return the largest local batch that was found on such a device; None if there is no valid one.

    The batch counts only while the script declares the same. Not collective: unlike devices find unlike values, and the
    ranks must agree on the smallest.
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
    """Remember half of `failed_at` samples, which did not fit in a pass; return the next run's size.

    Any rank may call it, also several at once: the file is replaced atomically, and never by a larger number than
    before. (Two that write at the same moment may leave the larger value; that costs another try.) Raises
    `DoesNotFitError` at one sample, and OSError if the file cannot be written.
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
    """Write a local batch that was found. Raises OSError."""
    text = json.dumps({"declared": declared, "found": found.samples, "device": device, "gpus": found.gpus})
    replace_small(directory / MEMORY, text.encode())


def classify_error(
    error: BaseException, directory: Path, declared: int, samples: int, device: str, gpus: int = 0
) -> tuple[int, str] | None:
    """Return (exit code, message) if `error`, of a pass of `samples` samples, is due to lack of memory; else None.

    The code is OUT_OF_MEMORY once the smaller size is remembered: `ones-run` then starts the ranks again. The code is 1
    if no smaller size is left, or the size could not be written.
    """
    if not is_out_of_memory(error):
        return None
    try:
        half = remember(directory, declared, samples, device, gpus)
    except (DoesNotFitError, OSError) as why:
        return 1, f"out of memory: {why}"
    return OUT_OF_MEMORY, f"a pass of {samples} samples is too large for this device ({device}); the next takes {half}"
