"""What follows the end of the ranks: by decision, by property, and with ranks that are really killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.files.job_directory import summarize_reports
from ones_wrapper.launch.restart_policy import Action, RestartLimits, StartOutcome, Tries, decide
from ones_wrapper.launch.supervise import read_tries, write_tries
from ones_wrapper.process.exit_codes import (
    CRASHED,
    DEVICE_FAILED,
    DONT_RESTART,
    HUNG,
    OUT_OF_MEMORY,
    PEER_LOST,
    STOP_CODE,
    explaining_code,
)
from ones_wrapper.protocol import Bye, Checkpoint, Hello, Throughput, encode_report
from tests.waiting import until
from tests.wrapper.launch.tools import asked, on_node
from tests.wrapper.runs import Run, assert_exactly_once, children

pytestmark = pytest.mark.slow

STEP_5, STEP_9 = "step-000000005", "step-000000009"
KILLED, OVER = 137, 128 + signal.SIGUSR2
END, RESTART, REQUEUE = Action
FIRST, LIMITS = Tries(), RestartLimits()


def ended(code: int, checkpoint: str = STEP_5, ours: bool = True, **more: Any) -> StartOutcome:
    """Ranks that made a checkpoint."""
    return StartOutcome(code, checkpoint=checkpoint, ours=ours, **more)


def warned(code: int = STOP_CODE, **more: Any) -> StartOutcome:
    return ended(code, warned=True, **more)


@pytest.mark.parametrize(
    ("end", "tries", "action", "says"),
    [
        # One bad moment of one node does not cost a week of training.
        *[(ended(code), FIRST, RESTART, f"again from {STEP_5}") for code in (*CRASHED, HUNG, PEER_LOST)],
        (ended(KILLED, ""), FIRST, RESTART, "from the beginning"),
        (ended(PEER_LOST, ""), Tries(failures=3), END, "other blocks were lost"),
        # A batch that is far too large: each halving is progress, and there are few of them.
        (ended(OUT_OF_MEMORY), Tries(failures=3), RESTART, "with smaller passes"),
        (ended(OUT_OF_MEMORY, ""), Tries(failures=3, halvings=1000), END, "again and again"),
        # One bad card, left to others if it fails again.
        (ended(DEVICE_FAILED, ""), FIRST, RESTART, "a GPU failed; starting the ranks again"),
        (ended(DEVICE_FAILED), Tries(failures=1, failed_at=STEP_5), REQUEUE, "failed again"),
        (ended(DEVICE_FAILED, "", no_requeue="no Slurm job"), Tries(failures=1), RESTART, "try 2"),
        (ended(DEVICE_FAILED, "", no_requeue="no Slurm job"), Tries(failures=3), END, "a GPU failed"),
        (ended(DEVICE_FAILED, stopped=True), FIRST, END, ""),
        # The script's own word: what failed by itself would fail again, and a stop is meant.
        *[(ended(code), FIRST, END, "") for code in (0, 1, 7, 130, STOP_CODE, DONT_RESTART)],
        # A job longer than its time limit, unless it would train the same steps for ever.
        *[(warned(code), FIRST, REQUEUE, f"requeue 1 of 20, to go on from {STEP_5}")
          for code in (STOP_CODE, KILLED, HUNG, OVER)],
        (warned(checkpoint=""), FIRST, END, "made no checkpoint"),
        (warned(ours=False), FIRST, END, "made no checkpoint and loaded none"),
        (warned(), Tries(0, 20, ""), END, "--requeues allows no more"),
        (warned(), Tries(0, 1, STEP_5), END, "no newer checkpoint than"),
        (warned(no_requeue="no scontrol"), FIRST, END, "no scontrol"),
        # scancel, Slurm's own requeue and the companion's: a second requeue would cut off the next run.
        (warned(stopped=True), FIRST, END, ""),
        (ended(KILLED, stopped=True), FIRST, END, ""),
        (ended(KILLED, drained=True), FIRST, END, ""),
        (warned(DONT_RESTART), FIRST, END, ""),
    ],
)  # fmt: skip
def test_what_follows(end: StartOutcome, tries: Tries, action: Action, says: str) -> None:
    step = decide(end, tries, LIMITS)
    assert step.action is action and says in step.why


def test_what_is_counted() -> None:
    lacked = decide(ended(OUT_OF_MEMORY), Tries(failures=3), LIMITS)
    assert lacked.tries == Tries(restarts=1, failures=3, halvings=1)
    assert decide(warned(), Tries(3), LIMITS).tries == Tries(3, requeues=1, requeued_at=STEP_5)


def test_a_block_that_always_fails_does_not_live_from_others_progress() -> None:
    """Each time it is lost the others write a newer checkpoint, which is no progress of its own."""
    tries = FIRST
    for number in range(1, 10):
        step = decide(ended(KILLED, f"step-{number:09d}", steady=False), tries, LIMITS)
        if step.action is END:
            break
        tries = step.tries
    assert number == LIMITS.retries + 1
    assert decide(ended(KILLED, "step-000000099"), tries, LIMITS).tries.failures == 1


@given(
    st.lists(st.tuples(st.sampled_from([KILLED, HUNG, STOP_CODE, 1]), st.booleans(), st.integers(0, 3)), max_size=60),
    st.integers(0, 4),
    st.integers(0, 6),
)
def test_tries_are_bounded(ends: list[tuple[int, bool, int]], retries: int, requeues: int) -> None:
    """No more requeues than allowed, never two without progress, nor more crashes in a row than allowed."""
    tries, limits, step, row = Tries(), RestartLimits(retries, requeues), 1, 0
    asked, last = 0, -1
    for code, warned, gained in ends:
        step += gained
        row = 0 if gained else row
        name = f"step-{step:09d}"
        following = decide(StartOutcome(code, warned=warned, checkpoint=name, ours=True), tries, limits)
        if following.action is RESTART:
            row += 1
            assert row <= retries
        elif following.action is REQUEUE:
            asked += 1
            assert step > last
            last = step
        assert following.delay_s <= 30
        if following.action is not END:
            tries = following.tries
    assert asked <= requeues and asked == tries.requeues


def test_cause() -> None:
    """Protects the decision from errors of ranks that lost their peer, and from our own kills."""
    assert explaining_code([]) == explaining_code([0, 0]) == 0
    assert explaining_code([1, 137, 1]) == 137
    assert explaining_code([1, HUNG, 137]) == HUNG
    assert explaining_code([137, DONT_RESTART]) == DONT_RESTART
    assert explaining_code([1, 134, DEVICE_FAILED]) == DEVICE_FAILED
    assert explaining_code([STOP_CODE, 7, 1]) == 7
    assert explaining_code([0, STOP_CODE]) == STOP_CODE
    for cause in (7, KILLED, HUNG, DONT_RESTART, STOP_CODE):
        assert explaining_code([PEER_LOST, cause]) == cause
    assert explaining_code([0, PEER_LOST]) == PEER_LOST


def test_tries_are_kept_for_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of another job in the same directory, nor of a damaged file; nothing is tried without."""
    assert read_tries(tmp_path, 3) == Tries(3)
    assert write_tries(tmp_path, Tries(3, 2, STEP_5))
    assert read_tries(tmp_path, 3) == Tries(3, 2, STEP_5)
    assert read_tries(tmp_path, 4) == Tries(4)
    for text in ("{", "[]", '{"job_id": 3, "unknown": 1, "requeues": 1}'):
        (tmp_path / "tries.json").write_text(text)
        assert read_tries(tmp_path, 3).job_id == 3
    assert not write_tries(tmp_path / "none", Tries())
    assert "tries.json cannot be written (No such file or directory), so nothing is tried" in capsys.readouterr().err


