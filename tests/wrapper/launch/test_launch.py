"""What `ones-run` starts, and what it refuses."""

from __future__ import annotations

import os
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.files.places import make_job_directory
from ones_wrapper.launch import LaunchOptions, main, own_environment, serve
from ones_wrapper.launch import plan as plan_for
from ones_wrapper.launch.launchers import Started
from ones_wrapper.process.placement import STALE, LaunchError, allocation, contract

RESIZED = {
    "PATH": "/bin",
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[2-3]",
    "SLURM_GPUS_ON_NODE": "4",
    # as sbatch froze them when the job had one GPU
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_GPUS_PER_NODE": "1",
    "SLURM_CPUS_PER_GPU": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_EXPORT_ENV": "NONE",
}


def plan(env: dict[str, str], script: str, arguments: list[str], **options: Any) -> Started:
    """With every program in the PATH."""
    return plan_for(env, script, arguments, **{"find": lambda name: name} | options)


def test_resized_job_starts_at_its_present_size() -> None:
    """A bare srun would start the ranks of the job's first shape."""
    launch = plan(RESIZED, "train.py", ["--lr", "1"], job_dir=Path("/jobs/7"), now=5.0)
    srun = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --gres=gpu:4 --gpu-bind=none --cpu-bind=none --mpi=none"
    srun += " --export=ALL --kill-on-bad-exit=1 --wait=0"
    node = [sys.executable, "-m", "ones_wrapper.launch.node", "train.py", "--lr", "1"]
    assert launch.command == [*srun.split(), *node]
    assert not set(STALE) & set(launch.env)
    assert {k: v for k, v in launch.env.items() if k not in RESIZED} == {
        "MASTER_ADDR": "n2",
        "MASTER_PORT": launch.env["MASTER_PORT"],
        "ONES_NODES": "2",
        "ONES_GPUS_PER_NODE": "4",
        "ONES_JOB_DIR": "/jobs/7",
        "ONES_LAUNCHED": "5.000",
        "ONES_LAUNCHER": "srun",
        "ONES_ATTEMPT": "0",
        "ONES_OURS": launch.env["ONES_OURS"],
        **contract(allocation(RESIZED, None), 0, 3),
    }
    assert launch.env["PATH"] == "/bin"


def test_whole_node_site_names_its_gpus() -> None:
    """Without GRES the count comes from the option or the template, and no --gres is asked for; Slurm's count wins."""
    env, three = RESIZED | {"SLURM_GPUS_ON_NODE": ""}, LaunchOptions(ranks_per_node=3)
    for given in (env, env | {"ONES_GPUS_PER_NODE": "1"}):
        launch = plan(given, "t.py", [], job_dir=Path(), options=three)
        assert launch.env["ONES_GPUS_PER_NODE"] == "3"
        assert not [word for word in launch.command if "gres" in word or "gpu" in word]
    assert plan(RESIZED, "t.py", [], job_dir=Path(), options=three).env["ONES_GPUS_PER_NODE"] == "4"


@pytest.mark.parametrize(
    ("change", "found", "says"),
    [
        ({"SLURM_JOB_NODELIST": "n[2-"}, "srun", "SLURM_JOB_NODELIST"),
        ({"SLURM_GPUS_ON_NODE": "many"}, "srun", "SLURM_GPUS_ON_NODE='many' is not a number"),
        ({"SLURM_GPUS_ON_NODE": ""}, "srun", "--gpus-per-node"),
        ({}, None, "no srun in PATH"),
    ],
)
def test_what_cannot_start(change: dict[str, str], found: str | None, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        plan(RESIZED | change, "t.py", [], job_dir=Path(), find=lambda name: found)


@pytest.mark.parametrize(
    ("option", "says"),
    [("--conatiner", "(did you mean --container?)"), ("--gpus-pernode", "(did you mean --gpus-per-node?)")],
)
def test_an_option_that_nearly_is_one(capsys: pytest.CaptureFixture[str], option: str, says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option, "4", "train.py"])
    assert says in capsys.readouterr().err


def test_outside_slurm_the_ranks_run_here() -> None:
    launch = plan({}, "t.py", ["x"], job_dir=Path("/d"), options=LaunchOptions(ranks_per_node=2))
    assert launch.command == [sys.executable, "-m", "ones_wrapper.launch.node", "t.py", "x"]
    named = ("ONES_NODES", "ONES_GPUS_PER_NODE", "MASTER_ADDR")
    assert [launch.env[name] for name in named] == ["1", "2", "127.0.0.1"]


