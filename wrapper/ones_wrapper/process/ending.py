"""End of a rank's process: files are flushed, `atexit` handlers are called, and the script's exit code is kept.

The interpreter's own teardown is skipped: a thread of gloo that still holds a Python callback may then abort the
process (torch 2.13), and a finished job would count as failed. The steps of the teardown are done here, in the same
order: threads, `atexit`, the main module's names, open files.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import logging
import logging.handlers
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from ones_wrapper.process.hooks import CHECKPOINT, FLAGS, LOOK, STOP, drop_exit_hooks
from ones_wrapper.process.log import log

LONGEST_S = 10.0
"""Longest time in seconds in which a rank ends while others wait for it: in a resize, a stop, or after an error. Slurm
kills processes 30 s after its signal (KillWait). There is no limit at the end of a finished script."""


_FILE: type = io.IOBase.__mro__[1]
"""Base class of all file classes in C and Python. `isinstance` with it takes a tenth of the time that `io.IOBase`
takes."""


def flush_files() -> None:
    """Flush stdout, stderr, open regular files, buffering log handlers and C's streams; files stay open. Takes some
    milliseconds, because all objects of the script are searched."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there
            stream.flush()
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]  # as logging.shutdown finds them
        handler = reference()
        if isinstance(handler, logging.handlers.MemoryHandler):
            with suppress(Exception):
                handler.flush()
    for file in _open_files():
        _try(file, file.flush)
    ctypes.CDLL(None).fflush(None)


def leave(code: int, *, main: dict[str, Any] | None = None) -> NoReturn:
    """End this rank's process with an exit code, as the interpreter would, but without its teardown.

    `main` holds the names of the script's main module. They are dropped, so that objects without other references are
    finalised (archives, HDF5 files). A caller that is not the main thread skips the script's threads, names and exit
    hooks.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        for number in (*STOP, *CHECKPOINT, *LOOK, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the end is under way, and its code is known
    else:
        drop_exit_hooks()
    steps: deque[Callable[[], None]] = deque()
    steps.append(atexit._run_exitfuncs)
    if in_main and main is not None:
        steps.append(lambda: _drop(main))
    steps.append(_close_files)
    ending = threading.Lock()
    if code or FLAGS.stop or FLAGS.leaving:
        threading.Thread(target=_end_late, args=(steps, ending, code), daemon=True).start()
    if in_main:  # and no other thread, which must not wait for the script's
        _take(deque([threading._shutdown]))  # type: ignore[attr-defined]  # joins threads, ends idle pools
    _take(steps)
    ending.acquire()
    os._exit(code)


def _take(steps: deque[Callable[[], None]]) -> None:
    """Call the remaining steps, each once even if two threads do this."""
    while steps:
        step = steps.popleft()
        try:
            step()
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()


def _end_late(steps: deque[Callable[[], None]], ending: threading.Lock, code: int) -> None:
    """Call the remaining steps after `LONGEST_S` seconds, and end the process."""
    time.sleep(LONGEST_S)
    with ending:
        log(f"a thread or an exit handler of the script took more than {LONGEST_S:g} s; the rank ends without waiting")
        _take(steps)
        os._exit(code)


def _drop(names: dict[str, Any]) -> None:
    """Set a module's names to None, those with one leading underscore first, as the interpreter does at its end."""
    threading.excepthook = lambda _: None  # daemon threads find their names gone, and nobody needs to know
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and private == (name.startswith("_") and not name.startswith("__")):
                names[name] = None
    gc.collect()


def _close_files() -> None:
    for file in _open_files():
        _try(file, file.close)
    flush_files()


def _open_files() -> list[io.IOBase]:
    """Return the script's regular files that are open for writing. A wrapper comes before the file to which it
    writes."""
    # By the type: a proxy's class may be anything, and asking for it may import something.
    files = [one for one in gc.get_objects() if issubclass(type(one), _FILE) and _writes(one)]
    return sorted(files, key=lambda file: (type(file).__module__ == "_io", not isinstance(file, io.TextIOBase)))


def _writes(file: io.IOBase) -> bool:
    try:
        if file.closed or not file.writable():
            return False
        number = file.fileno()
        return number > 2 and stat.S_ISREG(os.fstat(number).st_mode)  # a pipe may have nobody who reads it
    except Exception:  # it has no file below, or is half made
        return False


def _try(file: io.IOBase, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        log(f"what the script wrote to {getattr(file, 'name', 'a file')} is not all there: {error}")
