"""Hugging Face's Trainer on a small language model of bytes, elastic by the edits in docs/trainer.md."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ones_wrapper.frameworks.transformers import Trainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=600)
args = parser.parse_args()


class Text(Dataset):
    """Windows of the standard library's source, in bytes."""

    def __init__(self, samples: int, length: int = 32) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
        text = b"".join(path.read_bytes() for path in files)[: samples * length]
        self.windows = torch.tensor(list(text)).view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="trainer-output",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Text(args.samples),
    eval_dataset=Text(64),
    elastic={"max_batch": 64, "max_local_batch": 32},
)
trainer.train()
trainer.save_state()
if trainer.is_world_process_zero():
    trainer.save_model("trainer-model")
