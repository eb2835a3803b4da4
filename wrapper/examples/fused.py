"""A sweep over learning rates as one job: the members are trained as one model, on scikit-learn's digits.

    python fused.py --rates 0.003 0.01 0.03 0.1 --stop-after 3

After `--stop-after` epochs the worse half of the members is stopped. At the end `results/` has a file for each member,
which an ordinary script loads.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from ones_wrapper.strategies.fusion import Fused

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1])
parser.add_argument("--stop-after", type=int, default=0, metavar="EPOCHS", help="0: no member is stopped")
parser.add_argument("--results", default="results", help="folder for the members' models")
parser.add_argument("--pace", type=float, default=0.0, metavar="MS", help="sleep per sample, as a GPU would compute")
parser.add_argument("--double", action="store_true", help="compute in double precision")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.double else torch.float32)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).flatten(1) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(labels)) % 5 == 0
train, test = TensorDataset(images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])

names = [f"member{index}" for index in range(len(args.rates))]
job = ones.init(batch=32, max_batch=256, max_local_batch=64, epochs=args.epochs, strategy=Fused(members=len(names)))
models, optimizers, schedules = {}, {}, {}
for name, rate in zip(names, args.rates, strict=True):
    torch.manual_seed(0)
    models[name] = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizers[name] = torch.optim.SGD(models[name].parameters(), lr=rate, momentum=0.9)
    schedules[name] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[name], T_max=args.epochs)

fused, members = ones.strategies.fuse(models, optimizers, loss=cross_entropy)
model = job.ddp(fused)
optimizer, schedules = job.register(model=model, optimizer=members, schedules=schedules)
loader = job.loader(train)
for epoch in job.epochs():
    model.train()
    for x, y in loader:
        losses = model(x.to(job.device), y.to(job.device))
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        job.loss(losses.detach().mean())
        time.sleep(args.pace * len(y) / 1000)
    for schedule in schedules.values():
        schedule.step()
    model.eval()
    with torch.no_grad():
        x, y = (tensor.to(job.device) for tensor in test)
        accuracies = (fused(x).argmax(2) == y).double().mean(1).tolist()
    if epoch + 1 == args.stop_after:
        for row in sorted(range(len(names)), key=accuracies.__getitem__)[: len(names) // 2]:
            fused.stop(names[row])
    if job.rank == 0:
        shown = ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in zip(names, accuracies, strict=True))
        print(f"epoch {epoch}: {shown}; batch {job.batch} on {job.world} ranks", flush=True)
    job.report(accuracy=max(accuracies))
if job.rank == 0:
    members.save(args.results)
