"""Choice of the device on which a rank trains, and of the backend for the collectives.

Each rank needs a GPU of its own, otherwise the job ends. Ranks train on CPUs only if the user requests it, or if the
node has no GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ones_wrapper.devices.defaults import CARDS
from ones_wrapper.process.faults import ConfigurationError
from ones_wrapper.process.log import log
from ones_wrapper.protocol.hostlist import expand

OWN_CARD = "ONES_OWN_CARD"
"""Variable that marks a rank whose only visible device is its own MIG slice."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose(
    env: Mapping[str, str], local_rank: int, local_world: int, backend: str | None = None
) -> tuple[torch.device, str]:
    """Return a rank's device, which becomes the current device, and the backend for all ranks of this node.
    `local_world` is the number of ranks on this node. `backend` is the script's choice, if any.

    Raises `ConfigurationError` if GPUs are requested or expected, but fewer are visible than there are ranks.
    """
    count, said = visible()
    if env.get("ONES_DEVICE") == "cpu":
        if backend == "nccl":
            raise ConfigurationError("backend nccl: needs GPUs, and ONES_DEVICE=cpu leaves them unused")
        return torch.device("cpu"), backend or "gloo"
    if count and (env.get("ONES_SHARE_GPUS") == "1" or env.get(OWN_CARD)):
        # NCCL before 2.30 refuses two ranks on a card, and slices of MIG count as one card.
        return _on(local_rank % count, backend or ("nccl" if local_world == 1 else "gloo"))
    if count >= local_world:
        return _on(local_rank, backend or "nccl")
    if backend == "nccl" or (backend is None and (why := gpus_expected(env))):
        reason = "backend nccl needs a GPU for each rank" if backend == "nccl" else why
        raise ConfigurationError(
            f"{reason}, and {local_world} ranks of this node see {count} GPUs"
            f"{f' (torch: {said})' if said else ''}. Check nvidia-smi on {os.uname().nodename}, --gres=gpu:N, a "
            "container's --nv, and that this torch is built for CUDA and for this driver. To train on CPUs say "
            "backend='gloo' or ONES_DEVICE=cpu"
        )
    return torch.device("cpu"), backend or "gloo"


def _on(number: int, backend: str) -> tuple[torch.device, str]:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device, backend


def visible() -> tuple[int, str]:
    """Return the number of GPUs that torch can use, and torch's warnings about GPUs that it cannot use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, " ".join(str(one.message).strip() for one in caught)[:300]


def gpus_expected(env: Mapping[str, str], cards: Path = CARDS) -> str:
    """Return the reason why ranks of this node should have GPUs; empty if there is none. Slurm's number of GPUs does
    not count if torch has no CUDA and the node no GPU, as in tests."""
    built = torch.version.cuda or torch.version.hip
    there = _count(cards)
    counted = env.get("SLURM_GPUS_ON_NODE") or "0"
    if counted not in ("", "0") and (built or there):
        return f"Slurm gave this job {counted} GPUs on this node"
    # A script that is started by hand may well mean the CPU.
    if "RANK" in env and there and env.get(_VISIBLE, "any") != "":
        return f"this node has {there} GPUs"
    return ""


def _count(cards: Path) -> int:
    return len(list(cards.parent.glob(cards.name)))


def own_slice(env: MutableMapping[str, str], local_rank: int, local_world: int) -> None:
    """Give a rank a MIG slice of its own, before CUDA is initialised. A process can use only the first slice that it
    sees (CUDA C++ Programming Guide, "Multi-Instance GPU")."""
    slices = [one for one in env.get(_VISIBLE, "").split(",") if one.startswith("MIG-")]
    if len(slices) >= local_world and len(slices) > 1:
        env[_VISIBLE], env[OWN_CARD] = slices[local_rank], "1"


def stay_near(device: torch.device, local_world: int, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Bind this thread, and threads that it starts, to the NUMA node of the rank's GPU. Does nothing if the job has too
    few CPUs there: fewer than its number of CPUs divided by the number of ranks."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    with suppress(Exception):  # a container without /sys: the rank is only slower
        card: Any = torch.cuda.get_device_properties(device)
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        allowed = os.sched_getaffinity(0)
        near = allowed & {*map(int, expand(f"[{(devices / address / 'local_cpulist').read_text().strip()}]"))}
        if near != allowed and len(near) >= max(1, len(allowed) // local_world):
            os.sched_setaffinity(0, near)


def check_fork(preloads: str, cards: Path = CARDS) -> str:
    """Return the reason why this forked rank cannot use CUDA; empty if it can, or if the node has no GPU."""
    if not torch.cuda._is_in_bad_fork() or not (_count(cards) or torch.version.hip):
        return ""
    text = f"--preload {preloads}: one of these initialises CUDA when it is imported, which no forked rank can use"
    log(text, "ones-run")
    return text
