"""The script's own frames: its name and its line, for sentences to its owner, and how it left a loop."""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1])
_DROPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def line(frame: FrameType | None = None, deep: int = 0) -> str:
    """Return the script's innermost line in a call stack, as ` (train.py:12)`; empty for none. Lines of this and of
    installed packages do not count. `deep` is the number of frames to search, 0 for all."""
    left = deep or 1 << 30
    frame = frame or sys._getframe(1)
    while frame is not None and left:
        left -= 1
        name = frame.f_code.co_filename
        if not name.startswith(("<", _OURS, *_LIBRARIES)):
            return f" ({Path(name).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def script() -> str:
    """Return the file name of the script or module that this process runs; empty for none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).name if path else ""


def left_on_purpose(frame: FrameType | None) -> bool:
    """Return True if the frame in which a loop's iterator was dropped is at a `break` or `return`.

    After an error the frame is at the instruction that failed: then other ranks may be anywhere, and nothing collective
    may follow. The error itself is not visible here yet. Generators around the loop (a progress bar) are closed from
    outside. Tried with Python 3.10 to 3.13.
    """
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _DROPS
