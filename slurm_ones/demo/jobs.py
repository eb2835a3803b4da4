"""The jobs of a demo: real trainings here, simulated ones beside them, and the settings of the companion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
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
"""Among the examples of the wrapper."""
BASE_BATCH = 32
PACE_MS, STEP_MS = 5.0, 10.0
"""Sleep of a rank for each sample of its local batch, and for each step: the emulated GPU."""


def comment(most: int) -> str:
    """What the owner of a demo's job allows: up to `most` GPUs, each with the base batch."""
    return f"ones: gpus=1-{most} batch={BASE_BATCH}-{BASE_BATCH * most} array=blocks"


def options(epochs: int, gpus: int, most: int, pace_ms: float) -> list[str]:
    """Of the script of a demo's job that asks for `gpus` GPUs and may have `most`."""
    return [
        f"--epochs={epochs}",
        f"--batch={BASE_BATCH * gpus}",
        f"--max-batch={BASE_BATCH * most}",
        f"--max-local-batch={BASE_BATCH}",
        f"--pace={pace_ms:g}",
        f"--pace-step={STEP_MS:g}",
    ]


@dataclass(frozen=True)
class LocalJob:
    """A training of this machine's own processes, which asks for one GPU.

    It is submitted `at` seconds after the start; all but the first not before that one has grown (`LocalSlurm.grown`).
    """

    name: str
    at: float
    epochs: int
    samples: int = 1536
    """Of an epoch."""

    def comment(self) -> str:
        """What its owner allows."""
        return comment(SLOTS)

    def arguments(self, seed: int) -> list[str]:
        """Of the script."""
        return [*options(self.epochs, 1, SLOTS, PACE_MS), f"--samples={self.samples}", f"--seed={seed}"]


JOBS = (LocalJob("spirals-1", 0.0, 14), LocalJob("spirals-2", 18.0, 5), LocalJob("spirals-3", 32.0, 4))
"""The first has the machine for itself, gives way to the others, and has it back."""
SMALL = (LocalJob("spirals-1", 0.0, 14), LocalJob("spirals-2", 1.0, 2))
"""For tests."""
KINDS_USED = {"resnet18-cifar10": 0.03, "bert-glue": 0.03, "unet-cells": 0.025, "wideresnet-cifar100": 0.01}
"""The kinds of the simulated jobs, and how much shorter than usual they train, so that they end within the demo."""
SIMULATED_JOBS = (
    Submission("sim-resnet18", 1.0, "resnet18-cifar10", 2, 256),
    Submission("sim-bert", 4.0, "bert-glue", 4, 64),
    Submission("sim-unet", 9.0, "unet-cells", 1, 4),
    Submission("sim-wideresnet", 15.0, "wideresnet-cifar100", 2, 256),
    Submission("sim-bert-2", 24.0, "bert-glue", 2, 32),
    Submission("sim-resnet18-2", 31.0, "resnet18-cifar10", 4, 512),
)
SMALL_SIMULATED = 2
"""How many of them there are for tests."""


def simulated_workload(count: int) -> Workload:
    """The first so many simulated jobs."""
    applications = {kind: build(KINDS[kind], length=length) for kind, length in KINDS_USED.items()}
    return Workload("demo", SIMULATED_JOBS[:count], applications)


CLUSTER_SETTINGS = ClusterSettings(
    requeue_delay_s=1.0, schedule_s=0.3, backfill_s=2.0, ending_s=0.3, report_s=1.0, first_report_s=1.0
)
START_S = 3.0
"""What a start costs a simulated job."""

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
