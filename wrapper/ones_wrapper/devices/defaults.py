"""Default environment variables of ranks; values that the user set are kept. Imports only the standard library, since
ranks import this module early."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

Env = Mapping[str, str]

CARDS = Path("/dev/nvidia[0-9]*")


def _host_of_block(env: Env) -> str | None:
    """Return a host name for this block on its node, unique if a cgroup hides GPUs from the block; else None."""
    if env.get("ONES_BLOCKS") != "1" or not hidden_cards():
        return None
    return f"{os.uname().nodename}-{env.get('SLURM_ARRAY_JOB_ID', '')}-{env.get('SLURM_ARRAY_TASK_ID', '')}"


def hidden_cards(cards: Path = CARDS) -> list[Path]:
    """Return the device files of GPUs to which a cgroup (ConstrainDevices) denies this process access."""
    return [path for path in sorted(cards.parent.glob(cards.name)) if not _opens(path)]


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:  # a device cgroup's answer; other errors mean that the card is broken
        return False
    except OSError:
        return True
    return True


def defaults(env: Env) -> dict[str, str | None]:
    """Return the default of each variable in this process; None for a variable without one. `docs/gpu.md` explains
    each."""
    in_blocks = "0" if env.get("ONES_BLOCKS") == "1" else None
    interface = env.get("ONES_SOCKET_IFNAME") or None
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_ENABLE_STORE_V2_API": "1",
        "RES_OPTIONS": "timeout:1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": in_blocks,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": in_blocks,
        "NCCL_HOSTID": _host_of_block(env),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def set_defaults(env: MutableMapping[str, str]) -> None:
    """Set the defaults of all variables that the user did not set."""
    for name, value in defaults(env).items():
        if value is not None:
            env.setdefault(name, value)