def test_what_the_reports_tell(tmp_path: Path) -> None:
    """Protects from requeues without a checkpoint of this run, and of what the companion drained."""
    hello = Hello(1, 1, 1, 8, 1.0, 8, 8, 9, 1, 0, 0, 0, STEP_5)
    lines = [hello, Checkpoint(STEP_9, 0, 0, 9, 1, 0.1), Bye("drained", 9, 143)]
    text = b"".join(encode_report(n, 0.0, line) for n, line in enumerate(lines, 1))
    (tmp_path / "reports-2.jsonl").write_bytes(text + b'{"torn')
    seen = summarize_reports(tmp_path, 2)
    assert (seen.checkpoints, seen.drained) == ({STEP_5, STEP_9}, True)
    assert summarize_reports(tmp_path, 1).checkpoints == frozenset()


# Real processes from here on.


def ranks_of(run: Run) -> list[int]:
    """Process ids of a local run's ranks."""

    def found() -> list[int]:
        return next((ranks for node in children(run.process.pid) if (ranks := children(node))), [])

    return until(found, "ranks", 30.0)


def test_killed_rank_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """All start again within the same `ones-run`, and each sample that counts was used once."""
    hurry = tmp_path / "hurry"
    run = Run(tmp_path, "--step-ms", "300", "--epochs", "16", "--hurry", str(hurry), ranks=2)
    run.wait_for(Throughput)
    run.signal(signal.SIGUSR1)
    good = run.wait_for(Checkpoint)
    run.wait_for(Throughput, lambda report: report.step > good.step)
    os.kill(ranks_of(run)[-1], signal.SIGKILL)
    hurry.touch()
    assert run.end() == 0, run.errors
    assert f"killed by signal 9; starting the ranks again from {good.name}, try 1 of 3" in run.errors
    first, second = run.of(Hello)
    assert (first.step, second.step, second.checkpoint) == (0, good.step, good.name)
    assert run.of(Bye)[-1].reason == "finished"
    assert read_tries(tmp_path, 0) == Tries(0, restarts=1, failures=1, failed_at=good.name)
    assert_exactly_once(tmp_path, 16, 97)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text("import os, signal, sys, time\nfrom ones_wrapper.process import hang_detector as watch\n" + text)
    return path


