"""Four classes of errors with four ends: a device's, the configuration's, a peer's, the script's own.

CUDA's and NCCL's texts are searched first, since they name the cause. "NCCL" or "peer" by itself says little: "peer
access is not supported" is no lost peer, and an NCCL error may contain a GPU's. Texts are those of cudaGetErrorString
(CUDA 12, 13), ncclGetErrorString (NCCL 2.30) and torch 2.6 to 2.14.
"""

from __future__ import annotations

import re
from enum import Enum


class Fault(Enum):
    """Class of an error, by which the job restarts, is requeued, or ends."""

    DEVICE = "device"
    """A GPU, its driver or its links: the ranks start again, and if that fails too, the job is requeued."""
    CONFIGURATION = "configuration"
    """An error that would recur on any node: the job ends with a message."""
    PEER = "peer"
    """Other ranks are gone: a block begins again without them, and the start does not count as a retry."""
    SCRIPT = "script"
    """An error of the script's own: the job ends."""


class ConfigurationError(RuntimeError):
    """The job cannot train as it is configured; the message says why and what to do."""


_TEXTS = (
    (
        Fault.CONFIGURATION,
        r"peer access is not supported|driver version is insufficient|forward compatibility was attempted"
        r"|unsupported display driver|no kernel image is available|invalid device ordinal|Duplicate GPU detected"
        r"|Cannot re-initialize CUDA in forked|not compiled with CUDA|ncclInvalidUsage|ncclInvalidArgument"
        r"|Found no NVIDIA driver|driver on your system is too old|No backend type associated with device type",
    ),
    (
        Fault.DEVICE,
        r"uncorrectable (ECC|NVLink)|ECC error|NVLink error|unspecified launch failure|hardware stack error"
        r"|busy or unavailable|GPU is lost|fallen off the bus|system not yet initialized|no CUDA-capable device"
        r"|device kernel image is invalid|GPU requires reset|contained error|external device"
        r"|Error 802|CUDA unknown error|ncclUnhandledCudaError|unhandled cuda error|ncclInternalError|internal error - "
        r"|CUDA initialization",
    ),
    (Fault.SCRIPT, r"CUDA error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|out of memory|has not been initialized"),
    (Fault.PEER, r"gloo|nccl|process ?group|connection|broken pipe|\bpeer\b|socket"),
)
_PATTERNS = tuple((fault, re.compile(pattern, re.IGNORECASE)) for fault, pattern in _TEXTS)


def fault_in(text: str) -> Fault:
    """Return the class of an error, found by its text."""
    return next((fault for fault, pattern in _PATTERNS if pattern.search(text)), Fault.SCRIPT)


def fault_of(error: BaseException) -> Fault:
    """Return the class of an error that a script raised. Only texts of RuntimeErrors are read: torch raises no others
    for devices and peers."""
    if isinstance(error, ConfigurationError):
        return Fault.CONFIGURATION
    return fault_in(str(error)) if isinstance(error, RuntimeError) else Fault.SCRIPT
