"""A script's loop over epochs, and the way in which it was left."""

from __future__ import annotations

import dis
import inspect
from types import FrameType

_DROPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}


def left_on_purpose(frame: FrameType | None) -> bool:
    """Tell if the frame in which a loop's iterator was dropped is at a `break` or `return`, which drop it themselves.

    At an error it is at the instruction that failed: then other ranks may be anywhere, and nothing collective may
    follow. The error itself is not visible here, since it is on its way. Generators around the loop (a progress bar)
    are closed from outside. Tried with Python 3.10 to 3.13.
    """
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _DROPS
