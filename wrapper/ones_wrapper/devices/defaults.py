"""Environment variables that ranks have unless the user says otherwise. Standard library alone, before any import."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

Env = Mapping[str, str]

CARDS = Path("/dev/nvidia[0-9]*")
"""Device files of GPUs."""


@dataclass(frozen=True)
class Default:
    """One variable; `docs/gpu.md` has them in a table."""

    name: str
    value: Callable[[Env], str | None]
    """None for no default in this process."""
    why: str


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


DEFAULTS = (
    Default("OMP_NUM_THREADS", _always("1"), "ranks share a node's cores"),
    Default("GLOO_ENABLE_STORE_V2_API", _always("1"), "forming a gloo group costs n requests to the store, not n²"),
    Default(
        "RES_OPTIONS",
        _always("timeout:1"),
        "torch's store looks up the name of each peer and serves nobody meanwhile: a lost answer would cost 5 s",
    ),
    Default("PYTORCH_NVML_BASED_CUDA_CHECK", _always("1"), "`torch.cuda.is_available()` in a preload poisons no fork"),
    Default("CUDA_DEVICE_ORDER", _always("PCI_BUS_ID"), "card r is the same card for CUDA, NVML and Slurm"),
    Default(
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        _always("0"),
        "nonblocking communicators hang with NCCL 2.26 (pytorch#153960)",
    ),
    Default(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _in_blocks("0"),
        "heartbeats find a lost block within seconds; the watchdog's abort (134) would count as a crash",
    ),
    Default("TORCH_NCCL_DUMP_ON_TIMEOUT", _in_blocks("0"), "as above: no dump delays the next start of the ranks"),
    Default(
        "NCCL_HOSTID",
        _host_of_block,
        "two blocks on a node whose cgroups hide each other's cards must not choose P2P between them",
    ),
    Default("GLOO_SOCKET_IFNAME", _interface, "agreements go by the interface that the user named for all"),
    Default("NCCL_SOCKET_IFNAME", _interface, "as above, if NCCL has no InfiniBand"),
)


def set_defaults(env: MutableMapping[str, str]) -> None:
    """Set what the user left open."""
    for default in DEFAULTS:
        if default.name not in env and (value := default.value(env)) is not None:
            env[default.name] = value
