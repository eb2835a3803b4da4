"""The jobs of both demos: ten of a cluster, real or simulated, real trainings here, and the companion's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slurm_ones.policy.contract import Floats
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.profiles import Workload

CLUSTER = "demo"
HERE, SIMULATED = "this-machine", "simulated"
"""The two partitions; the second is the user of its jobs as well."""
SLOTS = 4
"""Ranks that this machine runs at once: its emulated GPUs."""
NODES, GPUS = 4, 4
"""Simulated nodes, and the GPUs of each."""
BLOCKS = 8
"""Tasks of each array, as the templates have it."""
SCRIPT = "spirals.py"
"""File in `scripts/`; each rank runs it, and it needs torch."""
BASE_BATCH, MOST_GPUS = 32, 8
"""Batch of each GPU, and the GPUs that a job may have."""
PACE_MS = {"spirals": 5.0, "cnn": 10.0, "transformer": 12.0}
"""Sleep of a rank for each sample of its local batch, and twice that for each step: the emulated GPU. That of the
cluster's jobs is slow, since a step takes 5 to 10 ms of a processor, and 16 ranks may have two of them."""
SAMPLES, NOISE, PARAMETERS = 1437, 180.0, 8_000
"""Figures of the cluster's models: training samples, gradient noise scale in samples, size; about as they report."""
EXCHANGE_S = {"cnn": 0.002, "transformer": 0.004}
"""Time of a step besides the sleep: this for each of its ranks, and once more."""


@dataclass(frozen=True)
class DemoJob:
    """One job, submitted `at` seconds after the first, with `gpus` GPUs that its user asks for."""

    name: str
    at: float
    epochs: int
    gpus: int = 1
    model: str = "spirals"
    user: str = ""
    samples: int = 1536
    """Samples of an epoch, only of the spirals."""

    def options(self, most: int) -> list[str]:
        """Options of its script, if it may have `most` GPUs: base batch and largest batch follow from its GPUs."""
        return [
            f"--epochs={self.epochs}",
            f"--batch={BASE_BATCH * self.gpus}",
            f"--max-batch={BASE_BATCH * most}",
            f"--max-local-batch={BASE_BATCH}",
            f"--pace={PACE_MS[self.model]:g}",
            f"--pace-step={2 * PACE_MS[self.model]:g}",
        ]


def comment(most: int) -> str:
    """Comment of a demo's job: up to `most` GPUs, each with the base batch."""
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
"""Jobs of `make demo` on a real Slurm, and of `slurm-ones demo` on a simulated one. People who know neither the queue
nor their model's scaling would submit them. Most ask for one GPU and few for many, as in the Philly trace; larger asks
train for longer."""
SHORTER = 0.4
"""Factor on times and epochs in `slurm-ones demo`, which is to last for a minute and a half."""
SIMULATED_JOBS = tuple(replace(job, at=SHORTER * job.at, epochs=round(SHORTER * job.epochs)) for job in ON_CLUSTER)
SMALL_SIMULATED = 2
"""Number of simulated jobs for tests."""
HERE_JOBS = (DemoJob("spirals-1", 0.0, 14), DemoJob("spirals-2", 18.0, 5), DemoJob("spirals-3", 32.0, 4))
"""Real trainings here. The first has the machine for itself, gives way to the others (`LocalSlurm.grown`), and has it
back."""
SMALL = (DemoJob("spirals-1", 0.0, 14), DemoJob("spirals-2", 1.0, 2))
"""Jobs for tests."""


@dataclass(frozen=True)
class Paced:
    """The emulated GPU: it sleeps in proportion to its local batch."""

    model: str

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        """See `Speed`."""
        exchange = np.full(len(local), EXCHANGE_S[self.model] * (gpus + 1))
        return PACE_MS[self.model] * (local + 2) / 1000 + exchange, exchange


def workload(jobs: Sequence[DemoJob]) -> Workload:
    """These jobs for a simulated Slurm. Each is done when its progress is: a batch whose samples are worth less takes
    longer here."""
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


CLUSTER_SETTINGS = ClusterSettings(
    requeue_delay_s=1.0, schedule_s=0.3, backfill_s=2.0, ending_s=0.3, report_s=1.0, first_report_s=1.0
)
START_S = 3.0
"""Time that a start costs a simulated job."""

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
    """The companion's settings, in the demo's folder."""
    path = folder / "ones.toml"
    path.write_text(SETTINGS.format(cluster=CLUSTER, folder=folder, database=database), encoding="utf-8")
    return path
