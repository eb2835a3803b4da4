"""The commands of each launcher, and real starts under the MPIs that are installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ones_wrapper.launch import LaunchOptions, plan
from ones_wrapper.launch.launchers import Started
from ones_wrapper.process.placement import LaunchError
from tests.waiting import until

pytestmark = pytest.mark.slow

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[2-3]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_NTASKS": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "PMI_RANK": "0",
    "PMIX_SERVER_URI": "of the launcher before",
    "OMPI_COMM_WORLD_SIZE": "1",
}
HYDRA = "HYDRA build details:\n    Version: 5.0.2"
OPEN_MPI = "mpirun (Open MPI) 5.0.7\n"
MPIRUN = Path(sys.executable).with_name("mpirun")
needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install mpich")


def planned(options: LaunchOptions, answer: str = "", env: dict[str, str] = JOB) -> Started:
    def ask(command: Sequence[str]) -> str:
        return answer

    return plan(env, "t.py", [], job_dir=Path("/jobs/7"), options=options, find=lambda name: f"/bin/{name}", ask=ask)


def words(launch: Started) -> list[str]:
    """The command before Python's."""
    return launch.command[: launch.command.index(sys.executable)]


@pytest.mark.parametrize("listing", ["MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n", "pmi2, pmix_v4\nnone"])
def test_srun_starts_a_process_a_rank_for_mpi(listing: str) -> None:
    """MPI's processes must be the process manager's own."""
    for mpi in ("pmi2", "pmix"):
        launch = planned(LaunchOptions("srun", mpi), listing)
        srun = "/bin/srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --gres=gpu:4 --gpu-bind=none"
        assert words(launch)[:6] == srun.split()
        assert f"--mpi={mpi}" in launch.command
        assert launch.command[-2:] == ["ones_wrapper.launch.rank", "t.py"]
        assert launch.env["ONES_BACKEND"] == "mpi"


def test_missing_mpi_plugin() -> None:
    """Slurm's own message for it is no help."""
    with pytest.raises(LaunchError, match="names none, pmi2"):
        planned(LaunchOptions("srun", "pmix"), "MPI plugin types are...\n\tnone\n\tpmi2\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (LaunchOptions("srun", backend="mpi"), "--mpi pmi2 or pmix"),
        (LaunchOptions("ibrun", mpi="pmi2"), "--backend mpi"),
        (LaunchOptions("local"), "the job has 2"),
    ],
)
def test_contradictions(options: LaunchOptions, says: str) -> None:
    """Protects from a start in which ranks do not find each other."""
    with pytest.raises(LaunchError, match=says):
        planned(options)


def test_ibrun_is_told_the_counts_of_now() -> None:
    """ibrun sizes itself from Slurm's variables, which name the first shape."""
    node = planned(LaunchOptions("ibrun"))
    assert words(node) == ["/bin/ibrun", "-n", "2", "-o", "0"]
    assert (node.env["TACC_TASKS_PER_NODE"], node.env["IBRUN_TASKS_PER_NODE"]) == ("1", "1")
    assert (node.env["SLURM_NTASKS"], node.env["SLURM_TASKS_PER_NODE"], node.env["SLURM_NNODES"]) == ("2", "1(x2)", "2")
    ranks = planned(LaunchOptions("ibrun", backend="mpi"))
    assert words(ranks) == ["/bin/ibrun", "-n", "8", "-o", "0"]
    assert (ranks.env["TACC_TASKS_PER_NODE"], ranks.env["SLURM_TASKS_PER_NODE"]) == ("4", "4(x2)")


