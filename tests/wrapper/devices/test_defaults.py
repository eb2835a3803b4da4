"""Environment variables of ranks, the table that names them, and how long a collective may take."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ones_wrapper.devices import defaults
from ones_wrapper.devices.defaults import hidden_cards, set_defaults
from ones_wrapper.process.hang_detector import HANG_S, collective
from tests.cluster.paths import REPOSITORY

ALWAYS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_ENABLE_STORE_V2_API": "1",
    "RES_OPTIONS": "timeout:1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
}
BLOCKS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
BLOCK = {"ONES_BLOCKS": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("env", "hidden", "added"),
    [
        ({}, False, ALWAYS),
        ({}, True, ALWAYS),
        (BLOCK, False, ALWAYS | BLOCKS),
        (BLOCK, True, ALWAYS | BLOCKS | {"NCCL_HOSTID": "n1-7-3"}),
        ({"ONES_SOCKET_IFNAME": "ib0"}, False, ALWAYS | {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}),
    ],
)
def test_what_ranks_have_unless_the_user_says_otherwise(
    env: dict[str, str], hidden: bool, added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader's store does not wait for a lost answer of the resolver, the watchdog aborts no block, and two blocks on
    a node try no P2P to cards that they cannot see."""
    monkeypatch.setattr(defaults, "hidden_cards", lambda: [Path("/dev/nvidia1")] if hidden else [])
    monkeypatch.setattr(defaults.os, "uname", lambda: type("Uname", (), {"nodename": "n1"}))
    set_defaults(now := dict(env))
    assert now == env | added


def test_what_the_user_sets_stays() -> None:
    own = dict.fromkeys(defaults.defaults({}), "the user's")
    set_defaults(env := BLOCK | own)
    assert env == BLOCK | own


def test_cards_that_a_cgroup_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is broken is not hidden: another error says so."""
    for number in range(3):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    errors = {"nvidia1": PermissionError(1, "no"), "nvidia2": OSError(5, "broken")}
    opened = defaults.os.open

    def opens(path: Path, flags: int) -> int:
        if path.name in errors:
            raise errors[path.name]
        return opened(path, flags)

    monkeypatch.setattr(defaults.os, "open", opens)
    assert [path.name for path in hidden_cards(tmp_path / "nvidia[0-9]*")] == ["nvidia1"]


def test_the_table_names_all() -> None:
    text = (REPOSITORY / "docs" / "gpu.md").read_text()
    assert [name for name in defaults.defaults({}) if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize(
    ("given", "allowed_s"),
    [
        *[(odd, HANG_S) for odd in ("", "nan", "soon", "-5")],
        ("60", 60),
        *[(never, 365 * 86_400) for never in ("0", "inf")],
    ],
)
def test_collectives_take_as_long_as_steps_may(given: str, allowed_s: float) -> None:
    """Ranks wait for evaluations of more than 10 minutes, after which NCCL would abort them."""
    assert collective({"ONES_HANG_S": given}) == timedelta(seconds=allowed_s)
