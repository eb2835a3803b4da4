"""A GAN on digits: two models and two optimizers that step in turns, one more often than the other, and plain
values."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

import ones_wrapper as ones

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--critic", type=int, default=2, help="steps of the discriminator for one of the generator")
args = parser.parse_args()

NOISE = 16
images, _ = load_digits(return_X_y=True)
real = torch.tensor(images, dtype=torch.float32) / 8 - 1

job = ones.init(batch=64, max_batch=512, max_local_batch=256, epochs=args.epochs)
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
models = {"g": job.ddp(generator), "d": job.ddp(discriminator)}
optimizers = {
    name: torch.optim.Adam(model.parameters(), lr=0.002, betas=(0.5, 0.999)) for name, model in models.items()
}
counters = {"best": float("inf"), "generated": 0}
optimizers, counters = job.register(model=models, optimizer=optimizers, counters=counters)
loader = job.loader(TensorDataset(real))


def loss_of(scores: torch.Tensor, label: float) -> torch.Tensor:
    """Return the cross-entropy of the scores to `label`: 1 for real, 0 for generated."""
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


for epoch in job.epochs():
    for (x,) in loader:
        noise = torch.randn(len(x), NOISE, device=job.device)
        made = models["g"](noise)
        for _ in range(args.critic):
            # Both in one forward pass, and one backward pass for each step.
            scores = models["d"](torch.cat([x.to(job.device), made.detach()]))
            loss = loss_of(scores[: len(x)], 1.0) + loss_of(scores[len(x) :], 0.0)
            optimizers["d"].zero_grad()
            loss.backward()
            optimizers["d"].step()
        models["d"].requires_grad_(False)  # the generator's loss does not train it
        loss = loss_of(models["d"](made), 1.0)
        optimizers["g"].zero_grad()
        loss.backward()
        optimizers["g"].step()
        models["d"].requires_grad_(True)
        counters["generated"] += len(x) * job.world
        job.loss(loss)
    with torch.no_grad():
        sample = job.unwrap(models["g"])(torch.randn(256, NOISE, device=job.device)).cpu()
    distance = float((sample.mean(0) - real.mean(0)).square().mean())
    counters["best"] = min(counters["best"], distance)
    if job.rank == 0:
        print(f"epoch {epoch}: distance {distance:.4f}, best {counters['best']:.4f}, {job.world} GPUs", flush=True)
    job.report(accuracy=1.0 / (1.0 + distance))
