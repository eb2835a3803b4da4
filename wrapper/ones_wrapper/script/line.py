"""Which script this is, and the line that it is at, for the sentences that are said to its owner."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def line(frame: FrameType | None = None, deep: int = 0) -> str:
    """The innermost line outside this package and installed ones, as ` (train.py:12)`; empty for none, and where `deep`
    is given for none in so many frames.
    """
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
    """The name of the script, or of the module, that this process runs; empty for none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).name if path else ""
