"""Lightning on a small network, digits, elastic by the edits in docs/trainer.md."""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ones_wrapper.frameworks.lightning import ElasticStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

lightning.seed_everything(0)
trainer = lightning.Trainer(
    max_epochs=args.epochs,
    gradient_clip_val=1.0,
    strategy=ElasticStrategy(max_batch=256, max_local_batch=64),
    logger=CSVLogger("logs"),
    callbacks=[ModelCheckpoint("best", monitor="val_accuracy", mode="max")],
    enable_progress_bar=False,
    log_every_n_steps=10,
)
trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64))
trainer.save_checkpoint("digits.ckpt")