def test_nobody_knows_a_job_s_ports_beforehand() -> None:
    """Whoever listens at the ports of the next job's id gets nothing: the system picks, for each start."""
    starts = [plan(RESIZED, "t.py", [], job_dir=Path(), attempt=attempt).env for attempt in range(20)]
    ports = {start["MASTER_PORT"] for start in starts}
    assert len(ports) > 10 and all(1024 <= int(port) < 65_536 for port in ports)
    assert starts[1]["ONES_ATTEMPT"] == "1"


def test_the_environment_is_obeyed_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt ONES_… variable is refused with the choice."""
    script = tmp_path / "t.py"
    script.write_text("")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("ONES_JOB_DIR", str(tmp_path / "job"))
    for name, value, says in (
        ("ONES_LAUNCHER", "aprun", "none of srun, ibrun, mpirun, local"),
        ("ONES_MPI", "pmi9", "none of none, pmi2, pmix"),
        ("ONES_BACKEND", "ucc", "none of nccl, gloo, mpi"),
        ("ONES_RETRIES", "some", "not a number"),
        ("ONES_LAUNCHER", "srun", "not a Slurm job"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            patch.setattr("sys.stderr", (err := StringIO()))
            assert main([str(script)]) == 2
            assert says in err.getvalue()


@pytest.mark.parametrize(("given", "used"), [("ones-7", "ones-8"), ("mine", "mine")])
def test_a_job_that_a_rank_submits_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, used: str
) -> None:
    """It gets neither the checkpoints nor the blocks of the job whose rank called sbatch."""
    (script := tmp_path / "train.py").write_text("")
    blocks = {"ONES_BLOCKS": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    named = {} if given == "ones-7" else {"ONES_JOB_DIR": given}
    ranks = plan(RESIZED | blocks | named, "train.py", [], job_dir=tmp_path / given).env
    asked: list[Any] = []

    def prepare(*arguments: Any) -> None:
        asked[:] = arguments
        raise LaunchError("seen")

    monkeypatch.setattr("ones_wrapper.launch.prepare_job_directory", prepare)
    monkeypatch.chdir(tmp_path)
    for name, value in (ranks | {"SLURM_JOB_ID": "8"}).items():
        monkeypatch.setenv(name, value)
    assert main([str(script)]) == 2
    assert (asked[0], asked[-1]) == (tmp_path / used, None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # a rank's own job, which has that directory
    assert main([str(script)]) == 2
    assert asked[0] == tmp_path / given and asked[-1] is not None


def test_a_job_that_a_rank_submits_has_options_of_its_own() -> None:
    """Not MPI, a container or a backend that only its submitter's command line asked for."""
    given = LaunchOptions("srun", mpi="pmix", ranks_per_node=3)
    site = {"ONES_LAUNCHER": "srun", "ONES_JOB_DIR": "/jobs/ones-7"}
    for env, stays in (({}, set()), (site, {"ONES_LAUNCHER"})):
        ranks = plan(RESIZED | env, "t.py", [], job_dir=Path("/jobs/ones-7"), options=given, ask=lambda _: "pmix").env
        nested = plan(ranks, "t.py", [], job_dir=Path("/jobs/ones-7"), options=given, ask=lambda _: "pmix").env
        for found in (ranks, nested):
            own = own_environment(found | {"SLURM_JOB_ID": "8", "ONES_OWN_CARD": "1"})
            assert {name for name in own if name.startswith("ONES_")} == stays
            assert own_environment(found)["ONES_BACKEND"] == "mpi"


def test_an_interface_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="ONES_SOCKET_IFNAME=none0: No such device"):
        serve(tmp_path, {"ONES_SOCKET_IFNAME": "none0"})


def test_a_run_id_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "train.py").write_text("")
    (tmp_path / "run-id").write_text("two words")
    monkeypatch.setenv("ONES_JOB_DIR", str(tmp_path))
    assert main([str(script)]) == 2
    assert "run-id holds no name of letters, digits, dots and dashes; remove it" in capsys.readouterr().err


def test_who_can_read_a_job_directory(tmp_path: Path) -> None:
    """Its companion, whatever the user's umask."""
    old = os.umask(0o077)
    try:
        make_job_directory(tmp_path / "ones-7")
    finally:
        os.umask(old)
    assert (tmp_path / "ones-7").stat().st_mode & 0o777 == 0o755
    make_job_directory(tmp_path / "ones-7")  # a restart finds it there


def test_bad_job_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from writing through a link or into a file, and from another user who made the directory first."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name, says in (("link", "is a link"), ("file", "not a directory"), ("no/where", "parent does not exist")):
        with pytest.raises(LaunchError, match=says):
            make_job_directory(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(LaunchError, match="belongs to user"):
        make_job_directory(tmp_path / "real")
