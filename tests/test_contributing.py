"""CONTRIBUTING.md: what it shows works as it is shown."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.launch.launchers import Layout
from ones_wrapper.process.placement import allocation
from slurm_ones.testing import policy_contract
from tests.waiting import until

TOP = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (TOP / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def shown(name: str) -> Any:
    """What the block that defines this name makes of it."""
    (block,) = (block for block in BLOCKS if re.search(rf"^(class|def) {name}\b", block, flags=re.MULTILINE))
    found: dict[str, Any] = {}
    exec(block, found)
    return found[name]


TestSmallestFirst = policy_contract(shown("SmallestFirst"))


def test_the_launcher() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    started = shown("prun")(Layout(allocation(env, None), ["python", "t.py"]), shutil.which, lambda command: "")
    assert started.command == ["prun", "-n", "2", "python", "t.py"]


def test_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("ssh", 'shift; exec "$@"'), ("scontrol", "echo slurm 26.05.1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    client = shown("SshClient")(timeout_s=20, keepalive=lambda: None)
    assert client.version() == (26, 5)


def test_what_make_test_says_and_leaves(tmp_path: Path) -> None:
    """mypy runs beside the tests: its failure fails the whole, and Ctrl-C ends it too."""
    programs, made = tmp_path / "bin", tmp_path / "tmp"
    programs.mkdir()
    made.mkdir()

    def start(tests: str, types: str) -> subprocess.Popen[bytes]:
        for name, text in (("python", tests), ("mypy", types)):
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        env = {**os.environ, "TMPDIR": str(made), "MAKEFLAGS": ""}
        command = ["make", "--assume-old=style", "test", f"BIN={programs}"]
        return subprocess.Popen(command, cwd=TOP, env=env, start_new_session=True, stderr=subprocess.DEVNULL)

    ended = [
        start(tests, types).wait(60) for tests, types in (("exit 0", "exit 0"), ("exit 0", "exit 1"), ("exit 1", ""))
    ]
    assert ended[0] == 0 and ended[1] != 0 and ended[2] != 0
    process = start(f"touch {tmp_path}/runs; exec sleep 60", f"echo $$ > {tmp_path}/types; exec sleep 61")
    types = tmp_path / "types"
    until(lambda: (tmp_path / "runs").exists() and types.exists() and types.read_text())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    mypy = Path("/proc", types.read_text().strip())
    until(lambda: not mypy.exists())
    assert not [*made.iterdir()]


def test_the_targets_exist() -> None:
    named = set(re.findall(r"`?make (\w+)", (TOP / "CONTRIBUTING.md").read_text()))
    assert {"install", "check", "test", "docs"} <= named
    for target in named:
        done = subprocess.run(["make", "--dry-run", target], cwd=TOP, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
