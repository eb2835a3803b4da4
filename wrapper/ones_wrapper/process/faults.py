"""Four classes of errors with different consequences: of a device, of the configuration, of lost ranks, and of the
script.

Texts of CUDA and NCCL are searched first, since they name the cause. The words "NCCL" or "peer" prove little: "peer
access is not supported" is no lost rank, and a GPU's error may be inside an NCCL error. Texts are those of
cudaGetErrorString (CUDA 12, 13), ncclGetErrorString (NCCL 2.30) and torch 2.6 to 2.14.
"""

from __future__ import annotations

import re
from enum import Enum


class Fault(Enum):
    """Class of an error. It decides whether the ranks start again, the job is requeued, or the job ends."""

    DEVICE = "device"
    """A GPU, its driver or its links failed: the ranks start again; after another failure the job is requeued."""
    CONFIGURATION = "configuration"
    """The error would also occur on any other node: the job ends with a message."""
    PEER = "peer"
    """Other ranks were lost: a block starts again without them, and this does not count as a retry."""
    SCRIPT = "script"
    """Error of the script itself: the job ends."""


class ConfigurationError(RuntimeError):
    """Error: the job cannot train with its configuration. The message says why, and what to do."""


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
    """Return the class of an error with this text."""
    return next((fault for fault, pattern in _PATTERNS if pattern.search(text)), Fault.SCRIPT)


def fault_of(error: BaseException) -> Fault:
    """Return the class of an error that a script raised. Only the texts of RuntimeErrors are searched, because torch
    raises these for devices and lost ranks."""
    if isinstance(error, ConfigurationError):
        return Fault.CONFIGURATION
    return fault_in(str(error)) if isinstance(error, RuntimeError) else Fault.SCRIPT
