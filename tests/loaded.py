"""The process that pytest's workers, ranks and runs of tests are forks of: to import torch takes 5 s of the processor,
and to import all tests 10.

    python -m tests.loaded FOLDER [PATH...]

It answers at two sockets in FOLDER. Forks of `RUNS` have imported what `ones-run` needs (`tests.wrapper.preloaded`);
those of `ALL` have imported torch, and the tests at PATH. Both are loaded when they are first asked for.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from tests import forks
from tests.waiting import until

RUNS, ALL = "runs", "all"
FOLDER = "TESTS_FORKS"
"""In the environment: the folder of the process that runs."""
WORKER, RANK = "worker", "rank"
"""What a fork is: one runs the code in its last argument, as execnet has a Python do; the other calls a function that
comes by its standard input."""
MODULES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("ones_wrapper.api", "numpy", "pytest", "hypothesis.strategies"),
)
"""What each rank would import otherwise: an optimizer's first step takes half a second for torch._dynamo."""
REPOSITORY = Path(__file__).parents[1]
START_S = 180.0


def folder() -> Path:
    """Where forks are asked for."""
    if FOLDER not in os.environ:
        start(())
    return Path(os.environ[FOLDER])


def start(paths: Sequence[str]) -> None:
    """Start the process, which ends with this one."""
    place = tempfile.mkdtemp(prefix="ones-forks-")  # no object: a fork that drops it would remove the folder
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.loaded", place, *paths],
        env={**os.environ, "PYTHONPATH": python_path, "PYTEST_ADDOPTS": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    until(lambda: Path(place, ALL).exists() or server.poll() is not None, "forks", START_S)
    os.environ[FOLDER] = place

    @atexit.register
    def _end() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(place, ignore_errors=True)


def _import(paths: Sequence[str]) -> None:
    import pytest

    if paths:
        pytest.main([*paths, "--collect-only", "-qq", "-n0", "-p", "no:cacheprovider"])
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers through their stand-ins


def _be(command: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command[0] == WORKER:
        main = sys.modules["__main__"] = ModuleType("__main__")  # which is no file
        sys.argv = ["-c"]
        exec(command[-1], main.__dict__)
    else:
        _call(Connection(os.dup(0)))


def _call(end: Connection) -> None:
    code = 1
    try:
        function, arguments = end.recv()
        function(*arguments, end)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(place: str, *paths: str) -> None:
    """Answer until standard input is closed."""
    from tests.wrapper import preloaded

    runs, everything = (forks.listening(f"{place}/{name}") for name in (RUNS, ALL))
    if paths:
        preloaded.load()  # once for all
    if os.fork() == 0:
        everything.close()
        preloaded.serve(runs)
    else:
        runs.close()
        _be(forks.serve(everything, lambda: _import(paths), end=0))


if __name__ == "__main__":
    serve(*sys.argv[1:])
