"""What a script wrote is there when its ranks end, however they end."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from ones_wrapper.process.exit_codes import USAGE_ERROR
from ones_wrapper.protocol import Bye, Checkpoint, First, Order
from tests.marks import nightly
from tests.wrapper.preloaded import Started
from tests.wrapper.runs import Run, children, write_order

SCRIPT = Path(__file__).parents[1] / "writes.py"
ORDER = ["thread", "atexit second", "atexit first"]
"""As the interpreter does it: threads, then exit handlers, the last one first."""


def written(folder: Path, steps: int) -> None:
    for rank in (0, 1):
        rows = (folder / f"rows-{rank}.csv").read_text().splitlines()
        assert len(rows) == steps and len(set(rows)) == steps
        held = (folder / f"with-{rank}.txt").read_text().splitlines()
        assert held == [*rows, "closed"]
        assert (folder / f"log-{rank}.txt").read_text().splitlines() == rows
        with gzip.open(folder / f"rows-{rank}.gz", "rt") as file:
            assert file.read().splitlines() == rows
        assert (folder / f"order-{rank}.txt").read_text().splitlines() == ORDER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        nightly("end", 0, "finished"),
        nightly("exit", 3, "error"),
        nightly("raise", 1, "error"),
        ("signal", 143, "signal"),
    ],
)
def test_all_that_was_written_is_there(tmp_path: Path, how: str, code: int, reason: str) -> None:
    """Files without a flush or in a `with`, log handlers that hold lines back, archives with a trailer; exit handlers,
    once and in order; the exit code."""
    run = Run(tmp_path / "job", str(tmp_path), how, ranks=2, script=SCRIPT)
    if how == "signal":
        run.wait_for(First)
        time.sleep(0.3)
        run.signal(signal.SIGTERM)
    assert run.end() == code, run.errors
    bye = run.of(Bye)[-1]
    assert (bye.reason, bye.exit_code) == (reason, code)
    written(tmp_path, bye.step)


def test_a_node_ends_without_being_taken_apart() -> None:
    """Slurm waits for it as for its ranks: to take torch apart costs a busy processor seconds."""
    lines = (
        "import atexit, runpy, sys",
        "class Late:",
        "    def __del__(self): print('taken apart')",
        "sys.late = Late()",
        "atexit.register(print, 'at its exit')",
        "sys.argv = ['node', 'script.py']",
        "runpy.run_module('ones_wrapper.launch.node', run_name='__main__')",
    )
    env = {**os.environ, "ONES_LAUNCHER": "srun", "ONES_JOB_DIR": os.devnull, "ONES_GPUS_PER_NODE": "1"}
    env |= {"ONES_NODES": "2", "SLURM_PROCID": "5"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (USAGE_ERROR, ["at its exit", ""]), done.stderr


@pytest.mark.slow
def test_a_drained_job_has_written_all_before_it_says_so(tmp_path: Path) -> None:
    """The companion may requeue as soon as the checkpoint is reported, and srun leaves the ranks hardly a moment."""
    run = Run(tmp_path / "job", str(tmp_path), "signal", ranks=2, script=SCRIPT)
    run.wait_for(First)
    write_order(tmp_path / "job", Order(1, 0, drain=True))
    step = run.wait_for(Checkpoint, lambda report: report.order == 1).step
    for pid in children(run.process.pid):
        os.kill(pid, signal.SIGKILL)
    run.process.kill()
    run.end()
    for rank in (0, 1):
        assert len((tmp_path / f"rows-{rank}.csv").read_text().splitlines()) == step
        assert len((tmp_path / f"log-{rank}.txt").read_text().splitlines()) == step


def leave(code: str, exit_code: str = "0", longest_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    text = (
        "from ones_wrapper.process import ending\n"
        "from ones_wrapper.process.hooks import FLAGS\n"
        "import sys, threading, time, atexit\n"
        f"ending.LONGEST_S = {longest_s}\n{code}\nending.leave({exit_code}, main=globals())"
    )
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=180, check=False)


def test_a_stop_waits_for_no_thread_for_ever(tmp_path: Path) -> None:
    """What comes after such threads in the order is still done."""
    stuck = f"file = open({str(tmp_path / 'rows')!r}, 'w')\nfile.write('kept')\natexit.register(print, 'handled')\n"
    done = leave(f"{stuck}threading.Thread(target=time.sleep, args=(600,)).start()", "143", longest_s=0.3)
    assert (done.returncode, done.stdout, (tmp_path / "rows").read_text()) == (143, "handled\n", "kept")
    assert "took more than 0.3 s" in done.stderr


def test_a_main_thread_that_comes_late_leaves_the_scripts_threads_alone() -> None:
    """As in a process that was suspended: the thread that ends it in its place waits for none of them."""
    stands = "take = ending._take\nmain = threading.main_thread()\n"
    stands += "ending._take = lambda steps: (threading.current_thread() is main and time.sleep(5), take(steps))\n"
    done = leave(f"{stands}threading.Thread(target=time.sleep, args=(600,)).start()", "143", longest_s=0.1)
    assert done.returncode == 143 and "took more than" in done.stderr


def test_a_script_at_its_end_may_take_its_time() -> None:
    """Exit handlers of a script that is done may upload results."""
    done = leave("threading.Thread(target=lambda: (time.sleep(1), print('done'))).start()", longest_s=0.3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_an_exit_handler_that_fails_costs_nobody_else() -> None:
    done = leave("atexit.register(print, 'last')\natexit.register(lambda: 1 / 0)", "3")
    assert (done.returncode, done.stdout) == (3, "last\n")
    assert "ZeroDivisionError" in done.stderr


ENDS = (
    ("sys.exit(259)", 3, ""),
    ("sys.exit(-1)", 255, ""),
    ("sys.exit('no data')", 1, "no data"),
    ("raise KeyError('x')", 1, "KeyError: 'x'"),
    ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ("os._exit(9)", 9, ""),
    ("sys.excepthook = lambda *_: print('mine', file=sys.stderr)\n1 / 0", 1, "mine"),
)
"""Of scripts, with their exit codes and a part of what they print."""


@pytest.mark.slow
def test_exit_codes_are_those_of_python(tmp_path: Path) -> None:
    """And what the user's own excepthook says."""
    for number, (how, code, says) in enumerate(ENDS):
        script = tmp_path / f"{number}.py"
        script.write_text(f"import os, sys\n{how}\n")
        ours = Started([str(script)], os.environ, main="rank")
        plain = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=180)
        _, printed = ours.communicate(180)
        assert printed == plain.stderr and says in printed, how
        assert [128 - one if one < 0 else one for one in (ours.returncode or 0, plain.returncode)] == [code, code], how


def test_what_the_main_module_alone_holds_is_finalised(tmp_path: Path) -> None:
    """Archives and HDF5 files end when the last reference to them goes, also in a circle of objects."""
    done = leave(
        "import zipfile\n"
        f"archive = zipfile.ZipFile({str(tmp_path / 'a.zip')!r}, 'w')\n"
        "archive.writestr('one', 'kept')\n"
        "class Circle: pass\n"
        "circle = Circle(); circle.me, circle.archive = circle, archive\n"
        "del archive"
    )
    assert (done.returncode, done.stderr) == (0, "")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.read("one") == b"kept"


def test_a_rank_that_another_thread_ends(tmp_path: Path) -> None:
    """The watch ends a rank that waits for lost ones. Hooks do not take it for the script's end, which would end the
    job."""
    done = leave(
        f"file = open({str(tmp_path / 'rows')!r}, 'w')\nfile.write('kept')\natexit.register(print, 'handled')\n"
        "from ones_wrapper.process.hooks import on_exit\non_exit(lambda code, note: print('ended with', code))\n"
        "threading.Thread(target=ending.leave, args=(103,)).start()\ntime.sleep(60)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (103, "handled\n", "")
    assert (tmp_path / "rows").read_text() == "kept"
