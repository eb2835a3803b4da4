"""Checkpoints that are complete or absent, load at any world size, and contain no code.

Content of `checkpoints/step-N/` in the job's directory:

    manifest.json                  written last: progress, origin, and every file's size and checksum
    tensors-00000.safetensors, …   one file for each rank: its part of every tensor (`safetensors` describes the format)
    rest.pt                        all other state, plain data; `torch.load(weights_only=True)` reads it

A checkpoint is written as `.tmp-step-N`, every file is fsynced, and then it is renamed: a name without a dot is a
complete checkpoint. `torch.distributed.checkpoint` lists the parts that a rank holds, and plans its reads. So a
checkpoint from DDP or FSDP2 loads at another world size, into either of them. With `PartReader`,
`torch.distributed.checkpoint.load` reads a checkpoint, too.
"""

from ones_wrapper.checkpoint.checkpoints import Checkpoints
from ones_wrapper.checkpoint.safetensors import PartReader
from ones_wrapper.checkpoint.state import Failed, Saved, SavedState

__all__ = ["Checkpoints", "Failed", "PartReader", "Saved", "SavedState"]
