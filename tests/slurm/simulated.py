"""The simulated Slurm as a site of the contract: what holds of a real one holds of it."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ones_db.shape import Shape
from slurm_ones.simulate.slurm.cluster import SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PartitionSpec, SlurmConf
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Program
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.slurm.client import Refused, SlurmError
from slurm_ones.slurm.model import JobKey, Queue, SlurmJob
from tests.simulate.harness import Sleep
from tests.slurm.sbatch import read_request
from tests.slurm.sites import OPERATOR, OWNER, STRANGER, WAIT_S, Site

UIDS = {OWNER: 2001, STRANGER: 2002, OPERATOR: 0}
PARTITIONS = [
    PartitionSpec("gpu", tuple(f"n{i}" for i in range(1, 5)), 4, max_time_s=86400.0, cpus_per_node=16, memory_mb=4000),
    PartitionSpec("whole", tuple(f"w{i}" for i in range(1, 5)), 4, True, default=False),
]


class Client(SimulatedClient):
    """With batch scripts, and with what the contract breaks in a client to see what becomes of it."""

    user: str
    programs: Callable[[str], Callable[[JobKey], Program]]
    """Makes a job's program from its script's text."""
    partial = False
    """Whether updates of a shape are taken only in part; the way back is taken whole."""

    @property
    def environment(self) -> dict[str, str]:
        return {}

    @environment.setter
    def environment(self, value: dict[str, str]) -> None:
        pytest.skip("a simulated Slurm has no commands, and so no PATH")

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        try:
            text = script.read_text()
        except OSError as error:
            raise Refused(f"sbatch: Unable to open file {script}: {error.strerror}") from None
        now, folder = self._cluster.timeline.now, str(directory or Path.cwd())
        request = read_request(text, arguments, now=now, work_dir=folder, user=self.user, uid=self._uid)
        return self._cluster.submit(request, self.programs(text))

    def _update_shape(self, job: SlurmJob, shape: Shape, queue: Queue) -> None:
        if self.partial and shape != Shape(job.nodes, job.gpus_per_node):
            self._cluster.reshape(job.key, shape, nodes_alone=True)
        else:
            super()._update_shape(job, shape, queue)


class SleepOnce(Sleep):
    """A program whose later runs do not end by themselves."""

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        if restart:
            self.runs.append(gpus)
        else:
            super().start(restart, gpus)


class Commands:
    """What the contract asks of a cluster beside its clients."""

    name = "simulated"

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    @property
    def scratch(self) -> Path:
        """Where scripts would write."""
        return pytest.skip("a simulated Slurm runs no scripts")

    def run(self, argv: list[str], *, user: str) -> None:
        """An operator's command."""
        match argv:
            case ["scontrol", "hold", job_id]:
                self._cluster.hold(int(job_id), "admin")
            case ["scontrol", "update", node, *_, state] if node.startswith("NodeName="):
                name = node.removeprefix("NodeName=")
                {
                    "State=DRAIN": self._cluster.drain,
                    "State=DOWN": self._cluster.fail,
                    "State=RESUME": self._cluster.resume,
                }[state](name)
            case _:
                pytest.skip(f"a simulated Slurm has no {' '.join(argv[1:3])}")


class SimulatedSite(Site):
    """Time passes in it where a real site is waited for."""

    is_old = False  # type: ignore[assignment]

    def __init__(self, conf: SlurmConf = SlurmConf(licenses={"matlab": 3})) -> None:
        self.timeline = Timeline(float(round(time.time())))
        settings = ClusterSettings(schedule_s=0.5)
        self._simulated = SimulatedCluster(PARTITIONS, settings, self.timeline, conf=conf)
        super().__init__(Commands(self._simulated), "simulated")  # type: ignore[arg-type]
        self._clients: dict[str, Client] = {}
        self._folder = tempfile.TemporaryDirectory()

    def configure(self, conf: SlurmConf) -> None:
        """Have another configuration from now on."""
        self._simulated.conf = conf

    def as_(self, user: str) -> Client:  # type: ignore[override]
        if user not in self._clients:
            client = Client(self._simulated, uid=UIDS[user], operator=user == OPERATOR)
            client.user, client.programs = user, self._program
            self._clients[user] = client
        return self._clients[user]

    def _program(self, text: str) -> Callable[[JobKey], Program]:
        """What a job of this script does: sleep, or exit at once."""
        code = re.search(r"^exit (\d+)$", text, re.MULTILINE)
        killed = "kill -KILL $$" in text
        ends = code is not None or killed or text.rstrip().endswith("true")
        status = 137 if killed else int(code[1]) if code else 0
        begins = re.search(r"^sleep (\d+)\nexit", text, re.MULTILINE)
        once = "SLURM_RESTART_COUNT" in text
        stubborn = re.search(r"trap 'sleep ([\d.]+)", text)

        def program(job_id: JobKey) -> Program:
            return (SleepOnce if once else Sleep)(
                lambda _: self._simulated.exited(job_id, status),
                self.timeline,
                float(begins[1]) if begins else 0.1 if ends else 1e9,
                float(stubborn[1]) if stubborn else 0.2,
            )

        return program

    def script(self, text: str) -> Path:
        self._scripts += 1
        path = Path(self._folder.name, f"{self._scripts}.sh")
        path.write_text(text)
        return path

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = self.now() + WAIT_S
        while not holds():
            assert self.now() < deadline, f"not within {WAIT_S:.0f} s: {what}"
            self.pass_time(0.25)

    def now(self) -> float:
        return self.timeline.now

    def pass_time(self, seconds: float) -> None:
        self.timeline.run(self.timeline.now + seconds)

    def tell(self, *argv: str, user: str = OWNER) -> str:
        if argv[0] != "scancel":
            pytest.skip(f"a simulated Slurm has no {argv[0]}")
        for job_id in argv[1:]:
            try:
                self._simulated.cancel(int(job_id))
            except SlurmError as error:
                return str(error)
        return ""

    def finish(self, job_id: JobKey) -> SlurmJob:
        """The job ends by itself: no script runs here that could be told to."""
        self._simulated.exited(job_id, 0)
        return self.wait(job_id, lambda job: job.ended and not job.completing, "ended")

    def close(self) -> None:
        self._folder.cleanup()
