"""Slurm of this machine: the simulated one in real time, whose first partition runs real processes."""

from __future__ import annotations

import getpass
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_ones.demo.jobs import (
    BLOCKS,
    CLUSTER_SETTINGS,
    GPUS,
    HERE,
    NODES,
    SCRIPT,
    SIMULATED,
    SIMULATED_JOBS,
    SLOTS,
    START_S,
    DemoJob,
    comment,
    workload,
)
from slurm_ones.demo.processes import Processes, ProcessProgram, cancelled, clean_environment, make_shims
from slurm_ones.simulate.slurm.nodes import PartitionSpec
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Program, Request
from slurm_ones.simulate.slurm.timeline import Timeline
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Application, Hot, Submission
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import JobKey, Task

GROWN_S = 60.0
"""Longest wait of the second training for the first one to grow, s since the start."""


class _SimulatedNodes(ClusterSpec):
    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{SIMULATED}-{i}" for i in range(1, self.nodes + 1))

    def partitions(self) -> Iterator[PartitionSpec]:
        yield PartitionSpec(SIMULATED, self.names, self.gpus_per_node)


class _SimulatedJobs(World):
    """Simulated jobs, with `SIMULATED` as their partition and user."""

    def _request(self, submission: Submission, app: Application) -> Request:
        return replace(super()._request(submission, app), user=SIMULATED, partition=SIMULATED)


@dataclass
class Submitted:
    """A real training that has been submitted on this machine."""

    job: DemoJob
    job_id: int
    programs: list[ProcessProgram]


class LocalSlurm:
    """Simulated Slurm with real processes, advanced by each call of `look`. Every change is made under `lock`."""

    def __init__(
        self, folder: Path, processes: Processes, jobs: Sequence[DemoJob], simulated: int = len(SIMULATED_JOBS)
    ) -> None:
        """`simulated` is the number of simulated jobs."""
        self.lock = threading.RLock()
        self.submitted: list[Submitted] = []
        self.grown = False
        """True once a training has grown; set by the reader of the job database. The other trainings are then
        submitted, so that the first shrinks, however slow the machine is. After `GROWN_S` they are submitted anyway."""
        self._folder, self._processes = folder, processes
        self._upcoming = sorted(jobs, key=lambda job: job.at)
        here = PartitionSpec(HERE, (HERE,), SLOTS, default=False)
        spec = _SimulatedNodes(NODES, GPUS)
        self.world = _SimulatedJobs(
            workload(SIMULATED_JOBS[:simulated]), spec, folder, CLUSTER_SETTINGS,
            mechanism=Hot(launch_s=START_S), timeline=Timeline(time.time()), beside=[here] if jobs else [],
        )  # fmt: skip
        self.client = SimulatedClient(self.world.cluster)
        self._env = self._environment(make_shims(folder / "bin"))
        self._script = Path(__file__).parent / "scripts" / SCRIPT

    @property
    def seconds(self) -> float:
        """Seconds since the start of the demo."""
        return time.time() - self.world.began

    @property
    def over(self) -> bool:
        """True once every job has been submitted and has ended."""
        return not self._upcoming and self.world.done

    def look(self) -> None:
        """Advance to the present time: collect ended processes, submit due jobs, and advance the simulated ones."""
        with self.lock:
            for one in self.submitted:
                for program in one.programs:
                    code = program.ended()
                    if code is not None:
                        self.world.cluster.exited(program.task, code)
            for array_id in cancelled(self._folder / "bin"):
                self.client.cancel_waiting(array_id)
            while self._upcoming and self._upcoming[0].at <= self.seconds:
                if self.submitted and not self.grown and self.seconds <= GROWN_S:
                    break
                self._submit(self._upcoming.pop(0))
            self.world.pass_time(max(time.time() - self.world.timeline.now, 0.0))

    def _submit(self, job: DemoJob) -> None:
        request = Request(
            gpus_per_node=1,
            partition=HERE,
            name=job.name,
            comment=comment(SLOTS),
            work_dir=str(self._folder),
            array_tasks=tuple(range(BLOCKS)),
            throttle=1,
            user=getpass.getuser(),
            uid=os.geteuid(),
        )
        programs: list[ProcessProgram] = []
        own = [*job.options(SLOTS), f"--samples={job.samples}", f"--seed={len(self.submitted)}"]

        def command(ranks: int) -> list[str]:
            options = ["--blocks", f"--gpus-per-node={ranks}", str(self._script)]
            return [sys.executable, "-m", "ones_wrapper.launch", *options, *own]

        def program(key: JobKey) -> Program:
            assert isinstance(key, Task)
            folder = self._folder / f"ones-{key.array}"
            env = {**self._env, "ONES_TRACE": str(folder / "trace-{restart}-{rank}.jsonl")}
            programs.append(ProcessProgram(key, command, env, self._folder, self._processes))
            return programs[-1]

        self.submitted.append(Submitted(job, self.world.cluster.submit(request, program), programs))

    @staticmethod
    def _environment(path: str) -> dict[str, str]:
        """Environment of the trainings: CPUs only, network traffic over the loopback only."""
        return {
            **clean_environment(),
            "PATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": "1",
            "ONES_LAUNCHER": "local",
            "ONES_BACKEND": "gloo",
            "ONES_REPORT_EVERY_S": "1",
        }
