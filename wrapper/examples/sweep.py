"""One trial of an Optuna sweep as an elastic job: each task of a job array asks for its own hyper-parameters.

    sbatch --array=0-15 job.sbatch sweep.py --study /scratch/me/sweep.log

A trial continues after a resize: its number and hyper-parameters are in the checkpoint.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import ones_wrapper as ones

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--study", default="sweep.log", help="file of the study, shared by all tasks")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
data = TensorDataset(images, torch.tensor(digits.target))
train, test = random_split(data, [1437, 360], generator=torch.Generator().manual_seed(0))

job = ones.init(batch=32, max_batch=256, max_local_batch=64, epochs=args.epochs)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
trial = {"number": -1, "lr": 0.0}
model, optimizer, trial, loader = job.prepare(model, optimizer, trial, train)

# Rank 0 alone speaks to the study.
storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(args.study))
study = None
if job.rank == 0:
    study = optuna.create_study(study_name="digits", storage=storage, direction="maximize", load_if_exists=True)
if trial["number"] < 0:  # not where a resize has the script start again
    if study is not None:
        asked = study.ask()
        trial.update(number=asked.number, lr=asked.suggest_float("lr", 1e-3, 1.0, log=True))
    trial["lr"] = job.mean(trial["lr"], int(job.rank == 0))
    for group in optimizer.param_groups:
        group["lr"] = trial["lr"]

accuracy = None
for _ in job.epochs():
    model.train()
    for x, y in loader:
        loss = cross_entropy(model(x.to(job.device)), y.to(job.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = [model(x.to(job.device)).argmax(1).cpu() == y for x, y in job.evaluate(test)]
        accuracy = job.mean(sum(hit.sum() for hit in hits), sum(len(hit) for hit in hits))
    job.report(accuracy=accuracy)
if study is not None and accuracy is not None:  # the latter where the training had ended before
    study.tell(trial["number"], accuracy)
    print(f"trial {trial['number']}: learning rate {trial['lr']:.4g}, accuracy {accuracy:.3f}", flush=True)
