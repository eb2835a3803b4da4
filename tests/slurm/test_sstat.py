"""GPU use from sstat's lines, made up as its source prints them: no card and no accounting of GPUs was there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_ones.slurm.command import MOST_MEMORY, CommandClient, parse_gpu_use
from slurm_ones.slurm.model import GpuUse
from tests.slurm.test_command import fake

LINE = "{}|cpu=00:00:10,energy=0,fs/disk=9,gres/gpumem={},gres/gpuutil={},mem=1M,vmem=0"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LINE.format("7.0", "2000M", 85), {7: GpuUse(0.85, 2000 << 20)}),
        ("\n".join(LINE.format(f"7.{step}", "1G", 50) for step in ("batch", "0")), {7: GpuUse(1.0, 2 << 30)}),
        ("7.0|cpu=00:00:10,mem=1M", {}),
        ("7.0|gres/gpuutil=40", {7: GpuUse(0.4)}),
        ("7.0|gres/gpuutil=0,gres/gpumem=" + "9" * 15 + "T", {7: GpuUse(0.0, MOST_MEMORY)}),
        ("7.0|gres/gpuutil=-3", {}),
        ("7.0|gres/gpuutil=" + "9" * 40, {}),
        ("sstat: error: couldn't get steps for job 7\nx.0|gres/gpuutil=1\n|\n\n7.0", {}),
    ],
)
def test_lines(text: str, found: dict[int, GpuUse]) -> None:
    """Steps of a job add up; what has no GPU use, or is no line of sstat's, says nothing."""
    assert parse_gpu_use(text) == found


def test_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer comes with the next question; one that hangs by then ends, and none is left."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    client = CommandClient()
    assert client.gpu_use([7]) == client.gpu_use([7]) == {}  # there is no sstat
    fake(tmp_path, "sstat", f"echo '{LINE.format('7.0', '1M', 50)}'; echo $* > {tmp_path}/asked")
    assert client.gpu_use([7, 8]) == {}
    assert client._sstat._asked is not None
    client._sstat._asked[0].wait(60)
    assert "--jobs=7,8" in (tmp_path / "asked").read_text()
    fake(tmp_path, "sstat", "exec sleep 60")
    assert client.gpu_use([7]) == {7: GpuUse(0.5, 1 << 20)}
    began = time.monotonic()
    assert client.gpu_use([]) == {}
    assert time.monotonic() - began < 20
