"""Ranks of test_trainer.py: models and data under the elastic Trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from ones_wrapper import testing
from ones_wrapper.frameworks.transformers import Trainer

ITEMS = 23


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows whose labels count from one to six items."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = torch.arange(6) * (index + 1) % 11
        labels = torch.where(torch.arange(6) <= index % 6, (rows + index) % 11, -100)
        return {"rows": rows, "labels": labels}


class Model(nn.Module):
    """A model that takes the number of items, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def forward(self, rows: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        reduction = "sum" if num_items_in_batch is not None else "mean"
        loss = nn.functional.cross_entropy(self.inner(rows).flatten(0, 1), labels.flatten(), reduction=reduction)
        return {"loss": loss / (num_items_in_batch if num_items_in_batch is not None else 1)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same rows as a stream without length, which can skip."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Rows()[index] for index in range(self.start, ITEMS))

    def skip(self, n: int) -> Stream:
        return type(self)(self.start + n)


class Ragged(Stream):
    """The same rows without what no label counts, so of several lengths."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for row in super().__iter__():
            counted = row["labels"] >= 0
            yield {name: values[counted] for name, values in row.items()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    padding = {"rows": 0, "labels": -100}
    return {name: pad_sequence([row[name] for row in rows], True, value) for name, value in padding.items()}


class Interrupt(TrainerCallback):
    """Asks the first start to stop, after the first step; the second step ends it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if os.environ["SLURM_RESTART_COUNT"] == "0" and state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trainer(
    folder: str = "unused",
    *,
    elastic: dict[str, Any] | None = None,
    data: Any = None,
    callbacks: Sequence[Any] = (),
    collator: Any = None,
    **options: Any,
) -> Trainer:
    common = {
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        Model(),
        TrainingArguments(**(common | options)),
        data_collator=collator,
        train_dataset=data or Rows(),
        eval_dataset=Rows() if "eval_strategy" in options else None,
        callbacks=[Interrupt(), *callbacks] if callbacks or data else None,
        elastic=elastic,
    )


def interrupted(one: Trainer) -> int | None:
    """Train; the first start ends in its midst, and the next has two ranks."""
    try:
        one.train()
    except SystemExit as leaving:
        assert leaving.code == 143 and one.state.global_step == 2
        return 2
    return None


def trains(folder: str) -> None:
    one = trainer(folder)
    one.train()
    weights = {name: value.detach() for name, value in one.model.named_parameters()}
    testing.put((weights, [entry["loss"] for entry in one.state.log_history[:-1]], one.state.global_step))


def stops_early(folder: str) -> int | None:
    one = trainer(
        folder,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        learning_rate=0.0,
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        **{
            f"{kind}_{what}": value
            for kind in ("eval", "save")
            for what, value in (("strategy", "steps"), ("steps", 1))
        },
    )
    again = interrupted(one)
    if again is None:
        assert [entry["step"] for entry in one.state.log_history if "eval_loss" in entry] == [1, 2, 3]
        assert one.state.best_global_step == 1 and one.state.best_model_checkpoint
        assert one.lr_scheduler.num_bad_epochs == 2
    return again


def goes_on(folder: str) -> int | None:
    start = int(os.environ["SLURM_RESTART_COUNT"])
    one = trainer(folder, num_train_epochs=(1, 3, 3)[start])
    before = one.train().global_step
    assert (before, one.job.progress.epoch) == ((3, 1), (9, 3), (9, 3))[start]
    return 1 if start < 2 else None


def streams(folder: str) -> int | None:
    one = trainer(folder, data=Stream(), max_steps=5)
    again = interrupted(one)
    if again is None:
        assert [entry["step"] for entry in one.state.log_history] == [1, 2, 3, 4, 5, 5]
        assert (one.job.progress.epoch, one.job.progress.samples) == (1, ITEMS + 16)
    return again


def collates(folder: str, data: Any, collator: Any) -> int | None:
    one = trainer(folder, data=data, collator=collator, max_steps=5)
    again = interrupted(one)
    if again is None:
        testing.put({name: value.detach() for name, value in one.model.named_parameters()})
    return again


def refuses() -> None:
    """In one process of its own: a Trainer joins its process group for good."""
    with pytest.raises(ValueError, match="max_local_batch"):
        trainer(auto_find_batch_size=True)
    with pytest.raises(ValueError, match="decided by slurm-ones"):
        trainer(train_sampling_strategy="group_by_length")


def resumes() -> None:
    with pytest.raises(ValueError, match="no checkpoint of its own"):
        trainer().train(resume_from_checkpoint="elsewhere")


class Own(Trainer):
    """A subclass as research code has it."""

    passes = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert type(inputs) is dict
        self.passes += 1
        return super().training_step(model, inputs, num_items_in_batch)

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, shuffle=True)  # type: ignore[arg-type]


class Sampled(Trainer):
    """One whose DataLoader says itself which samples a step uses."""

    def get_train_dataloader(self) -> Any:
        return [Rows()[0]]


def trains_as(kind: type[Trainer]) -> None:
    one = trainer()
    one.__class__ = kind
    one.train()
    testing.put((getattr(one, "passes", 6), [p.detach().clone() for p in one.model.parameters()]))  # type: ignore[union-attr]