def test_mpirun_of_either_kind() -> None:
    """Options differ: the ranks of a node, and what is handed on to other nodes."""
    launch = planned(LaunchOptions("mpirun"), HYDRA)
    assert words(launch) == ["/bin/mpirun", "-n", "2", "-ppn", "1", "-genvall"]
    assert not {"PMI_RANK", "PMIX_SERVER_URI", "OMPI_COMM_WORLD_SIZE"} & set(launch.env), "left of an older start"
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.11"
    assert words(planned(LaunchOptions("mpirun", backend="mpi"), intel))[:5] == ["/bin/mpirun", "-n", "8", "-ppn", "4"]
    env = JOB | {"NCCL_IB_HCA": "mlx5", "TORCH_NCCL_DESYNC_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    command = words(planned(LaunchOptions("mpirun", backend="mpi"), OPEN_MPI, env))
    assert command[:7] == ["/bin/mpirun", "-n", "8", "--map-by", "ppr:4:node:OVERSUBSCRIBE", "--bind-to", "none"]
    exported = command[8::2]
    assert {"MASTER_ADDR", "MASTER_PORT", "ONES_JOB_DIR", "ONES_NODES", "ONES_LAUNCHER"} <= set(exported)
    assert {"NCCL_IB_HCA", "TORCH_NCCL_DESYNC_DEBUG"} <= set(exported), "nodes that differ in these hang"
    assert "CUDA_VISIBLE_DEVICES" not in exported, "another node has its own"
    with pytest.raises(LaunchError, match="neither"):
        planned(LaunchOptions("mpirun"), "mpirun of another kind")


SCRIPT = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ONES_ATTEMPT")
words = [*(os.environ[name] for name in names), str(float(os.environ["ONES_IMPORT_S"]) > 0), *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())  # one write, lest the lines of two ranks meet
if "killed" in sys.argv and os.environ["RANK"] + os.environ["ONES_ATTEMPT"] == "10":
    os.kill(os.getpid(), 9)
sys.exit(7 if os.environ["RANK"] == "1" and "fail" in sys.argv else 0)
"""


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`ones-run` outside Slurm with the MPI beside this Python."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_", "PMI"))}
    clean |= {"PATH": f"{folder}:{MPIRUN.parent}:{os.environ['PATH']}", "ONES_JOB_DIR": str(folder / "job")}
    command = [sys.executable, "-m", "ones_wrapper.launch", "--ranks-per-node=2", *arguments]
    return subprocess.Popen(command, env=clean, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    (folder / "script.py").write_text(SCRIPT)
    process = begin(folder, *arguments)
    output, errors = process.communicate(timeout=180)
    return process.returncode, output, errors


@needs_mpirun
@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [["--backend=mpi"], ["--launcher=mpirun"], []], ids=["mpi", "node launcher", "local"]
)
def test_ranks_know_their_place(tmp_path: Path, options: list[str]) -> None:
    """The same variables, the arguments, and the exit code of the rank that failed."""
    code, output, errors = run(tmp_path, *options, "script.py", "x")
    assert code == 0, errors
    assert sorted(output.splitlines()) == ["0 2 0 2 0 0 True x", "1 2 1 2 0 0 True x"]
    assert run(tmp_path, *options, "script.py", "fail")[0] == 7


@needs_mpirun
@pytest.mark.nightly
def test_killed_mpi_rank_starts_again(tmp_path: Path) -> None:
    """A killed rank leaves no word, and mpirun has codes of its own."""
    code, output, errors = run(tmp_path, "--backend=mpi", "script.py", "killed")
    assert code == 0 and "killed by signal 9; starting the ranks again" in errors
    assert {"0 2 0 2 0 1 True killed", "1 2 1 2 0 1 True killed"} <= set(output.splitlines())


IBRUN = """#!/bin/bash
[ "$1" = -n ] && n=$2; shift 4
mpiexec -n "$n" -ppn "$TACC_TASKS_PER_NODE" "$@"
code=$?
exit $code
"""
STOPS = """
import os, time
from pathlib import Path
from ones_wrapper.process.hooks import FLAGS
FLAGS.armed = True
Path("up" + os.environ["RANK"]).touch()
for _ in range(3000):
    if FLAGS.stop:
        break
    time.sleep(0.02)
os.write(1, f"stopped {os.environ['RANK']}\\n".encode())  # one write, lest the lines of two ranks meet
raise SystemExit(143)
"""


@needs_mpirun
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "backend"), [("mpirun", "mpi"), ("ibrun", "gloo"), ("mpirun", "gloo"), ("ibrun", "mpi")]
)
def test_stop_reaches_ranks_through_any_launcher(tmp_path: Path, launcher: str, backend: str) -> None:
    """Each launcher hands on another signal, dies of a third, and ibrun is a shell script."""
    (tmp_path / "ibrun").write_text(IBRUN)
    (tmp_path / "ibrun").chmod(0o755)
    (tmp_path / "stops.py").write_text(STOPS)
    with begin(tmp_path, "--launcher", launcher, "--backend", backend, "stops.py") as process:
        until(lambda: len(list(tmp_path.glob("up?"))) == 2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    assert sorted(line for line in output.splitlines() if "stopped" in line) == ["stopped 0", "stopped 1"]
    assert process.returncode == 143
