"""Checkpoints that are complete or absent, load at any world size, and hold no code.

`checkpoints/step-N/` in the job's directory:

    manifest.json                  written last: progress, origin, and every file's size and checksum
    tensors-00000.safetensors, …   one file a rank: its part of every tensor (`safetensors` has the format)
    rest.pt                        all other state, plain data; `torch.load(weights_only=True)` reads it

A checkpoint is written as `.tmp-step-N`, every file fsynced, then renamed: a name without a dot is a complete
checkpoint. `torch.distributed.checkpoint` lists which parts a rank holds, and plans its reads. So a checkpoint loads at
another world size, and into DDP or FSDP2 whichever wrote it. `PartReader` lets that library's own `load` read a
checkpoint.
"""

from ones_wrapper.checkpoint.checkpoints import Checkpoints
from ones_wrapper.checkpoint.safetensors import PartReader
from ones_wrapper.checkpoint.state import Failed, Saved, SavedState

__all__ = ["Checkpoints", "Failed", "PartReader", "Saved", "SavedState"]
