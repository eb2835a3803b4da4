"""Ranks of test_lightning.py: modules under Lightning's Trainer with the elastic strategy."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ones_wrapper import testing
from ones_wrapper.frameworks.lightning import ElasticStrategy

warnings.filterwarnings("ignore", module="lightning")
ROWS = 23


class Module(lightning.LightningModule):
    """Counts what Lightning does, by steps of the base batch."""

    def __init__(self, rate: float = 0.05, plateau: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.rate, self.plateau = torch.nn.Linear(5, 3), rate, plateau
        self.evaluated: list[int] = []
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_end(self) -> None:
        strategy: Any = self.trainer.strategy
        if not self.trainer.sanity_checking and strategy._steps is not None:
            self.evaluated.append(strategy._steps.base_steps)

    def on_train_epoch_end(self) -> None:
        self.hooks.append("epoch")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        if self.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
        total = self.trainer.estimated_stepping_batches
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}


def data(**options: Any) -> DataLoader[Any]:
    rows = torch.arange(ROWS * 5).view(ROWS, 5) % 7 / 7.0
    given: dict[str, Any] = {"batch_size": 4, "shuffle": True} | options
    return DataLoader(TensorDataset(rows, torch.arange(ROWS) % 3), **given)


def trainer(elastic: dict[str, Any] | None = None, **options: Any) -> lightning.Trainer:
    common: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(strategy=ElasticStrategy(**(elastic or {})), **(common | options))


def trains(elastic: dict[str, Any] | None = None) -> None:
    one, module = trainer(elastic, accumulate_grad_batches=2, gradient_clip_val=0.5), Module()
    one.fit(module, data(), data(shuffle=False))
    schedule: Any = one.lr_scheduler_configs[0].scheduler
    weights = module.net.weight.detach().clone()
    testing.put((weights, schedule.get_last_lr(), one.global_step, module.evaluated[:], module.hooks))
    assert one.validate(module, data(shuffle=False), verbose=False)


def steps(options: dict[str, Any], expected: tuple[list[int], int]) -> None:
    one, module = trainer(**options), Module()
    one.fit(module, data(), data(shuffle=False))
    assert (module.evaluated, one.global_step) == expected


class Interrupt(Callback):
    """Asks the first start to stop, in the midst of the second epoch; the next step ends it."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if os.environ["SLURM_RESTART_COUNT"] == "0" and trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)


def stops_early() -> int | None:
    stopping = EarlyStopping("loss", patience=2, min_delta=1.0)
    one, module = trainer(max_epochs=9, callbacks=[Interrupt(), stopping]), Module(rate=0.0, plateau=True)
    found = "last.ckpt" if os.environ["SLURM_RESTART_COUNT"] != "0" else None  # what `ckpt_path="last"` finds
    try:
        one.fit(module, data(), data(shuffle=False), ckpt_path=found)
    except SystemExit as leaving:
        assert leaving.code == 143 and one.global_step in (8, 9) and one.current_epoch == 1
        return 2
    assert (one.current_epoch, stopping.wait_count, one.global_step) == (3, 2, 18)
    config: Any = one.lr_scheduler_configs[0]
    assert config.scheduler.num_bad_epochs == 2
    return None


def goes_on() -> int | None:
    start = int(os.environ["SLURM_RESTART_COUNT"])
    one, module = trainer(max_epochs=(1, 3, 3)[start]), Module()
    one.fit(module, data(), data(shuffle=False))
    assert len(module.hooks) == (1, 2, 0)[start]
    return 1 if start < 2 else None


def refuses() -> None:
    with pytest.raises(ValueError, match="limit_train_batches"):
        trainer(limit_train_batches=3).fit(Module(), data())
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="write the loop yourself"):
        trainer().fit(manual, data())
    with pytest.raises(ValueError, match="one torch DataLoader"):
        trainer().fit(Module(), [data(), data()])
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        trainer().fit(Module(), data(shuffle=None, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)))
    with pytest.raises(ValueError, match="no checkpoint of its own"):
        trainer().fit(Module(), data(), ckpt_path="last.ckpt")


class Divides(Module):
    """As Lightning's own example of ImageNet."""

    def setup(self, stage: str) -> None:
        self.batch = 4 // self.trainer.strategy.world_size  # type: ignore[attr-defined]
