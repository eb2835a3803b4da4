"""How ranks agree: one contract for torch.distributed and for MPI, each in processes of its own.

Run as a program (`python -m tests.wrapper.test_group`) this is one rank of MPI that checks the contract.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ones_wrapper
from ones_wrapper.api import join
from ones_wrapper.group import Group, RankError, TorchGroup
from tests.wrapper.forked import Team

RANKS = 3
TIMEOUT_S = 240.0
TOP = Path(__file__).parents[2]
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def clean_env(**more: str) -> dict[str, str]:
    """The environment of a fresh run."""
    launchers = ("SLURM_", "ONES_", "PMI", "OMPI_", "MPI_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    path = os.pathsep.join([str(TOP), *filter(None, sys.path)])
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def under_mpi(*arguments: str, ranks: int = RANKS, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on as many ranks with the MPI launcher."""
    if MPIEXEC is None:
        pytest.skip("no mpiexec; pip install mpi4py mpich")
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, *arguments],
        env=clean_env(**env),
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_ranks_run_what_is_tested() -> None:
    """Protects the checks over MPI from checking another copy, which is installed."""
    code = "import importlib.util as util; print(util.find_spec('ones_wrapper').origin)"
    done = subprocess.run([sys.executable, "-c", code], env=clean_env(), cwd=TOP, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == Path(ones_wrapper.__file__), done.stderr


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_contract_over_torch(ranks: int) -> None:
    team = Team(ranks)
    try:
        team.run(contract)
    finally:
        team.close()


@pytest.mark.slow
@pytest.mark.nightly
def test_contract_over_mpi() -> None:
    done = under_mpi("-m", "tests.wrapper.test_group")
    assert (done.returncode, done.stdout) == (0, "kept\n" * RANKS), done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_contract_on_one_rank() -> None:
    """Without a launcher: a single process, as the first try of a script is."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.wrapper.test_group"],
        env=clean_env(),
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr


def contract(group: Group) -> None:
    """What everything else relies on; called on all ranks."""
    rank, world = group.rank, group.world
    assert 0 <= rank < world
    assert (group.nodes, group.gpus_per_node, group.local_rank) == (1, world, rank)
    assert group.maximum([rank, -rank, 7]) == [world - 1, 0, 7]
    assert group.maximum([2**62 + rank]) == [2**62 + world - 1], "whole numbers stay whole"
    assert group.maximum([]) == []
    assert group.total([rank, 0.1]) == pytest.approx([world * (world - 1) / 2, 0.1 * world], rel=1e-15)
    assert group.gather({"rank": rank, "of": "x" * 1000 * rank}) == [
        {"rank": r, "of": "x" * 1000 * r} for r in range(world)
    ]
    assert group.everywhere(lambda: rank * 2) == [r * 2 for r in range(world)]
    assert group.on_first(lambda: f"from {rank}") == "from 0"
    if isinstance(group, TorchGroup):
        shared = [torch.full((2, 3), float(rank)), torch.tensor(rank), torch.full((4,), rank + 1.0), torch.empty(0)]
        shared += [torch.full((2,), complex(rank, 1)), torch.full((3,), rank, dtype=torch.int16)]
        group.share(shared)
        wanted = [{0.0}, {0}, {1.0}, set(), {1j}, {0}]
        assert [{*tensor.flatten().tolist()} for tensor in shared] == wanted, "rank 0's, several as one"
    assert group.here(lambda: f"mine {rank}") == f"mine {rank}"
    last = world - 1
    with pytest.raises(RankError, match=f"rank {last}: ZeroDivisionError"):
        group.everywhere(lambda: 1 // (last - rank))
    with pytest.raises(RankError, match=f"rank {last}: ZeroDivisionError"):
        group.here(lambda: 1 // (last - rank))
    with pytest.raises(RankError, match="rank 0: OSError: disk full"):
        group.on_first(lambda: fail("disk full"))

    # A background thread's collectives and the main thread's do not meet.
    duplicate = group.duplicate()
    assert duplicate is not None
    heard: list[list[str]] = []
    thread = threading.Thread(target=lambda: heard.extend(duplicate.gather(f"b{i}") for i in range(50)))
    if rank == 0:
        thread.start()
    for i in range(50):
        assert group.gather(i) == [i] * world
    if rank != 0:
        thread.start()
    thread.join()
    assert heard == [[f"b{i}"] * world for i in range(50)]
    duplicate.close()
    assert group.maximum([rank]) == [last], "closing what is beside leaves the group"
    group.close()


def fail(why: str) -> None:
    raise OSError(why)


if __name__ == "__main__":
    contract(join("mpi"))
    sys.stdout.write("kept\n")  # in one piece, so that ranks' lines do not mix
