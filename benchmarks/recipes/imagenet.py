"""An image classifier in the manner of the ImageNet example: samplers, validation over ranks, a checkpoint."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16, help="of all GPUs together")
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

generator = torch.Generator().manual_seed(0)
images = torch.randn(260, 3, 8, 8, generator=generator)
labels = (images.mean((1, 2, 3)) > 0).long()
train_set, val_set = TensorDataset(images[:200], labels[:200]), TensorDataset(images[200:], labels[200:])


def train(loader, model, criterion, optimizer, device):
    model.train()
    for x, y in loader:
        loss = criterion(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            counts += torch.tensor([(model(x.to(device)).argmax(1).cpu() == y).sum(), len(y)], device=device)
    if dist.is_initialized():
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


distributed = "WORLD_SIZE" in os.environ
if distributed:
    dist.init_process_group()
    args.batch_size //= dist.get_world_size()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)).to(device)
criterion = nn.CrossEntropyLoss().to(device)
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
val_loader = DataLoader(val_set, batch_size=args.batch_size)
start, best = 0, 0.0
if Path("checkpoint.pth").is_file():
    saved = torch.load("checkpoint.pth")
    start, best = saved["epoch"], saved["best"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
if distributed:
    model = DistributedDataParallel(model)
train_sampler = DistributedSampler(train_set) if distributed else None
train_loader = DataLoader(train_set, args.batch_size, shuffle=train_sampler is None, sampler=train_sampler)

for epoch in range(start, args.epochs):
    if distributed:
        train_sampler.set_epoch(epoch)
    train(train_loader, model, criterion, optimizer, device)
    accuracy = validate(val_loader, model, device)
    scheduler.step()
    best = max(best, accuracy)
    if not distributed or dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}, best {best:.3f}", flush=True)
        state = {"epoch": epoch + 1, "best": best, "model": model.state_dict()}
        torch.save(state | {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, "checkpoint.pth")
