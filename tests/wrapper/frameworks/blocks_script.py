"""A small regression in float64, by one of the frameworks: `blocks_script.py transformers|accelerate|lightning`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[3]))  # it is started by its path, from anywhere
from tests.wrapper.pace import pace

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--hurry", type=Path)
parser.add_argument("--step-ms", type=float)
parser.add_argument("--samples", type=int, default=45)
parser.add_argument("--out", type=Path)
parser.add_argument("framework", choices=("transformers", "accelerate", "lightning"))
parser.add_argument("--loads", type=Path, help="the script loads its data as long as there is this file")
args = parser.parse_args()
assert "ONES_NEXT_TERM" not in os.environ
its_run, its_start = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT"))
print(f"begins with {os.environ['WORLD_SIZE']} ranks, start {its_start} of run {its_run}", flush=True)
while args.loads and args.loads.exists():
    time.sleep(0.05)
BATCH, RATE = 8, 0.05
STEPS = args.epochs * -(-args.samples // BATCH)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows and what shall follow from them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(args.samples, 4, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": self.rows[index], "labels": self.rows[index].prod()}


class Model(torch.nn.Module):
    """As the Trainer wants one: with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        pace(args.step_ms, args.hurry, STEP[0] / STEPS)
        return {"loss": mse_loss(self.net(rows)[:, 0], labels)}


STEP = [0]
"""The step under way."""


def note(rank: int, step: int, **what: float) -> None:
    """Keep what a step showed, once."""
    STEP[0] = step
    if rank == 0:
        with Path(f"{args.out}.steps").open("a") as file:
            file.write(json.dumps({"step": step, **what}) + "\n")


def by_transformers(model: Model) -> int:
    from transformers import TrainerCallback, TrainingArguments

    from ones_wrapper.frameworks.transformers import Trainer

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                note(args.process_index, state.global_step, loss=logs["loss"], rate=logs["learning_rate"])

    its = TrainingArguments(
        output_dir=str(args.out.parent / "trainer"), num_train_epochs=args.epochs, per_device_train_batch_size=BATCH,
        learning_rate=RATE, optim="sgd", max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    assert its.world_size == int(os.environ["WORLD_SIZE"])
    Trainer(model, its, train_dataset=Rows(), callbacks=[Note()]).train()
    return int(its.process_index)


def by_accelerate(model: Model) -> int:
    from ones_wrapper.frameworks.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    loader: Any = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    wrapped, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in accelerator.epochs(args.epochs):
        for batch in loader:
            note(accelerator.process_index, accelerator.job.progress.step + 1, rate=schedule.get_last_lr()[0])
            loss = wrapped(**batch)["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
    return int(accelerator.process_index)


def by_lightning(model: Model) -> int:
    import lightning

    from ones_wrapper.frameworks.lightning import ElasticStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            schedule: Any = self.lr_schedulers()
            note(self.global_rank, self.global_step + 1, rate=schedule.get_last_lr()[0])
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
            linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}

    trainer = lightning.Trainer(
        max_epochs=args.epochs, strategy=ElasticStrategy(), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    assert trainer.global_rank == int(os.environ["RANK"])
    trainer.fit(Module(), DataLoader(Rows(), batch_size=BATCH, shuffle=True))
    return int(trainer.global_rank)


trained = Model()
by = {"transformers": by_transformers, "accelerate": by_accelerate, "lightning": by_lightning}
rank = by[args.framework](trained)
if rank == 0:
    numbers = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()]).tolist()
    args.out.write_text(json.dumps({"parameters": numbers}))
