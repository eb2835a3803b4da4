"""Process group over MPI, for ranks that an MPI launcher started (`ibrun`, `mpirun`, `srun --mpi=…`).

The import of mpi4py initialises MPI, so this module is imported only if the user asked for MPI.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from ones_wrapper.group import Group
from ones_wrapper.network import plain

T = TypeVar("T")

SPIN_S = 0.002
"""Seconds for which a waiting rank polls without pause. Later it sleeps between polls, to free its core."""
SLEEP_S = 0.001
EXIT_WAIT_S = 5.0
"""Seconds for which a failed rank waits for other ranks to end, before it aborts them."""

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
"""Variables in which launchers write the number of ranks that they started, the most reliable first."""


class MpiError(Exception):
    """Error: MPI found more or fewer ranks than were started. The message says what to do."""


@dataclass(eq=False)
class MpiGroup(Group):
    """The ranks of an MPI communicator, on CPUs."""

    comm: MPI.Intracomm
    """A duplicate of MPI's communicator, so that messages do not mix with the script's own."""
    exit_comm: MPI.Intracomm
    """Communicator for the barrier of ranks that end with an error."""
    main: bool = True

    def duplicate(self) -> MpiGroup | None:
        # The least level of all ranks, since all must decide alike.
        threads = self.world == 1 or -self.maximum([-MPI.Query_thread()])[0] >= MPI.THREAD_MULTIPLE
        return replace(self, comm=self.comm.Dup(), main=False) if threads else None

    def maximum_later(self, values: Sequence[int]) -> Callable[[], list[int]]:
        if self.world == 1 or not values:
            return super().maximum_later(values)
        return self._reduce(np.array(values, np.int64), MPI.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        if self.world == 1 or not values:
            return super().total(values)
        return self._reduce(np.array(values, np.float64), MPI.SUM)()

    def _reduce(self, mine: Any, operation: MPI.Op) -> Callable[[], list[Any]]:
        found = np.empty_like(mine)
        request = self.comm.Iallreduce(mine, found, operation)

        def result() -> list[Any]:
            wait(request)
            plain: list[Any] = found.tolist()
            return plain

        return result

    def gather(self, value: T) -> list[T]:
        mine = np.frombuffer(plain.encode(value), np.uint8)
        sizes = np.empty(self.world, np.int64)
        wait(self.comm.Iallgather(np.array([len(mine)], np.int64), sizes))
        whole = np.empty(int(sizes.sum()), np.uint8)
        wait(self.comm.Iallgatherv(mine, (whole, sizes)))
        return [plain.decode(part.tobytes()) for part in np.split(whole, np.cumsum(sizes)[:-1])]

    def close(self, code: int = 0) -> None:
        if not self.main:
            if code == 0:
                self.comm.Free()
        elif code and self.world > 1 and not MPI.Is_finalized():
            self._fail(code)

    def _fail(self, code: int) -> None:
        """Wait up to `EXIT_WAIT_S` seconds for all other ranks to fail as well; then abort them, since they may wait
        for ever."""
        ending, deadline = self.exit_comm.Ibarrier(), time.monotonic() + EXIT_WAIT_S
        while not ending.Test():
            if time.monotonic() > deadline:
                sys.stdout.flush()
                sys.stderr.flush()
                MPI.COMM_WORLD.Abort(code)
            time.sleep(SLEEP_S)


def wait(request: MPI.Request) -> None:
    """Wait for a request, and sleep between polls, so that Python's signal handlers run and the core is free."""
    spin_until = time.perf_counter() + SPIN_S
    while not request.Test():
        if time.perf_counter() > spin_until:
            time.sleep(SLEEP_S)


def join_mpi(env: Mapping[str, str] = os.environ) -> MpiGroup:
    """Return the group of ranks that the MPI launcher started. Raises `MpiError` if their number is wrong."""
    world = MPI.COMM_WORLD
    check_world(world.size, env)
    comm = world.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_world = node.rank, node.size
    node.Free()
    nodes = comm.allreduce(int(local_rank == 0))
    return MpiGroup(
        rank=comm.rank,
        world=comm.size,
        local_rank=local_rank,
        nodes=nodes,
        gpus_per_node=comm.allreduce(local_world, MPI.MAX),
        device=torch.device("cpu"),
        comm=comm,
        exit_comm=comm.Dup(),
    )


def check_world(world: int, env: Mapping[str, str]) -> None:
    """Raise `MpiError` if MPI found more or fewer ranks than were started. The number that `ones-run` requested must
    match exactly. Variables of other launchers are compared only if MPI found a single rank, since some count nodes."""
    launched = next(((name, int(env[name])) for name in SIZES if env.get(name, "").isdigit()), None)
    asked = None
    if env.get("ONES_NODES") and env.get("ONES_GPUS_PER_NODE"):
        asked = int(env["ONES_NODES"]) * int(env["ONES_GPUS_PER_NODE"])
    if world == 1 and (asked or 1) == 1 and (launched is None or launched[1] == 1):
        return
    if world == 1:
        found = f"{launched[0]} says {launched[1]}" if launched and launched[1] > 1 else f"ones-run asked for {asked}"
        raise MpiError(
            f"each rank is by itself: {found} ranks, but MPI found one. Either mpi4py was built for another MPI than "
            f"the launcher's (here it uses {MPI.Get_library_version().strip().splitlines()[0]}): reinstall it with the "
            "cluster's MPI module loaded (pip install --no-binary=mpi4py mpi4py). Or the script was not started "
            "through ibrun, mpirun or srun with an --mpi type that this MPI knows (srun --mpi=list)"
        )
    if asked not in (None, world):
        raise MpiError(
            f"MPI found {world} ranks, but ones-run asked for {asked} (ONES_NODES × ONES_GPUS_PER_NODE): the MPI "
            "launcher started another number; give the job as many tasks a node as it has ranks (--ntasks-per-node)"
        )