def test_tries_without_progress_end(tmp_path: Path) -> None:
    crashing = script(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)\n")
    run = Run(tmp_path / "job", script=crashing, ONES_RETRIES="1")
    assert run.end() == 139
    assert "from the beginning, try 1 of 1" in run.errors
    assert "tried 1 more times without a newer checkpoint" in run.errors
    assert run.errors.count("starting the ranks again") == 1


def test_hung_rank_is_ended_and_says_where_it_hangs(tmp_path: Path) -> None:
    hanging = script(
        tmp_path,
        "def stands_still():\n    time.sleep(600)\n"
        "watch.beat()\n"
        "if os.environ['RANK'] == '1' and os.environ['ONES_ATTEMPT'] == '0':\n    stands_still()\n"
        "for _ in range(10):\n    watch.beat()\n    time.sleep(0.1)\n"
        "watch.pause()\n"
        "time.sleep(5 if os.environ['ONES_ATTEMPT'] == '1' else 0)\n"
        "print('done', os.environ['RANK'], os.environ['ONES_ATTEMPT'])\n",
    )
    run = Run(tmp_path / "job", script=hanging, ranks=2, ONES_HANG_S="4")
    assert run.end() == 0, run.errors
    assert "local rank 1 reached no step boundary for 4 s" in run.errors
    assert "in stands_still" in run.errors
    assert "the ranks hung; starting the ranks again" in run.errors
    assert sorted(run.output.splitlines()) == ["done 0 0", "done 0 1", "done 1 1"]


def slurm(folder: Path, scontrol: str = "") -> dict[str, str]:
    return {**on_node(folder, scontrol=scontrol), "SLURM_JOB_ID": "7"}


def test_the_time_limit_requeues_and_a_refusal_is_not_counted(tmp_path: Path) -> None:
    env, job = slurm(tmp_path), tmp_path / "job"
    run = Run(job, "--step-ms", "30", "--epochs", "1000", **env)
    run.wait_for(Hello)
    run.signal(signal.SIGUSR2)
    assert run.end() == STOP_CODE, run.errors
    saved = run.of(Checkpoint)[-1]
    assert asked(tmp_path) == ["scontrol requeue 7"]
    assert f"requeue 1 of 20, to go on from {saved.name}" in run.errors
    assert read_tries(job, 7) == Tries(7, requeues=1, requeued_at=saved.name)

    env = slurm(tmp_path, scontrol="echo 'Job requeue disabled' >&2; exit 1")
    second = Run(job, "--step-ms", "30", "--epochs", "1000", restart=1, **env)
    second.wait_for(Throughput, lambda report: report.step > saved.step)
    second.signal(signal.SIGUSR2)
    assert second.end() == STOP_CODE
    assert "Job requeue disabled" in second.errors
    assert read_tries(job, 7).requeues == 1


def test_ranks_that_do_not_end_in_time_are_requeued_without(tmp_path: Path) -> None:
    """Slurm's end of the job would leave it TIMEOUT, not requeued."""
    job = tmp_path / "job"
    (job / "checkpoints" / STEP_5).mkdir(parents=True)
    (job / "checkpoints" / STEP_5 / "manifest.json").write_text("{}")
    (job / ".job").write_text("7\n")  # its own directory, from a run before
    loaded = Checkpoint(STEP_5, 0, 0, 5, 1, 0.1)
    (job / "reports-1.jsonl").write_bytes(encode_report(1, 0.0, loaded))
    says = f"open({str(tmp_path / 'deaf')!r}, 'w').close()"
    deaf = script(tmp_path, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{says}\ntime.sleep(600)\n")
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 30)}
    run = Run(job, restart=1, script=deaf, **slurm(tmp_path), **end)
    until((tmp_path / "deaf").exists)
    run.signal(signal.SIGUSR2)
    assert run.end() == STOP_CODE
    assert asked(tmp_path) == ["scontrol requeue 7"]
