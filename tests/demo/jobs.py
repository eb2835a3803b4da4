"""The ten jobs of the demo: what people who know neither the queue nor their model's scaling would submit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_ones.demo.jobs import comment, options

TEMPLATE, PLAIN = Path("sbatch_templates/ddp.sbatch"), Path("tests/endtoend/plain.sbatch")
"""With slurm-ones, of blocks; and for Slurm alone, which makes no use of any but the first."""
EXAMPLES = Path("wrapper/ones_wrapper/examples")
LEARNING_RATE = {"cnn": 0.02, "transformer": 0.001}
PACE_MS = {"cnn": 5.0, "transformer": 6.0}
"""Sleep per sample of a rank's local batch: the emulated GPU."""
MOST_GPUS = 8


@dataclass(frozen=True)
class DemoJob:
    """One job, submitted `at` seconds after the first."""

    name: str
    user: str
    model: str
    at: float
    gpus: int
    """GPUs that its user asks for, with slurm-ones and without."""
    epochs: int


JOBS = (
    DemoJob("cnn-1", "alice", "cnn", 0, 1, 9),
    DemoJob("vit-1", "bob", "transformer", 8, 2, 12),
    DemoJob("cnn-2", "alice", "cnn", 18, 1, 9),
    DemoJob("vit-2", "alice", "transformer", 28, 1, 8),
    DemoJob("cnn-3", "bob", "cnn", 40, 4, 18),
    DemoJob("vit-3", "bob", "transformer", 50, 1, 8),
    DemoJob("cnn-4", "alice", "cnn", 62, 1, 9),
    DemoJob("vit-4", "alice", "transformer", 74, 2, 12),
    DemoJob("cnn-5", "bob", "cnn", 86, 1, 8),
    DemoJob("vit-5", "bob", "transformer", 100, 4, 15),
)
"""Most ask for one GPU and few for many, as in the Philly trace; larger asks train for longer."""


def arguments(job: DemoJob, top: Path, *, elastic: bool) -> list[str]:
    """sbatch's arguments: the user's options, the template, the script and its own.

    Its user scales batch and learning rate to the GPUs asked for, by the same linear rule that the wrapper applies at
    each size. Both ways the job is the same but that it opts in by its comment, and is an array of blocks.
    """
    gpus = job.gpus
    nodes, per_node = (1, gpus) if gpus <= 4 else (gpus // 4, 4)
    script = top / EXAMPLES / f"{job.model}.py"
    return [
        f"--job-name={job.name}",
        f"--nodes={nodes}",
        f"--gres=gpu:{per_node}",
        "--cpus-per-gpu=1",
        f"--comment={comment(MOST_GPUS) if elastic else ''}",
        str(top / (TEMPLATE if elastic else PLAIN)),
        # Imported once a node: four ranks that import scikit-learn each would keep this machine's cores busy.
        "--preload",
        "sklearn.datasets",
        str(script),
        *options(job.epochs, gpus, MOST_GPUS, PACE_MS[job.model]),
        f"--lr={LEARNING_RATE[job.model] * gpus:g}",
    ]
