"""`ones-run` inside a job, with a stand-in for `srun` that starts one node launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ones_wrapper.launch.launchers import Started
from ones_wrapper.launch.restart_policy import RestartLimits
from ones_wrapper.launch.supervise import Supervisor
from ones_wrapper.process.exit_codes import STOP_CODE
from ones_wrapper.process.placement import NodeAllocation
from tests.marks import nightly
from tests.waiting import until

pytestmark = pytest.mark.slow

SRUN = """#!/bin/sh
# As srun: options first; passes SIGUSR2 on; says 137 when it killed tasks because one failed.
while [ "${1#-}" != "$1" ]; do shift; done
export SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1
trap 'kill -USR2 $child' USR2
trap 'echo killed-by-TERM; kill -9 $child' TERM
"$@" & child=$!
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ $code -ne 0 ] && exit 137
exit 0
"""


def start(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    """`ones-run` in job 7 on one node with two GPUs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    (tmp_path / "script.py").write_text(script)
    # Unbuffered output of two ranks would mix within a line.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_", "PYTHONUNBUFFERED"))} | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_NTASKS": "1",
    }
    command, pipe = [sys.executable, "-m", "ones_wrapper.launch", "script.py"], subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)


def test_a_stop_does_not_wait_for_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects whoever wants the GPUs of a block that has just started: torch is imported for seconds, or minutes."""
    begun = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(300)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    process = start(tmp_path, "")
    try:
        until(begun.exists)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert begun.exists() and process.returncode == STOP_CODE, errors


STOPS = """
import os, sys, time
from pathlib import Path
from ones_wrapper.process.hooks import FLAGS
FLAGS.armed = True
Path("up" + os.environ["RANK"]).touch()
while not FLAGS.stop:
    time.sleep(0.01)
print("checkpoint of rank", os.environ["RANK"], flush=True)
sys.exit(5 * (os.environ["RANK"] == "1"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGUSR2)])
def test_a_stop_reaches_the_ranks_gently(tmp_path: Path, number: signal.Signals) -> None:
    """srun must not get the SIGTERM that makes it kill the ranks; the exit code is the script's."""
    process = start(tmp_path, STOPS)
    until(lambda: len(list(tmp_path.glob("up*"))) == 2)
    process.send_signal(number)
    output, errors = process.communicate(timeout=180)
    assert sorted(output.splitlines()) == ["checkpoint of rank 0", "checkpoint of rank 1"], errors
    assert process.returncode == 5, errors
    assert (tmp_path / "ones-7").is_dir() and not list((tmp_path / "ones-7").glob(".exit*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_before_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """While the launcher is being started."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    supervisor = Supervisor(tmp_path, {}, NodeAllocation(1, 1, ""), RestartLimits())
    supervisor._handle(number, None)
    launched = Started(["sleep", "5"], dict(os.environ), launcher="srun")
    assert supervisor._once(launched) == (STOP_CODE if number == signal.SIGTERM else 128 + signal.SIGUSR2)


def test_a_signal_as_the_launcher_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its end was collected and before that is noted."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    supervisor = Supervisor(tmp_path, {}, NodeAllocation(1, 1, ""), RestartLimits())
    supervisor._launch = Started([], {}, launcher="srun")
    supervisor._process = process = subprocess.Popen(["true"])
    os.waitpid(process.pid, 0)
    with process._waitpid_lock:  # type: ignore[attr-defined]  # as in `wait`, which the signal interrupts
        supervisor._handle(signal.SIGTERM, None)
    assert supervisor._stopped
