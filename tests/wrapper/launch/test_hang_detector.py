"""The watch on ranks that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ones_wrapper.launch import node
from ones_wrapper.launch.rank import prefetch_checkpoint
from ones_wrapper.process import hang_detector as watch
from ones_wrapper.process.exit_codes import HUNG
from ones_wrapper.process.hang_detector import Standstill


def python(*lines: str) -> tuple[int, str, str]:
    """The exit code, output and errors of a process of its own."""
    code = "\n".join(("import os, signal, sys, time", "from ones_wrapper.launch import node",
                      "from ones_wrapper.process import hang_detector as watch, hooks", *lines))  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_who_hangs() -> None:
    """Not ranks that have not begun, or are done."""
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
    """Under 5 microseconds of the processor a beat."""
    board = watch.Heartbeats(2)
    pid = os.fork()
    if pid == 0:
        watch.watch_rank(board, 1)
        started = time.process_time()  # a busy machine gives the processor to others meanwhile
        for _ in range(10_000):
            watch.beat()
        os._exit(0 if time.process_time() - started < 0.05 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert board.hung(time.monotonic() + 10, 5.0) == [1]
    watch.beat()  # nobody watches this process
    watch.pause()


def test_rank_without_a_launcher_watches_itself() -> None:
    """MPI ranks, which nobody of ours forked."""
    code, output, _ = python(
        f"watch.watch_this_process(0.4, lambda: os._exit({HUNG}))",
        "time.sleep(0.8); print('begins', flush=True); watch.beat(); time.sleep(60)",
    )
    assert (code, output) == (HUNG, "begins\n")


def test_who_stood_still_with_the_watch() -> None:
    """A job that Slurm suspended, or whose node stood still, does not hang when it goes on."""
    still = Standstill()
    assert still.look() == 0.0
    still._last -= 3600.0
    assert 3600.0 <= still.look() + still.COUNTS_S < 3660.0
    assert still.look() == 0.0
    board = watch.Heartbeats(2)
    board.beat(0, 100.0)
    board.stood_still(3700.0, 3599.0)
    assert board.hung(3700.0, 5.0) == []
    assert board.hung(3705.0, 5.0) == [0]
    board.beat(0, 3710.0)
    assert board.hung(3714.0, 5.0) == []
    assert board.hung(3716.0, 5.0) == [0]


def test_a_rank_that_hangs_is_found_where_jobs_are_suspended_in_turn() -> None:
    """A limit that began again after each standstill would never end under Slurm's gang scheduling, which gives jobs 30
    s each, nor on a machine so busy that every look is late."""
    board, now = watch.Heartbeats(1), 1000.0
    board.beat(0, now)
    while not board.hung(now, 1800.0) and now < 10_000.0:
        now += 60.0
        board.stood_still(now, 30.0)
    assert now == 1000.0 + 2 * 1800.0 + 60.0
    still, counted = Standstill(), 0.0
    for _ in range(20):
        still._last -= 3.0
        counted += 3.0 - still.look()
    assert counted >= 5.0
    board.beat(0, now - 1.0)
    board.stood_still(now, 3600.0)  # it went on before the watch did: no more than that second is excused
    assert board.hung(now + 6.0, 5.0) == [0]


def test_a_node_that_stood_still_ends_no_rank() -> None:
    """By neither limit of the node launcher: a rank without a step, and the time that is left after a failure."""
    code, output, errors = python(
        "ranks, fails, ends = node.Ranks(2, hang_s=30.0, grace_s=30.0), os.pipe(), os.pipe()",
        "if (rank := ranks.fork()) is not None:",
        "    watch.beat()",
        "    if rank == 1:",
        "        watch.pause(), os.read(fails[0], 1), os._exit(7)",
        "    os.read(ends[0], 1); os.write(1, b'done'); os._exit(0)",
        "forward, looks, late, real, sleep = 0.0, 0, 0, time.monotonic, time.sleep",
        "def slept(seconds):",
        "    global forward, looks, late",
        "    sleep(seconds)",
        "    looks, late = looks + 1, late + bool(ranks._codes)",  # late: since one has failed
        "    forward += 3600.0 * ((looks == 10) + (late == 10))",
        "    if looks == 20: os.write(fails[1], b'.')",
        "    if late == 20: os.write(ends[1], b'.')",
        "time.monotonic, time.sleep = lambda: real() + forward, slept",
        "code = ranks.wait()",
        "assert forward == 7200.0, forward",
        "sys.exit(code)",
    )
    assert (code, output) == (7, "done"), errors
    assert errors.count("\n") == 1 and "local rank 1 ended with exit code 7" in errors


@pytest.mark.parametrize("failed", [True, False])
def test_ranks_that_wait_for_another_node_are_ended(failed: bool) -> None:
    """A rank in a kernel of NCCL's answers no signal. If nobody failed, it may be writing the checkpoint of a stop."""
    _, output, errors = python(
        "hooks.FLAGS.armed, node.GRACE_S = True, 0.2",
        f"ranks = node.Ranks(1, hang_s=0.0, others_failed=lambda: {failed})",
        "if ranks.fork() is not None:",
        f"    time.sleep({60 if failed else 1.5}); print('wrote', flush=True); os._exit(0)",
        "ranks.handle(signal.SIGTERM, None)",
        "ranks.wait()",
    )
    assert output == ("" if failed else "wrote\n"), errors


