"""Environment variables that ranks have unless the user says otherwise. Needs only the standard library, before any
import."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

Env = Mapping[str, str]

CARDS = Path("/dev/nvidia[0-9]*")
"""Device files of GPUs."""


def _always(value: str) -> Callable[[Env], str | None]:
    return lambda env: value


def _in_blocks(value: str) -> Callable[[Env], str | None]:
    return lambda env: value if env.get("ONES_BLOCKS") == "1" else None


def _host_of_block(env: Env) -> str | None:
    """A name of this block on this node, if the node has cards that its processes may not open."""
    if env.get("ONES_BLOCKS") != "1" or not hidden_cards():
        return None
    return f"{os.uname().nodename}-{env.get('SLURM_ARRAY_JOB_ID', '')}-{env.get('SLURM_ARRAY_TASK_ID', '')}"


def hidden_cards(cards: Path = CARDS) -> list[Path]:
    """Device files of GPUs that a cgroup keeps this process from (ConstrainDevices)."""
    return [path for path in sorted(cards.parent.glob(cards.name)) if not _opens(path)]


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:  # what a device cgroup answers; other errors say that the card is broken
        return False
    except OSError:
        return True
    return True


def _interface(env: Env) -> str | None:
    return env.get("ONES_SOCKET_IFNAME") or None


DEFAULTS: dict[str, Callable[[Env], str | None]] = {
    "OMP_NUM_THREADS": _always("1"),
    "GLOO_ENABLE_STORE_V2_API": _always("1"),
    "RES_OPTIONS": _always("timeout:1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": _always("1"),
    "CUDA_DEVICE_ORDER": _always("PCI_BUS_ID"),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": _always("0"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _in_blocks("0"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _in_blocks("0"),
    "NCCL_HOSTID": _host_of_block,
    "GLOO_SOCKET_IFNAME": _interface,
    "NCCL_SOCKET_IFNAME": _interface,
}
"""Value of each variable in this process, or None for no default; docs/gpu.md says why each is set."""


def set_defaults(env: MutableMapping[str, str]) -> None:
    """Set what the user left open."""
    for name, value_in in DEFAULTS.items():
        if name not in env and (value := value_in(env)) is not None:
            env[name] = value
