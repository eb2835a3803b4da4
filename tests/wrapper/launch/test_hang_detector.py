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
from ones_wrapper.process.standstill import Standstill


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
    """Protects the launcher's view of its ranks, and the step from the watch: under 5 microseconds of the processor a
    beat."""
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
    """Protects MPI ranks, which nobody of ours forked."""
    code = (
        "import os, time\nfrom ones_wrapper.process import hang_detector as watch\n"
        f"watch.watch_this_process(0.4, lambda: os._exit({HUNG}))\n"
        "time.sleep(0.8)\nprint('begins', flush=True)\nwatch.beat()\ntime.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (HUNG, "begins\n")


def test_who_stood_still_with_the_watch() -> None:
    """Protects a job that Slurm suspended, or whose node stood still, from being taken for hung when it goes on."""
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
    """Protects the job's hours: a limit that began anew after each standstill would never end where Slurm's gang
    scheduling gives jobs 30 s each, nor on a machine so busy that every look is late.
    """
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
    """Protects both limits of the node launcher: a rank without a step, and the time that is left after a failure."""
    code = (
        "import os, signal, sys, time\nfrom ones_wrapper.launch import node\n"
        "from ones_wrapper.process import hang_detector as watch\n"
        "ranks = node.Ranks(2, hang_s=5.0, grace_s=4.0)\n"
        "if (rank := ranks.fork()) is not None:\n"
        "    watch.beat()\n"
        "    if rank == 1:\n        watch.pause(), time.sleep(0.5), os._exit(7)\n"
        "    time.sleep(2)\n    os.write(1, b'done')\n    os._exit(0)\n"
        "forward, looks = 0.0, []\nreal, sleep = time.monotonic, time.sleep\n"
        "def slept(seconds):\n"
        "    global forward\n"
        "    sleep(seconds)\n"
        "    looks.append(1)\n"
        "    forward += 3600.0 * (len(looks) in (10, 50))\n"
        "time.monotonic, time.sleep = lambda: real() + forward, slept\n"
        "code = ranks.wait()\nassert len(looks) > 50, looks\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "done"), done.stderr
    assert done.stderr.count("\n") == 1 and "local rank 1 ended with exit code 7" in done.stderr


@pytest.mark.parametrize("failed", [True, False])
def test_ranks_that_wait_for_another_node_are_ended(failed: bool) -> None:
    """Protects the time until the next start: a rank in a kernel of NCCL's answers no signal. If nobody failed, it may
    be writing the checkpoint that a stop asks for."""
    code = (
        "import os, signal, sys, time\nfrom ones_wrapper.launch import node\n"
        "from ones_wrapper.process import hooks\n"
        f"hooks.FLAGS.armed = True\nnode.GRACE_S = 0.2\n"
        f"ranks = node.Ranks(1, hang_s=0.0, others_failed=lambda: {failed})\n"
        f"if ranks.fork() is not None:\n    time.sleep({60 if failed else 1.5})\n    print('wrote', flush=True)\n"
        "    os._exit(0)\n"
        "ranks.handle(signal.SIGTERM, None)\nranks.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == ("" if failed else "wrote\n"), done.stderr


def test_a_rank_answers_for_itself_alone() -> None:
    """Protects from a rank that passes signals on to others, of which one may be gone, and from one that is lost
    between the fork and the rank's own handlers."""
    code = (
        "import os, signal, sys, time\nfrom ones_wrapper.launch import node\n"
        "from ones_wrapper.process import hooks\nhooks.FLAGS.armed = True\n"
        "ranks = node.Ranks(2, hang_s=0.0)\nsignal.signal(signal.SIGTERM, ranks.handle)\nlocal = ranks.fork()\n"
        "if local == 0:\n    os._exit(0)\n"
        "if local == 1:\n    while not hooks.FLAGS.stop:\n        time.sleep(0.01)\n"
        "    print('asked', hooks.FLAGS.scripts, flush=True)\n    os._exit(0)\n"
        "ranks._living = {pid: rank for pid, rank in ranks._living.items() if rank or os.waitpid(pid, 0) is None}\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nsys.exit(ranks.wait())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "asked {}\n"), done.stderr


def test_a_signal_at_the_moment_of_a_ranks_end_ends_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the last checkpoint: the signal comes once the system has forgotten the rank, and the launcher not."""
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
