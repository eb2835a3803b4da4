"""Lines of the script in a call stack, for messages."""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, TypeGuard

_OURS = str(Path(__file__).parents[1])
_DROPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def is_script(code: CodeType | None) -> TypeGuard[CodeType]:
    """Return True for code of the script, False for code of this package or an installed one."""
    return code is not None and is_script_file(code.co_filename)


def is_script_file(path: str) -> bool:
    """Return True for a file of the script, False for a file of this package or an installed one."""
    return not path.startswith(("<", _OURS, *_LIBRARIES)) and "-packages/" not in path  # of the user, of Debian


def is_ours(code: CodeType, room: str = "/") -> bool:
    """Return True for code of this package, or of its folder `room`."""
    return code.co_filename.startswith(_OURS + room)


def frames(frame: FrameType | None = None, deep: int = 0) -> Iterator[FrameType]:
    """Return the script's frames in a call stack, innermost first. At most `deep` frames are searched; 0 for all."""
    every = islice(walk_stack(frame or sys._getframe(1)), deep or None)
    return (one for one, _ in every if is_script(one.f_code))


def line(frame: FrameType | None = None, deep: int = 0) -> str:
    """Return the script's innermost line in a call stack, such as ` (train.py:12)`; empty if there is none. At most
    `deep` frames are searched; 0 for all."""
    found = next(frames(frame or sys._getframe(1), deep), None)
    return place(found.f_code.co_filename, found.f_lineno) if found is not None else ""


def place(path: str, number: int) -> str:
    """Return a text for a line of a file, such as ` (train.py:12)`."""
    return f" ({Path(path).name}:{number})"


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the global and local variables of a frame."""
    code, local = frame.f_code, frame.f_locals
    found = {**frame.f_globals, **local}
    if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
        # The frame keeps `f_locals`, and so a step's tensors, as long as the function runs.
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in [one for one in local if one not in arguments]:
            del local[name]
    return found


def script() -> str:
    """Return the file name of the script or module that this process runs; empty if there is none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).name if path else ""


def left_on_purpose(frame: FrameType | None) -> bool:
    """Return True if a loop was left by `break` or `return`. `frame` is the frame that dropped the loop's iterator.

    After an error the frame is at the instruction that failed. Then other ranks may be anywhere, so that no collective
    may follow. If a generator (a progress bar) is around the loop, the frame outside it counts. Tested with Python 3.10
    to 3.13.
    """
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _DROPS
