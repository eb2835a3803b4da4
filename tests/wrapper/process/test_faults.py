"""Classes of errors by the texts of CUDA, NCCL, gloo and torch, and the end that each has."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ones_wrapper.launch.errors import is_consequence
from ones_wrapper.launch.restart_policy import script_failed
from ones_wrapper.membership.meeting import is_peer_lost
from ones_wrapper.process.exit_codes import DEVICE_FAILED, USAGE_ERROR
from ones_wrapper.process.faults import ConfigurationError, Fault, fault_of
from ones_wrapper.process.hooks import exit_code_of
from ones_wrapper.run.memory import is_out_of_memory

DEVICE, CONFIGURATION, PEER, SCRIPT = Fault
CODES = {DEVICE: DEVICE_FAILED, CONFIGURATION: USAGE_ERROR, PEER: 1, SCRIPT: 1}
NCCL = "NCCL error in: NCCLUtils.cpp:94, "
TEXTS = [
    ("CUDA error: uncorrectable ECC error encountered", DEVICE),
    ("CUDA error: unspecified launch failure", DEVICE),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", DEVICE),
    ("CUDA error: uncorrectable NVLink error detected during the execution", DEVICE),
    ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", DEVICE),
    ("CUDA error: no CUDA-capable device is detected", DEVICE),
    (NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nncclUnhandledCudaError: Call failed", DEVICE),
    (NCCL + "ncclUnhandledCudaError\nLast error:\nCuda failure 'uncorrectable ECC error encountered'", DEVICE),
    (NCCL + "internal error - please report this issue to the NCCL developers, ncclInternalError", DEVICE),
    ("CUDA error: peer access is not supported between these two devices", CONFIGURATION),
    (NCCL + "ncclUnhandledCudaError\nCuda failure 217 'peer access is not supported between these two'", CONFIGURATION),
    ("CUDA error: no kernel image is available for execution on the device", CONFIGURATION),
    ("The NVIDIA driver on your system is too old (found version 11040)", CONFIGURATION),
    (NCCL + "invalid usage, ncclInvalidUsage\nDuplicate GPU detected : rank 0 and rank 1", CONFIGURATION),
    ("Cannot re-initialize CUDA in forked subprocess", CONFIGURATION),
    (NCCL + "remote process exited or there was a network error, ncclRemoteError", PEER),
    (NCCL + "unhandled system error, ncclSystemError: System call (e.g. socket, malloc) failed", PEER),
    ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711", PEER),
    ("Socket Timeout", PEER),
    ("CUDA error: an illegal memory access was encountered", SCRIPT),
    ("CUDA error: device-side assert triggered", SCRIPT),
    ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", SCRIPT),
    ("Default process group has not been initialized, please make sure to call init_process_group.", SCRIPT),
]


@pytest.mark.parametrize(("text", "fault"), TEXTS)
def test_each_class_has_its_end(text: str, fault: Fault) -> None:
    """Protects jobs from ending as failed scripts for an ECC error, and from 20 starts for a card that cannot peer."""
    error = RuntimeError(text)
    assert (fault_of(error), exit_code_of(error)[0]) == (fault, CODES[fault])
    assert is_peer_lost(error) is is_consequence(error) is (fault is PEER)
    assert script_failed(CODES[fault]) is (fault is not DEVICE)
    of_torch = dist.DistBackendError(text)
    assert is_peer_lost(of_torch) is (fault in (PEER, SCRIPT)), "torch's own class tells that it is no script's"
    assert fault_of(ValueError(text)) is SCRIPT


def test_what_is_configured_wrongly_ends_with_a_sentence() -> None:
    said = "2 ranks of this node see 1 GPUs"
    assert exit_code_of(ConfigurationError(said)) == (USAGE_ERROR, f"ConfigurationError: {said}")


def test_memory_that_nccl_lacks_is_memory() -> None:
    """Protects the first all-reduce after a probe that filled the card: a smaller batch helps."""
    assert is_out_of_memory(RuntimeError(NCCL + "unhandled cuda error\nFailed to CUDA calloc 536870912 bytes"))
