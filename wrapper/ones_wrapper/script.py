"""Running the user's script inside a rank, from its imports to its exit code."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ones_wrapper.ending import ended, judged
from ones_wrapper.signals import FLAGS

DUMP = signal.SIGQUIT
"""Has a rank print where each of its threads is, and go on."""


def preload(env: Mapping[str, str]) -> float:
    """Import what every rank needs: torch, ourselves, and what ONES_PRELOAD names. The seconds that it took.

    A module that is missing is left for the script to stumble over, where the error makes sense.
    """
    started = time.monotonic()
    gc.disable()  # imports leave little to collect, and looking for it costs a tenth of their time
    importlib.import_module("ones_wrapper.api")
    named = [name for name in env.get("ONES_PRELOAD", "").split(",") if name]
    # torch.optim and DistributedDataParallel import the first at their first use, so every rank would.
    for module in ("torch._dynamo", *named):
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # keeps the collector from looking at it later, and from copying shared pages in every rank
    gc.enable()
    return time.monotonic() - started


def take_signals() -> None:
    """Keep signals as flags from now on, and answer `DUMP`."""
    FLAGS.install()
    faulthandler.register(DUMP, all_threads=True)


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run the script as `python SCRIPT ARGS` would; the exit code, after everybody heard of it."""
    sys.argv = [script, *arguments]
    code, note = 0, ""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            code = leaving.code
        elif leaving.code is not None:
            print(leaving.code, file=sys.stderr)
            code, note = 1, str(leaving.code)[:300]
    except BaseException as error:
        traceback.print_exc()
        code, note = judged(error)
    ended(code, note)
    return code


def leave(code: int) -> None:
    """End this rank as the interpreter would, but for taking itself apart.

    While it does that, a thread of gloo that still holds a Python callback aborts the process now and then
    (torch 2.13), and a finished job would count as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, ends idle pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