def test_a_rank_answers_for_itself_alone() -> None:
    """It passes no signal on to others, one of which may be gone, and loses none between the fork and its handlers."""
    code, output, errors = python(
        "hooks.FLAGS.armed = True",
        "ranks = node.Ranks(2, hang_s=0.0)",
        "signal.signal(signal.SIGTERM, ranks.handle)",
        "local = ranks.fork()",
        "if local == 0:",
        "    os._exit(0)",
        "if local == 1:",
        "    while not hooks.FLAGS.stop:",
        "        time.sleep(0.01)",
        "    print('asked', hooks.FLAGS.scripts, flush=True); os._exit(0)",
        "ranks._living = {pid: rank for pid, rank in ranks._living.items() if rank or os.waitpid(pid, 0) is None}",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "sys.exit(ranks.wait())",
    )
    assert (code, output) == (0, "asked {}\n"), errors


def test_a_signal_at_the_moment_of_a_ranks_end_ends_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes once the system has forgotten the rank, and the launcher not."""
    ranks = node.Ranks(1, hang_s=0.0)
    ended = subprocess.Popen(["true"])
    ranks._living = {ended.pid: 0}
    real = os.waitpid

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        found = real(ended.pid, 0)
        ranks.handle(signal.SIGTERM, None)
        return found

    monkeypatch.setattr(os, "waitpid", waitpid)
    assert ranks.wait() == 0 and ranks.stopped


def test_signals_that_come_while_earlier_ones_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, sent = node.Ranks(1, hang_s=0.0), list[int]()
    ranks._count = 0
    ranks.received = {signal.SIGUSR1, signal.SIGURG}

    def send(number: int) -> None:
        sent.append(number)
        if len(sent) == 1:
            ranks.handle(signal.SIGTERM, None)

    monkeypatch.setattr(ranks, "_send", send)
    assert ranks.fork() is None
    assert {*sent} == {signal.SIGUSR1, signal.SIGURG, signal.SIGTERM}


def test_prefetch_checkpoint(tmp_path: Path) -> None:
    """Not what is not there, nor an unfinished checkpoint."""
    assert prefetch_checkpoint(tmp_path) is None
    folder = tmp_path / "checkpoints" / "step-000000003"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(bytes(20_000_000))
    assert prefetch_checkpoint(tmp_path) is None
    (folder / "manifest.json").write_text("{}")
    child = prefetch_checkpoint(tmp_path)
    assert child is not None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
