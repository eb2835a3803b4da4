"""A GAN that carries all that a script may: run by `ones-run -m tests.endtoend.carried FOLDER`.

Two models and optimizers, a dict of plain values, a file that a resume cuts back, evaluation over the ranks, batches
that are multiples of 8, whole batches alone, a name for loggers. Rank 0 leaves `log.csv`, with a line a step, and
`found.pt`. Steps take time until there is `hurry`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch

import ones_wrapper as ones
from tests.wrapper import gan
from tests.wrapper.pace import pace

EPOCHS = 12
PART = 8
"""Global batches are multiples of it."""


def evaluated(job: ones.Job, net: torch.nn.Module) -> float:
    """The mean of the discriminator over all samples, each rank's share taken by itself."""
    with torch.no_grad():
        parts = [net(x) for x, _ in job.evaluate(gan.data(), batch=7)]
    return job.mean(sum(part.sum() for part in parts), sum(len(part) for part in parts))


def main(folder: Path) -> None:
    """Train, and leave what was found."""
    job = ones.init(batch=gan.BATCH, max_batch=64, max_local_batch=64, multiple_of=PART, epochs=EPOCHS, scale_lr=False)
    models = {name: job.ddp(model) for name, model in gan.made(job.rank).items()}
    own = {"steps": 0, "means": [], "errors": []}
    by, counters = job.register(model=models, optimizer=gan.optimizers(models), counters=own)
    loader = job.loader(gan.data(), seed=gan.SEED, drop_last=True)
    log = job.open(folder / "log.csv")
    if job.progress.step == 0:
        print("step", "counted", "world", "batch", "run_id", sep=",", file=log)
    rows, net = csv.writer(log), job.unwrap(models["d"])
    for _ in job.epochs():
        for x, z in loader:
            pace(400.0, folder / "hurry", job.progress.epoch / EPOCHS)
            rows.writerow([job.progress.step, counters["steps"], job.world, job.batch, job.run_id])
            gan.turn(models, by, x, z, counters["steps"])
            counters["steps"] += 1
        mean = evaluated(job, net)
        with torch.no_grad():
            counters["errors"].append(abs(mean - float(net(gan.data().tensors[0]).mean())))
        counters["means"].append(mean)
    if job.rank == 0:
        nets = {name: job.unwrap(model) for name, model in models.items()}
        torch.save((gan.parameters(nets), counters), folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
