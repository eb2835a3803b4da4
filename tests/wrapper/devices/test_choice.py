"""The device of each rank, with CUDA simulated: torch's answers, device files and addresses are stubs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ones_wrapper.devices import choice
from ones_wrapper.devices.choice import check_fork, choose, own_slice, stay_near
from ones_wrapper.process.faults import ConfigurationError

WARNING = "CUDA initialization: Unexpected error 802: system not yet initialized"
SLURM = {"RANK": "0", "SLURM_GPUS_ON_NODE": "4"}


class Cuda:
    """A machine with some cards, as torch shows them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: int, built: bool = True) -> None:
        self.current: list[torch.device] = []

        def is_available() -> bool:
            if not cards:
                warnings.warn(WARNING, stacklevel=2)
            return cards > 0

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.cuda, "set_device", self.current.append)
        monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)
        monkeypatch.setattr(torch.version, "hip", None, raising=False)


@pytest.mark.parametrize(
    ("env", "cards", "ranks", "asked", "device", "backend"),
    [
        (SLURM, 4, 4, None, "cuda:3", "nccl"),
        (SLURM, 4, 4, "gloo", "cuda:3", "gloo"),
        (SLURM, 8, 4, None, "cuda:3", "nccl"),
        (SLURM, 2, 4, "gloo", "cpu", "gloo"),
        ({**SLURM, "ONES_DEVICE": "cpu"}, 4, 4, None, "cpu", "gloo"),
        ({**SLURM, "ONES_SHARE_GPUS": "1"}, 2, 4, None, "cuda:1", "gloo"),
        ({**SLURM, "ONES_OWN_CARD": "1"}, 1, 4, None, "cuda:0", "gloo"),
        ({"RANK": "0"}, 0, 4, None, "cpu", "gloo"),
    ],
)
def test_device_and_backend(
    env: dict[str, str], cards: int, ranks: int, asked: str | None, device: str, backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cuda = Cuda(monkeypatch, cards)
    assert choose(env, ranks - 1, ranks, asked) == (torch.device(device), backend)
    assert cuda.current == ([torch.device(device)] if device != "cpu" else [])


@pytest.mark.parametrize(
    ("env", "cards", "asked", "says"),
    [
        (SLURM, 1, None, "Slurm gave this job 4 GPUs on this node, and 4 ranks of this node see 1 GPUs. Check"),
        (SLURM, 0, None, f"4 ranks of this node see 0 GPUs (torch: {WARNING})"),
        ({"RANK": "0"}, 1, "nccl", "backend nccl needs a GPU for each rank, and 4 ranks of this node see 1 GPUs"),
        ({**SLURM, "ONES_DEVICE": "cpu"}, 4, "nccl", "ONES_DEVICE=cpu"),
    ],
)
def test_no_cpu_in_place_of_a_gpu(
    env: dict[str, str], cards: int, asked: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paid GPUs are not for a job that trains on CPUs."""
    Cuda(monkeypatch, cards)
    with pytest.raises(ConfigurationError) as raised:
        choose(env, 0, 4, asked)
    assert says in str(raised.value) and "ONES_DEVICE=cpu" in str(raised.value)


@pytest.mark.parametrize(
    ("env", "files", "built", "expected"),
    [
        (SLURM, 0, True, "Slurm gave this job 4 GPUs on this node"),
        (SLURM, 2, False, "Slurm gave this job 4 GPUs on this node"),
        (SLURM, 0, False, ""),
        ({"RANK": "0"}, 2, True, "this node has 2 GPUs"),
        ({"RANK": "0", "CUDA_VISIBLE_DEVICES": ""}, 2, True, ""),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": ""}, 0, True, "Slurm gave this job 4 GPUs on this node"),
        ({}, 2, True, ""),
        ({"RANK": "0"}, 0, True, ""),
    ],
)
def test_who_says_that_there_are_gpus(
    env: dict[str, str], files: int, built: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda(monkeypatch, 0, built)
    for number in range(files):
        (tmp_path / f"nvidia{number}").touch()
    assert choice.gpus_expected(env, tmp_path / "nvidia[0-9]*") == expected


@pytest.mark.parametrize(
    ("seen", "ranks", "mine"),
    [("MIG-a,MIG-b", 2, ("MIG-b", "1")), ("0,1", 2, ("0,1", None)), ("MIG-a", 1, ("MIG-a", None)), ("", 2, ("", None))],
)
def test_each_rank_has_a_slice_of_its_own(seen: str, ranks: int, mine: tuple[str, str | None]) -> None:
    """MIG: of several slices CUDA shows a process the first."""
    env = {"CUDA_VISIBLE_DEVICES": seen}
    own_slice(env, ranks - 1, ranks)
    assert (env["CUDA_VISIBLE_DEVICES"], env.get("ONES_OWN_CARD")) == mine


@pytest.mark.parametrize(
    ("near", "allowed", "ranks", "pinned"),
    [
        ("0-3,8-11\n", range(16), 2, {0, 1, 2, 3, 8, 9, 10, 11}),
        ("0-1", range(16), 2, None),
        ("0-15", range(16), 2, None),
        ("", range(16), 2, None),
    ],
)
def test_ranks_stay_near_their_card(
    near: str, allowed: range, ranks: int, pinned: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On nodes with two sockets; and no rank is left one processor."""
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: found.append(cpus))
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(near)
    stay_near(torch.device("cuda", 0), ranks, tmp_path)
    assert found == ([pinned] if pinned else [])
    stay_near(torch.device("cpu"), ranks, tmp_path)
    stay_near(torch.device("cuda", 0), ranks, tmp_path / "not there")


def test_a_preload_that_initialises_cuda_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on a node without a card, where nothing is lost."""
    (tmp_path / "nvidia0").touch()
    card, none = tmp_path / "nvidia[0-9]*", tmp_path / "nvidia[1-9]*"
    assert check_fork("timm", card) == ""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert check_fork("timm", none) == ""
    assert "--preload timm" in check_fork("timm", card)
    assert "--preload timm" in capsys.readouterr().err
