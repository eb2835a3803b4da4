"""The commands of each launcher, and real starts under the MPIs that are installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ones_wrapper.launch import LaunchOptions, plan
from ones_wrapper.launch.launchers import LAUNCHERS, Started
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


def test_registry() -> None:
    """Protects the names that the guide gives."""
    assert list(LAUNCHERS) == ["srun", "ibrun", "mpirun", "local"]


@pytest.mark.parametrize("listing", ["MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n", "pmi2, pmix_v4\nnone"])
def test_srun_starts_a_process_a_rank_for_mpi(listing: str) -> None:
    """Protects MPI jobs: their processes must be the process manager's own, and as many as there are ranks."""
    for mpi in ("pmi2", "pmix"):
        launch = planned(LaunchOptions("srun", mpi), listing)
        assert words(launch)[:6] == [
            "/bin/srun",
            "--nodes=2",
            "--ntasks=8",
            "--ntasks-per-node=4",
            "--gres=gpu:4",
            "--gpu-bind=none",
        ]
        assert f"--mpi={mpi}" in launch.command
        assert launch.command[-2:] == ["ones_wrapper.launch.rank", "t.py"]
        assert launch.env["ONES_BACKEND"] == "mpi"


def test_missing_mpi_plugin() -> None:
    """Protects: Slurm's own message for it is no help."""
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
    """Protects a resized job at TACC: ibrun sizes itself from Slurm's variables, which tell of the first shape."""
    node = planned(LaunchOptions("ibrun"))
    assert words(node) == ["/bin/ibrun", "-n", "2", "-o", "0"]
    assert (node.env["TACC_TASKS_PER_NODE"], node.env["IBRUN_TASKS_PER_NODE"]) == ("1", "1")
    assert (node.env["SLURM_NTASKS"], node.env["SLURM_TASKS_PER_NODE"], node.env["SLURM_NNODES"]) == ("2", "1(x2)", "2")
    ranks = planned(LaunchOptions("ibrun", backend="mpi"))
    assert words(ranks) == ["/bin/ibrun", "-n", "8", "-o", "0"]
    assert (ranks.env["TACC_TASKS_PER_NODE"], ranks.env["SLURM_TASKS_PER_NODE"]) == ("4", "4(x2)")


def test_mpirun_of_either_kind() -> None:
    """Protects the options, which are not the same: the ranks of a node, and what is handed on to other nodes."""
    assert words(planned(LaunchOptions("mpirun"), HYDRA)) == ["/bin/mpirun", "-n", "2", "-ppn", "1", "-genvall"]
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


def test_nothing_of_an_older_start_is_left() -> None:
    """Protects from ranks that take a variable of the batch script's own surroundings for theirs."""
    launch = planned(LaunchOptions("mpirun"), HYDRA)
    assert not {"PMI_RANK", "PMIX_SERVER_URI", "OMPI_COMM_WORLD_SIZE"} & set(launch.env)


SCRIPT = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ONES_ATTEMPT")
words = [*(os.environ[name] for name in names), str(float(os.environ["ONES_IMPORT_S"]) > 0), *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())  # one write, lest the lines of two ranks meet
if "killed" in sys.argv and os.environ["RANK"] + os.environ["ONES_ATTEMPT"] == "10":
    os.kill(os.getpid(), 9)
sys.exit(7 if os.environ["RANK"] == "1" and "fail" in sys.argv else 0)
"""


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`ones-run` outside Slurm with the MPI beside this Python."""
    (folder / "script.py").write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_", "PMI"))}
    clean |= {"PATH": f"{MPIRUN.parent}:{os.environ['PATH']}", "ONES_JOB_DIR": str(folder / "job"), **env}
    command = [sys.executable, "-m", "ones_wrapper.launch", *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=180, check=False, cwd=folder)


@needs_mpirun
@pytest.mark.nightly
@pytest.mark.parametrize(
    "start",
    [
        lambda folder, *a: run(folder, "--ranks-per-node=2", "--backend=mpi", "script.py", *a),
        lambda folder, *a: run(folder, "--ranks-per-node=2", "--launcher=mpirun", "script.py", *a),
        lambda folder, *a: run(folder, "--ranks-per-node=2", "script.py", *a),
    ],
    ids=["mpi", "node launcher under mpirun", "local"],
)
def test_ranks_know_their_place(tmp_path: Path, start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Protects every way to start: the same variables, the arguments, and the exit code of the rank that failed."""
    done = start(tmp_path, "x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 0 0 True x", "1 2 1 2 0 0 True x"]
    assert start(tmp_path, "fail").returncode == 7


@needs_mpirun
@pytest.mark.nightly
def test_killed_mpi_rank_starts_again(tmp_path: Path) -> None:
    """Protects MPI jobs from one bad moment: a killed rank leaves no word, and mpirun has codes of its own."""
    done = run(tmp_path, "--ranks-per-node=2", "--backend=mpi", "script.py", "killed")
    assert done.returncode == 0, done.stderr
    assert "killed by signal 9; starting the ranks again" in done.stderr
    assert {"0 2 0 2 0 1 True killed", "1 2 1 2 0 1 True killed"} <= set(done.stdout.splitlines())


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
    ("launcher", "backend"),
    [("mpirun", "mpi"), ("ibrun", "gloo"), ("mpirun", "gloo"), ("ibrun", "mpi")],
)
def test_stop_reaches_ranks_through_any_launcher(tmp_path: Path, launcher: str, backend: str) -> None:
    """Protects the checkpoint at a stop: each launcher hands on another signal, dies of a third, and ibrun is a
    shell script.
    """
    (tmp_path / "ibrun").write_text(IBRUN)
    (tmp_path / "ibrun").chmod(0o755)
    (tmp_path / "stops.py").write_text(STOPS)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_", "PMI"))}
    clean |= {"PATH": f"{tmp_path}:{MPIRUN.parent}:{os.environ['PATH']}", "ONES_JOB_DIR": str(tmp_path / "job")}
    options = ["--launcher", launcher, "--backend", backend, "--ranks-per-node=2", "stops.py"]
    command = [sys.executable, "-m", "ones_wrapper.launch", *options]
    with subprocess.Popen(command, env=clean, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: len(list(tmp_path.glob("up?"))) == 2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    assert sorted(line for line in output.splitlines() if "stopped" in line) == ["stopped 0", "stopped 1"]
    assert process.returncode == 143


def test_dry_run(tmp_path: Path) -> None:
    """Protects those who look before they leap: what would be started, and nothing is."""
    done = run(tmp_path, "--dry-run", "script.py", "--lr", "1")
    assert done.stdout.split() == [sys.executable, "-m", "ones_wrapper.launch.node", "script.py", "--lr", "1"]
    assert not (tmp_path / "job").exists()
