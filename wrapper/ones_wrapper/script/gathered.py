"""Check of the script's own collectives, since gathering a batch fails if ranks have different numbers of samples.

gloo aborts a rank and returns memory's old content on another; NCCL hangs, or reads beyond the tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ones_wrapper.script.line import is_script, line

NAMES = ("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "all_to_all_single", "all_to_all")
"""Collectives of torch.distributed that need the same number of rows from all ranks."""
_LIBRARIES = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "ones_wrapper.")

MAY = (
    "{name}{line} gathers the samples of a batch. Ranks may have unequally many at another number of GPUs or "
    "in an epoch's last step: write ones.init(shares='equal')"
)
EVALUATED = (
    "{name}{line} gathers what job.evaluate gave, and ranks may have unequally many samples of it: pad it, take "
    "all_gather_object, or put sums together by job.mean"
)
CANNOT = (
    "{name}{line} gathers the samples of a batch, and ranks have unequally many of this step ({samples} here): write "
    "ones.init(shares='equal')"
)


class BatchShares(NamedTuple):
    """Number of this rank's samples in a pass, compared with other ranks'."""

    samples: int
    alike: bool
    say: Callable[[str], None]


_shares: Callable[[], BatchShares | None] | None = None

_evaluated: BatchShares | None = None


def evaluates(shares: BatchShares) -> None:
    """Note this rank's share of the samples to evaluate on."""
    global _evaluated
    _evaluated = shares


def watch(shares: Callable[[], BatchShares | None] | None) -> None:
    """Check from now on that the script's collectives fit the ranks' `shares` of a pass; None ends the checks."""
    global _shares
    _shares = shares
    for name in NAMES if shares is not None else ():
        original = getattr(dist, name, None)
        if original is not None and not hasattr(original, "looked_at"):
            found = _looked_at(name, original)
            for module in [dist, *sys.modules.values()]:  # a script may have imported the function itself
                if getattr(module, "__dict__", {}).get(name) is original:
                    setattr(module, name, found)


def _looked_at(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def collective(*args: Any, **options: Any) -> Any:
        if _shares is not None:
            _look(name, (*args, *options.values()), sys._getframe(1))
        return original(*args, **options)

    collective.looked_at = True  # type: ignore[attr-defined]
    return collective


def _look(name: str, given: tuple[Any, ...], caller: FrameType) -> None:
    library = caller.f_globals.get("__name__", "").startswith(_LIBRARIES)
    shares = _shares() if _shares is not None and not library else None
    if shares is None and _evaluated is not None and is_script(caller.f_code):
        if any(isinstance(one, torch.Tensor) and one.ndim and len(one) == _evaluated.samples for one in given):
            _evaluated.say(EVALUATED.replace("{name}", name))
        return
    # Of one dimension are figures, too, as many as there are samples by chance.
    if shares is None or not any(
        isinstance(one, torch.Tensor) and one.ndim > 1 and len(one) == shares.samples for one in given
    ):
        return
    if not shares.alike:
        raise RuntimeError(CANNOT.format(name=name, line=line(), samples=shares.samples))
    shares.say(MAY.replace("{name}", name))
