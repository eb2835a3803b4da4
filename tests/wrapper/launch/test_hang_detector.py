"""The watch on ranks that hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ones_wrapper.launch import hang_detector as watch
from ones_wrapper.launch.rank import prefetch_checkpoint
from ones_wrapper.launch.restart_policy import HUNG


def test_who_hangs() -> None:
    """Protects ranks that have not begun, or are done, from being taken for hung."""
    board = watch.Heartbeats(3)
    assert board.hung(1e9, 5.0) == []
    board.beat(0, 100.0)
    board.beat(2, 103.0)
    assert board.hung(104.0, 5.0) == []
    assert board.hung(106.0, 5.0) == [0]
    assert board.hung(1000.0, 5.0) == [0, 2]
    assert board.hung(1000.0, 0.0) == []
    board.beat(0, 0.0)
    assert board.hung(1000.0, 5.0) == [2]


def test_beats_cross_a_fork_and_cost_nothing() -> None:
    """Protects the launcher's view of its ranks, and the step from the watch: under 5 microseconds a beat."""
    board = watch.Heartbeats(2)
    pid = os.fork()
    if pid == 0:
        watch.watch_rank(board, 1)
        started = time.perf_counter()
        for _ in range(10_000):
            watch.beat()
        os._exit(0 if time.perf_counter() - started < 0.05 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert board.hung(time.monotonic() + 10, 5.0) == [1]
    watch.beat()  # nobody watches this process
    watch.pause()


def test_limits() -> None:
    """Protects the setting: off at 0, and nonsense does not end a job."""
    assert watch.limit_s({}) == watch.HANG_S
    assert watch.limit_s({"ONES_HANG_S": "0"}) == 0
    assert watch.limit_s({"ONES_HANG_S": "soon"}) == watch.HANG_S


def test_rank_without_a_launcher_watches_itself() -> None:
    """Protects MPI ranks, which nobody of ours forked."""
    code = (
        "import os, time\nfrom ones_wrapper.launch import hang_detector as watch\n"
        f"watch.watch_this_process(0.4, lambda: os._exit({HUNG}), 0.1)\n"
        "time.sleep(0.8)\nwatch.beat()\ntime.sleep(30)\n"
    )
    started = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == HUNG
    assert 1.0 < time.monotonic() - started < 15


def test_prefetch_checkpoint(tmp_path: Path) -> None:
    """Protects a restart from reading what is not there, and from an unfinished checkpoint."""
    assert prefetch_checkpoint(tmp_path) is None
    folder = tmp_path / "checkpoints" / "step-000000003"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(bytes(20_000_000))
    assert prefetch_checkpoint(tmp_path) is None
    (folder / "manifest.json").write_text("{}")
    child = prefetch_checkpoint(tmp_path)
    assert child is not None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
