"""Display of a script's error: the rank that failed first prints it in full; other ranks print one line.

The first rank is the one that succeeds in creating a small file in the job's directory.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ones_wrapper.files.job_directory import ExitCodes
from ones_wrapper.files.small_files import create_small
from ones_wrapper.process.exit_codes import OUT_OF_MEMORY, PEER_LOST
from ones_wrapper.process.faults import ConfigurationError, Fault, fault_in
from ones_wrapper.process.hooks import describe_error
from ones_wrapper.process.log import log


def is_consequence(error: BaseException) -> bool:
    """Return True if an error is due to the loss of other ranks, and not to the script."""
    if type(error).__module__.partition(".")[0] not in ("builtins", "torch", "ones_wrapper"):
        return False
    return isinstance(error, (RuntimeError, OSError)) and fault_in(str(error)) is Fault.PEER


def show(error: BaseException, code: int) -> None:
    """Print an uncaught error of the script on this rank, which ends with exit code `code`."""
    if code in (OUT_OF_MEMORY, PEER_LOST):  # reported already, and the ranks start again
        return
    env, trace = os.environ, _of_script(error.__traceback__)
    rank, alone = env.get("RANK", "0"), env.get("WORLD_SIZE", "1") == "1"
    if not alone and is_consequence(error):
        log(f"rank {rank} lost other ranks{_place(trace)}: {describe_error(error)}")
        return
    first = None if alone else _first(ExitCodes.of(env).error_file(env), describe_error(error))
    if first is None:
        if not alone:
            log(f"rank {rank} failed first:")
        if isinstance(error, ConfigurationError):  # its sentence says all
            log(str(error))
            return
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.stderr.flush()
    elif first != describe_error(error):
        log(f"rank {rank} failed too{_place(trace)}: {describe_error(error)}")


def _first(path: Path, text: str) -> str | None:
    """Return the error of the rank that failed first; None if it was this rank, or if it is unknown."""
    try:
        if create_small(path, text.encode(errors="replace"), 0o600):
            return None
    except OSError:
        return None
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__") != "__main__":
        inner = inner.tb_next
    while inner is not None and inner.tb_frame.f_code.co_name == "run_script":
        inner = inner.tb_next
    return inner if inner is not None else trace.tb_next if trace is not None else None


def _place(trace: TracebackType | None) -> str:
    lines = traceback.extract_tb(trace)
    own = [line for line in lines if f"{os.sep}site-packages{os.sep}" not in line.filename] or lines
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
