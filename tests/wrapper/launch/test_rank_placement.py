"""Where processes stand, as srun and the MPIs say it; and what is said when that is not what was planned."""

from __future__ import annotations

import pytest

from ones_wrapper.process.placement import LaunchError, Placement, own_node, own_placement

PLAN = {"ONES_NODES": "2", "ONES_GPUS_PER_NODE": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""What the batch script's own step has, and everything that it starts inherits."""


def srun(rank: int, size: int, local: int) -> dict[str, str]:
    return {
        "ONES_LAUNCHER": "srun",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local),
        "PMI_RANK": "9",
    }


def hydra(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return BATCH | {
        "ONES_LAUNCHER": "mpirun",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(local_size),
    }


def open_mpi(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local, local_size)
    said = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)}
    return BATCH | {"ONES_LAUNCHER": "mpirun", "PMIX_RANK": str(rank)} | said


@pytest.mark.parametrize(
    "env",
    [
        srun(3, 4, 1),
        hydra(3, 4, 1, 2),
        open_mpi(3, 4, 1, 2),
        {"ONES_LAUNCHER": "ibrun", "PMIX_RANK": "3"},
        {"ONES_LAUNCHER": "ibrun", "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"},
        srun(3, 4, 1) | {"ONES_LAUNCHER": "ibrun", "PMI_RANK": "3"},
    ],
    ids=["srun", "hydra", "open mpi", "pmix alone", "mvapich", "srun inside ibrun"],
)
def test_last_rank_of_four(env: dict[str, str]) -> None:
    """Every process manager has names of its own."""
    place = own_placement(PLAN | env)
    assert place == Placement(3, 4, 1, 2, 1, 2)
    assert place.env() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
    }


def test_node_launchers() -> None:
    """One task a node, numbered by its starter; outside Slurm there is one node."""
    assert own_node(PLAN | srun(1, 2, 0)) == 1
    assert own_node(PLAN | hydra(1, 2, 0, 1)) == 1
    assert own_node({"ONES_NODES": "1", "ONES_GPUS_PER_NODE": "2", "PMI_RANK": "5"}) == 0


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (hydra(0, 1, 0, 1), "each process believes that it has no others, and there should be 4"),
        (srun(0, 1, 0), "no others.*without task counts"),
        (srun(0, 3, 0), "3 processes, not 4"),
        (hydra(3, 4, 3, 4), "4 processes, not 2"),
        (open_mpi(1, 4, 0, 2), "not placed node by node"),
        ({"ONES_LAUNCHER": "ibrun", "PMIX_RANK": "4"}, "this is process 4"),
        ({"ONES_LAUNCHER": "mpirun"}, "gave this process no rank"),
    ],
)
def test_not_as_planned(env: dict[str, str], says: str) -> None:
    """Protects from ranks that each train the whole job side by side, writing over each other's checkpoints."""
    with pytest.raises(LaunchError, match=says):
        own_placement(PLAN | env)


def test_two_node_launchers_on_one_node() -> None:
    """Ranks would share its GPUs while another node is idle."""
    with pytest.raises(LaunchError, match="this node has 2 processes, not 1"):
        own_node(PLAN | hydra(1, 2, 1, 2))
