"""The elastic Trainer in forked ranks: its gradients, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ones_wrapper import testing

pytest.importorskip("transformers")

from transformers import TrainingArguments

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


def trainer(folder: str = "unused", elastic: dict[str, Any] | None = None, **options: Any) -> Trainer:
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
    return Trainer(Model(), TrainingArguments(**(common | options)), train_dataset=Rows(), elastic=elastic)


def trains(folder: str) -> None:
    one = trainer(folder)
    one.train()
    weights = {name: value.detach() for name, value in one.model.named_parameters()}
    testing.put((weights, [entry["loss"] for entry in one.state.log_history[:-1]], one.state.global_step))


def test_gradients_are_means_over_the_step_s_items(tmp_path: Any) -> None:
    """Protects the result: rows count differently many items, ranks and accumulation steps take differently many rows,
    and the gradient is the mean over all items of the step at any number of ranks, as is the loss that is logged.
    """
    alone, *others = (testing.run(partial(trains, str(tmp_path)), ranks=ranks) for ranks in (1, 3))
    weights, losses, step = alone[0].value
    assert step == 6 and len(losses) == 6  # 23 rows in steps of 8, twice
    for put in others[0]:
        assert put.value[2] == 6 and put.value[1] == pytest.approx(losses, rel=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(put.value[0][name], value, rtol=1e-3, atol=1e-4)


def refuses() -> None:
    """In one process of its own: a Trainer joins its process group for good."""
    with pytest.raises(ValueError, match="max_local_batch"):
        trainer(auto_find_batch_size=True)
    with pytest.raises(ValueError, match="decided by slurm-ones"):
        trainer(train_sampling_strategy="group_by_length")


def test_what_cannot_be_elastic_is_refused() -> None:
    """Protects from a Trainer that would lose samples: each refusal says what to do."""
    testing.run(refuses)
    testing.run(resumes)


def resumes() -> None:
    with pytest.raises(ValueError, match="no checkpoint of its own"):
        trainer().train(resume_from_checkpoint="elsewhere")
