"""`ones-run` gives its ranks what torchrun gives them, so that frameworks' scripts start as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.launch import plan
from tests.wrapper.preloaded import Started

SCRIPT = """
import json, os, sys
names = {k: v for k, v in os.environ.items() if k not in json.loads(sys.argv[1])}
found = {"env": names}
if "meet" in sys.argv:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    found |= {"total": total.item(), "elastic": dist.is_torchelastic_launched()}
    if names["RANK"] == "1" and names["ONES_ATTEMPT"] == "0":
        os.kill(os.getpid(), 9)
    dist.barrier()
    dist.destroy_process_group()
open(f"rank-{os.environ['RANK']}.json", "w").write(json.dumps(found))
"""
NOT_GIVEN = {
    "TORCHELASTIC_ERROR_FILE",  # the agent's own file, which `record` writes into
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torch's default ends a rank on an NCCL error too
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # the agent's own
}
VARIES = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
"""Without an agent there is no agent's store."""


def ranks(folder: Path, start: Callable[[list[str], dict[str, str]], Any]) -> list[dict[str, Any]]:
    """What two ranks found that the environment of their launcher did not have."""
    (folder / "script.py").write_text(SCRIPT)
    ours = ("SLURM_", "ONES_", "PMI", "TORCH", "MASTER_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {"OMP_NUM_THREADS": "1"}
    started = start(["script.py", json.dumps([*clean, "PWD", "OLDPWD", "_"])], clean)
    _, errors = started.communicate(timeout=180)
    assert started.returncode == 0, errors
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def torchrun(arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *arguments]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def ones_run(arguments: list[str], env: dict[str, str]) -> Started:
    return Started(["--ranks-per-node=2", *arguments, "meet"], env)


@pytest.mark.slow
def test_ranks_find_the_contract_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable of torchrun's has its meaning, `env://` works at each start, and ranks count as torchrun's."""
    monkeypatch.chdir(tmp_path)
    theirs, ours = (ranks(tmp_path, start) for start in (torchrun, ones_run))
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        names = set(their["env"]) - NOT_GIVEN
        assert {"RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= names
        assert names <= set(our["env"]), f"rank {rank} lacks {names - set(our['env'])}"
        same = {name for name in names - VARIES if not name.startswith("TORCHELASTIC_")}
        assert {name: our["env"][name] for name in same} == {name: their["env"][name] for name in same}
        assert our["env"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert (our["total"], our["elastic"]) == (3.0, True)
        # Rank 1 was killed once: the ranks met again, and know that it was the second time.
        assert (our["env"]["TORCHELASTIC_RESTART_COUNT"], our["env"]["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")


def test_each_block_has_a_contract_of_its_own(tmp_path: Path) -> None:
    """It meets the ranks of its own allocation, under a name and at a port that no other block of the job has."""
    common = {"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_JOB_ID": "70", "ONES_BLOCKS": "1"}
    blocks = [
        plan(common | its, "script.py", [], job_dir=tmp_path, find=lambda name: name, attempt=1, retries=2).env
        for its in (
            {"SLURM_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NODELIST": "n1"},
            {"SLURM_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NODELIST": "n2"},
        )
    ]
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        assert blocks[0][name] != blocks[1][name]
    assert [block["ONES_GPUS_PER_NODE"] for block in blocks] == ["2", "2"]
    assert [blocks[0][f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")] == ["1", "2"]
