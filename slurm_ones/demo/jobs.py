"""Jobs of both demos (`make demo` on a cluster, `slurm-ones demo` on this machine), and the companion's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.profiles import Workload

CLUSTER = "demo"
SIMULATED = "simulated"
"""Partition and user of the simulated jobs."""
SLOTS = 4
"""Number of emulated GPUs on this machine, each with one rank."""
BASE_BATCH, MOST_GPUS = 32, 8
"""Base batch per GPU, and largest number of GPUs of a job."""
PACE_MS = {"spirals": 5.0, "cnn": 10.0, "transformer": 12.0}
"""Milliseconds that a rank sleeps in each step, in place of computing, for each sample of its local batch plus 2. On a
cluster it sleeps longer, since 16 ranks may share two CPUs, and a step needs 5 to 10 ms of CPU time."""
SAMPLES, NOISE, PARAMETERS = 1437, 180.0, 8_000
"""Simulated models: training samples, gradient noise scale in samples, and parameters, close to the real ones."""
EXCHANGE_S = {"cnn": 0.002, "transformer": 0.004}
"""Seconds that an emulated exchange takes in a step, for each rank and once more."""


@dataclass(frozen=True)
class DemoJob:
    """Job of a demo. It is submitted `at` seconds after the demo's first job, and its user requests `gpus` GPUs."""

    name: str
    at: float
    epochs: int
    gpus: int = 1
    model: str = "spirals"
    user: str = ""
    samples: int = 1536
    """Number of samples in an epoch; used only by real trainings on this machine."""

    def options(self, most: int) -> list[str]:
        """Return the training script's arguments. Its batches are proportional to the requested GPUs and to `most`."""
        return [
            f"--epochs={self.epochs}",
            f"--batch={BASE_BATCH * self.gpus}",
            f"--max-batch={BASE_BATCH * most}",
            f"--max-local-batch={BASE_BATCH}",
            f"--pace={PACE_MS[self.model]:g}",
            f"--pace-step={2 * PACE_MS[self.model]:g}",
        ]


def comment(most: int) -> str:
    """Return the comment with which a demo's job opts in: 1 to `most` GPUs, and the base batch per GPU."""
    return f"ones: gpus=1-{most} batch={BASE_BATCH}-{BASE_BATCH * most} array=blocks"


ON_CLUSTER = (
    DemoJob("cnn-1", 0, 5, 1, "cnn", "alice"),
    DemoJob("vit-1", 8, 6, 2, "transformer", "bob"),
    DemoJob("cnn-2", 18, 5, 1, "cnn", "alice"),
    DemoJob("vit-2", 28, 4, 1, "transformer", "alice"),
    DemoJob("cnn-3", 40, 9, 4, "cnn", "bob"),
    DemoJob("vit-3", 50, 4, 1, "transformer", "bob"),
    DemoJob("cnn-4", 62, 5, 1, "cnn", "alice"),
    DemoJob("vit-4", 74, 6, 2, "transformer", "alice"),
    DemoJob("cnn-5", 86, 4, 1, "cnn", "bob"),
    DemoJob("vit-5", 100, 8, 4, "transformer", "bob"),
)
"""Jobs of `make demo` on a real Slurm, and of `slurm-ones demo` on a simulated one. Their requests depend neither on
the queue nor on how the models scale. As in the Philly trace, most request one GPU, a few request many, and jobs with
more GPUs train longer."""
SHORTER = 0.4
"""Factor on the cluster jobs' submission times and epochs, with which `slurm-ones demo` takes about 90 s."""
SIMULATED_JOBS = tuple(replace(job, at=SHORTER * job.at, epochs=round(SHORTER * job.epochs)) for job in ON_CLUSTER)
SMALL_SIMULATED = 2
"""Number of simulated jobs in tests."""
HERE_JOBS = (DemoJob("spirals-1", 0.0, 14), DemoJob("spirals-2", 18.0, 5), DemoJob("spirals-3", 32.0, 4))
"""Real trainings on this machine. The first grows, shrinks for later ones (`LocalSlurm.grown`), and grows again."""
SMALL = (DemoJob("spirals-1", 0.0, 14), DemoJob("spirals-2", 1.0, 2))
"""Real trainings on this machine, in tests."""


@dataclass(frozen=True)
class Paced:
    """Speed of an emulated GPU: the compute time is linear in the local batch."""

    model: str

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        exchange = np.full(len(local), EXCHANGE_S[self.model] * (gpus + 1))
        return PACE_MS[self.model] * (local + 2) / 1000 + exchange, exchange


def workload(jobs: Sequence[DemoJob]) -> Workload:
    """Return these jobs as a workload. A job ends at a given progress, so an inefficient batch makes it take longer."""
    return Workload(
        "demo",
        tuple(Submission(job.name, job.at, job.name, job.gpus, BASE_BATCH * job.gpus) for job in jobs),
        {job.name: _application(job) for job in jobs},
    )


def _application(job: DemoJob) -> Application:
    base = BASE_BATCH * job.gpus
    rises = 0.97 - 0.8 * 0.7 ** np.arange(1.0, job.epochs + 1)
    return Application(
        name=job.name,
        speed=Paced(job.model),
        base_batch=base,
        max_batch=BASE_BATCH * MOST_GPUS,
        max_local_batch=BASE_BATCH,
        max_gpus=MOST_GPUS,
        ends=SAMPLES * np.arange(1.0, job.epochs + 1),
        batches=np.array([base, 4 * BASE_BATCH * MOST_GPUS]),
        sqr=np.ones((job.epochs, 2)),
        var=np.full((job.epochs, 2), NOISE / base),
        metric=np.column_stack([rises, rises]),
        parameters=PARAMETERS,
    )


SETTINGS = """\
cluster = "{cluster}"
database = "{database}"
client = "slurm_ones.demo.remote:RemoteClient"
mode = "act"
stop_file = "{folder}/stop"
tick_s = 2
[policy_options]
# Jobs this short: with the defaults, which are meant for jobs of hours, no resize would be repaid.
horizon_share = 2.0
tenure = 10.0
[resize]
dwell_s = 4
max_wait_s = 30
advance_s = 0.3
leave_s = 2
[limits]
near_end_s = 5
"""


def write_settings(folder: Path, database: str) -> Path:
    """Write the companion's settings into the demo's folder, and return the file's path."""
    path = folder / "ones.toml"
    path.write_text(SETTINGS.format(cluster=CLUSTER, folder=folder, database=database), encoding="utf-8")
    return path
