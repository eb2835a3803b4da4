"""Hints to a script's owner on settings and calls that are probably a mistake.

A hint is only logged, and training continues. A call that would certainly fail raises an error instead.
"""

from __future__ import annotations

from ones_wrapper.process.log import log
from ones_wrapper.protocol import Spec

NO_STEPS = 20
"""Number of consecutive steps without an optimizer's step before the hint. A gradient scaler may skip the first few."""


def look_at(spec: Spec) -> None:
    """Log hints about the sizes in a spec."""
    if 0 < spec.dataset < spec.base_batch:
        log(
            f"init's batch={spec.base_batch} is larger than the dataset ({spec.dataset} samples), so that each epoch "
            "is one step: choose a smaller batch, or look whether the dataset is complete"
        )
    if not spec.epochs:
        log("init has no epochs=…, so job.epochs() has no end and nobody knows how far the job is: say epochs=N")


UNSEEDED = (
    "a launcher other than ones-run started the ranks, so each rank hashes texts differently, and so does each "
    "start: set PYTHONHASHSEED=0 in the batch script, and seed what the script draws. Otherwise splits and classes "
    "differ"
)


def finished(epoch: int, epochs: int, left: bool) -> str:
    """Return the message that the training is already finished."""
    done = f"{epoch} of {epochs or 'any number of'} epochs"
    if left:
        done += ", where the script left job.epochs()"
    return (
        f"this run is finished ({done}): raise epochs to train on, or set ONES_JOB_DIR to begin another training, for "
        "example with another seed"
    )


LEFT = (
    "the script caught an error that left job.epochs(), and then ended: no last checkpoint was written, so a restart "
    "trains again from the previous one. Leave the loop by break"
)

OTHERS_LEFT = (
    "another rank left job.epochs(), so this one does, too: decide by a number that is equal on all ranks, such as a "
    "result of job.mean"
)
SIGNALLED = (
    "the script left job.epochs() after a signal, so the training does not count as finished: the next start "
    "continues it. The script need not write a checkpoint at a signal, or requeue the job: ones-run does both"
)


GROUPS_ADDED = (
    "{name}.add_param_group was called after job.prepare or job.register, so no checkpoint would fit the next start: "
    "add all groups before, and then freeze those that train later (requires_grad_(False))"
)
HOLDS_NEXT = (
    "blocks wait until the epoch ends to join or leave: the script requests its next batch before it trains on the "
    "present one{line}, and that batch is cut for the present ranks. Fetch ahead by num_workers=N instead"
)
NOT_STEPPED = (
    "the optimizer has not stepped by step {step}, so nothing is learned: call step() of the optimizer that "
    "job.prepare or job.register returned, in each turn of the loop"
)


def no_cuda(error: BaseException, device: str) -> str:
    """Return a hint for torch's error when a script uses CUDA on a rank without it; empty for any other error."""
    if device != "cpu" or not isinstance(error, (AssertionError, RuntimeError)):
        return ""
    text = str(error)
    if not any(words in text for words in ("not compiled with CUDA", "No CUDA GPUs", "Found no NVIDIA")):
        return ""
    return (
        "the script asks for CUDA, and this rank has none: write job.device in place of 'cuda' and .cuda(), and check "
        "that the job asked for GPUs (--gres=gpu:N), and that this torch is built for CUDA"
    )
