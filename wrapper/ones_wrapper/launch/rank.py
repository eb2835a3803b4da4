"""A rank's process: imports, prefetch of the checkpoint, the user's script, and the exit code.

The node launcher forks ranks that call `main`. An MPI process manager starts them by `python -m
ones_wrapper.launch.rank`.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from ones_wrapper.devices.defaults import set_defaults
from ones_wrapper.files.job_directory import ExitCodes, newest_checkpoint
from ones_wrapper.files.run_id import SEED
from ones_wrapper.launch import plain_steps
from ones_wrapper.launch.errors import show
from ones_wrapper.launch.main_module import MODULE, first_on_path, module_code, script_code
from ones_wrapper.process import hang_detector
from ones_wrapper.process.ending import flush_files, leave
from ones_wrapper.process.exit_codes import HUNG, USAGE_ERROR
from ones_wrapper.process.hooks import FLAGS, exit_code_of, run_exit_hooks
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import LaunchError, own_placement, require_torch
from ones_wrapper.process.workers import shield_workers

DUMP = signal.SIGQUIT
"""Signal on which a rank prints the stacks of its threads and continues."""


def preload(env: Mapping[str, str]) -> float:
    """Import the modules that every rank needs: torch, ours, and those in ONES_PRELOAD. Return the seconds taken. A
    missing module is not an error here: the script will fail with a better message."""
    started = time.monotonic()
    gc.disable()  # imports leave little to collect, and looking for it costs a tenth of their time
    importlib.import_module("ones_wrapper.api")
    named = [name for name in env.get("ONES_PRELOAD", "").split(",") if name]
    # torch.optim and DistributedDataParallel import torch._dynamo at first use, so every rank would.
    for module in ("torch._dynamo", *named):
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # else the collector would copy shared pages in every rank, as it looks at objects
    gc.enable()
    return time.monotonic() - started


def take_card(env: MutableMapping[str, str], local_rank: int, local_world: int) -> bool:
    """Choose this forked rank's GPU before CUDA is initialised. If CUDA cannot be used, log the reason and return
    False."""
    choice = importlib.import_module("ones_wrapper.devices.choice")  # needs torch
    choice.own_slice(env, local_rank, local_world)
    return not choice.check_fork(env.get("ONES_PRELOAD", ""))


def take_signals() -> None:
    """Record signals as flags from now on, and print stacks on `DUMP`. DataLoader workers ignore signals."""
    FLAGS.install(keep=False)  # the present handler is the parent process's
    signal.signal(signal.SIGINT, FLAGS.handle)  # sent by `srun` or `scancel`: nobody types at a rank
    shield_workers()
    faulthandler.register(DUMP, all_threads=True)


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run the script in the main module, as `python SCRIPT ARGS` does, or a module as `python -m` does. Then call the
    exit hooks, and return the exit code."""
    sys.argv = [script, *arguments]
    main = ModuleType("__main__")
    # The module stays: exit handlers may need it, and its objects are finalised when the rank leaves.
    sys.modules["__main__"] = main
    vars(main).update(__file__=script, __builtins__=builtins, __cached__=None)
    code, note = 0, ""
    plain_steps.start()
    if seed := os.environ.get(SEED):
        seed_start(int(seed))
    try:
        importlib.import_module("ones_wrapper.api").before_script()
        exec(module_code(arguments, main) if script == MODULE else script_code(script), vars(main))
    except SystemExit as leaving:
        code, note = _exit_code(leaving.code)
    except BaseException as error:
        code, note = exit_code_of(error)
        show(error, code)
    run_exit_hooks(code, note)
    return code


def _exit_code(asked: object) -> tuple[int, str]:
    """Return the exit code and the message that Python derives from the argument of `sys.exit`."""
    if asked is None:
        return 0, ""
    if isinstance(asked, int):
        return (asked if abs(asked) < 2**31 else -1) & 0xFF, ""
    print(asked, file=sys.stderr)
    return 1, str(asked)[:300]


def seed_start(seed: int) -> None:
    """Seed the random generators before the script's first line, for scripts that set no seed."""
    random.seed(seed)
    importlib.import_module("numpy").random.seed(seed)
    importlib.import_module("torch").manual_seed(seed)


PREFETCH_SHARE = 0.25
"""Largest size of a prefetched checkpoint, as a share of free memory. A larger one would drop its own pages from the
cache."""

_BLOCK = 8 << 20
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prefetch_checkpoint(job_dir: Path) -> int | None:
    """Read the newest checkpoint into the page cache while torch is being imported, so that loading finds it there.

    Returns the id of the process that reads, or None if there is nothing to read. It is no thread, since imports hold
    the interpreter's lock, and since the process may fork later.
    """
    checkpoint = newest_checkpoint(job_dir)
    if checkpoint is None:
        return None
    try:
        files = sorted(path for path in checkpoint.iterdir() if path.is_file() and not path.is_symlink())
        size = sum(path.stat().st_size for path in files)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # ValueError: the system does not tell free memory (macOS)
        return None
    if size > PREFETCH_SHARE * free:
        return None
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        end_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        _read_files(files)
    finally:
        os._exit(0)


def _read_files(files: list[Path]) -> None:
    handles = []
    for path in files:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        handles.append(handle)
    buffer = bytearray(_BLOCK)
    for handle in handles:  # network file systems may not heed the advice
        while os.readv(handle, [buffer]):
            pass
        os.close(handle)


def main(argv: Sequence[str]) -> int:
    """Run `SCRIPT ARGS` in this rank."""
    script, *arguments = argv
    env = os.environ
    codes = ExitCodes.of(env)
    try:
        place = own_placement(env)
        require_torch()
    except LaunchError as error:
        log(str(error), "ones-run")
        codes.write(0, USAGE_ERROR)
        return USAGE_ERROR
    sys.path[0] = first_on_path(script)
    set_defaults(env)
    env.update(place.env())
    take_signals()

    def hung() -> None:
        log(f"rank {place.rank} reached no step boundary for too long (ONES_HANG_S)", "ones-run")
        faulthandler.dump_traceback()
        codes.write(place.rank, HUNG)
        flush_files()
        os._exit(HUNG)

    hang_detector.watch_this_process(hang_detector.limit_s(env), hung)
    if place.local_rank == 0:
        prefetch_checkpoint(Path(env["ONES_JOB_DIR"]))
    env["ONES_IMPORT_S"] = f"{preload(env):.3f}"
    if not take_card(env, place.local_rank, place.local_world):
        return USAGE_ERROR
    code = run_script(script, arguments)
    if code:
        codes.write(place.rank, code)
    return leave(code, main=vars(sys.modules["__main__"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
