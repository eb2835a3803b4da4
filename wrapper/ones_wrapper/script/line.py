"""The script's own frames: its name and its line, for sentences to its owner, and how it left a loop."""

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
    """Return True for code of the script, rather than of this or an installed package."""
    return code is not None and is_script_file(code.co_filename)


def is_script_file(path: str) -> bool:
    """Return True for a file of the script, as `is_script`."""
    return not path.startswith(("<", _OURS, *_LIBRARIES)) and "-packages/" not in path  # of the user, of Debian


def is_ours(code: CodeType, room: str = "/") -> bool:
    """Return True for code of this package, in this folder of it."""
    return code.co_filename.startswith(_OURS + room)


def frames(frame: FrameType | None = None, deep: int = 0) -> Iterator[FrameType]:
    """Return the script's frames of a call stack, the innermost first. `deep` frames are searched, 0 for all."""
    every = islice(walk_stack(frame or sys._getframe(1)), deep or None)
    return (one for one, _ in every if is_script(one.f_code))


def line(frame: FrameType | None = None, deep: int = 0) -> str:
    """Return the script's innermost line, as ` (train.py:12)`; empty for none. `frame` and `deep` as in `frames`."""
    found = next(frames(frame or sys._getframe(1), deep), None)
    return place(found.f_code.co_filename, found.f_lineno) if found is not None else ""


def place(path: str, number: int) -> str:
    """Return a line of a file, as ` (train.py:12)`."""
    return f" ({Path(path).name}:{number})"


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the global and local variables that a frame sees."""
    code, local = frame.f_code, frame.f_locals
    found = {**frame.f_globals, **local}
    if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
        # The frame keeps `f_locals`, and so a step's tensors, as long as the function runs.
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in [one for one in local if one not in arguments]:
            del local[name]
    return found


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
