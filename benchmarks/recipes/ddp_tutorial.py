"""A trainer class in the manner of PyTorch's DDP tutorial: a process group, a sampler, snapshots."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, snapshot):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model, self.loader, self.optimizer, self.snapshot, self.done = model, loader, optimizer, snapshot, 0
        if Path(snapshot).exists():
            saved = torch.load(snapshot)
            self.model.load_state_dict(saved["model"])
            self.done = saved["epochs"]
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)

    def run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        if dist.is_initialized():
            self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            self.run_batch(x, y)

    def train(self, epochs):
        for epoch in range(self.done, epochs):
            self.run_epoch(epoch)
            if self.rank == 0:
                inside = self.model.module if dist.is_initialized() else self.model
                torch.save({"model": inside.state_dict(), "epochs": epoch + 1}, self.snapshot)
                print(f"epoch {epoch} is saved", flush=True)


def load_objects():
    torch.manual_seed(0)
    x = torch.rand(200, 20, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(20, 1)
    return TensorDataset(x, x.sum(1, keepdim=True)), model, torch.optim.SGD(model.parameters(), lr=1e-3)


def main(epochs, batch):
    data, model, optimizer = load_objects()
    if "RANK" in os.environ:
        dist.init_process_group()
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    loader = DataLoader(data, batch, shuffle=sampler is None, sampler=sampler)
    Trainer(model, loader, optimizer, "snapshot.pt").train(epochs)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(epochs=3, batch=16)
