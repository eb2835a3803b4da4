"""What follows the end of the ranks: by decision, by property, and with ranks that are really killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.files.job_directory import summarize_reports
from ones_wrapper.launch.restart_policy import Action, RestartLimits, StartOutcome, Tries, decide
from ones_wrapper.launch.tries import read_tries, write_tries
from ones_wrapper.process.exit_codes import (
    CRASHED,
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
KILLED = 137


def action(end: StartOutcome, tries: Tries = Tries(), limits: RestartLimits = RestartLimits()) -> Action:
    return decide(end, tries, limits).action


def test_want_of_memory_costs_no_try() -> None:
    """Protects a batch that is far too large: each halving is progress, and there are few of them."""
    step = decide(StartOutcome(OUT_OF_MEMORY), Tries(0, failures=3), RestartLimits())
    assert (step.action, step.tries) == (Action.RESTART, Tries(0, restarts=1, failures=3, halvings=1))
    assert action(StartOutcome(OUT_OF_MEMORY), Tries(0, failures=3, halvings=1000)) is Action.END


@pytest.mark.parametrize("code", [*CRASHED, HUNG, OUT_OF_MEMORY])
def test_crashes_are_tried_again(code: int) -> None:
    """Protects a week of training from one bad moment of one node."""
    assert action(StartOutcome(code, checkpoint=STEP_5, ours=True)) is Action.RESTART
    assert action(StartOutcome(code)) is Action.RESTART  # from the beginning: nothing is lost by it


@pytest.mark.parametrize("code", [0, 1, 7, 130, STOP_CODE, DONT_RESTART])
def test_the_scripts_own_word_ends_the_job(code: int) -> None:
    """Protects the allocation: what failed by itself would fail again, and a stop is meant."""
    assert action(StartOutcome(code, checkpoint=STEP_5, ours=True)) is Action.END


@pytest.mark.parametrize("code", [STOP_CODE, KILLED, HUNG, 128 + signal.SIGUSR2])
def test_the_time_limit_leads_to_a_requeue(code: int) -> None:
    """Protects jobs longer than their time limit."""
    end = StartOutcome(code, warned=True, checkpoint=STEP_5, ours=True)
    step = decide(end, Tries(3), RestartLimits())
    assert (step.action, step.tries) == (Action.REQUEUE, Tries(3, requeues=1, requeued_at=STEP_5))
    assert "requeue 1 of 20" in step.why and STEP_5 in step.why


@pytest.mark.parametrize(
    ("end", "tries", "says"),
    [
        (StartOutcome(STOP_CODE, warned=True), Tries(), "made no checkpoint"),
        (StartOutcome(STOP_CODE, warned=True, checkpoint=STEP_5), Tries(), "made no checkpoint and loaded none"),
        (
            StartOutcome(STOP_CODE, warned=True, checkpoint=STEP_5, ours=True),
            Tries(0, 20, ""),
            "--requeues allows no more",
        ),
        (
            StartOutcome(STOP_CODE, warned=True, checkpoint=STEP_5, ours=True),
            Tries(0, 1, STEP_5),
            "no newer checkpoint than",
        ),
        (
            StartOutcome(STOP_CODE, warned=True, checkpoint=STEP_5, ours=True, no_requeue="no scontrol"),
            Tries(),
            "no scontrol",
        ),
    ],
)
def test_no_requeue_that_leads_nowhere(end: StartOutcome, tries: Tries, says: str) -> None:
    """Protects the queue from a job that trains the same steps for ever, and says why it ended."""
    step = decide(end, tries, RestartLimits())
    assert step.action is Action.END and says in step.why


def test_nobody_is_requeued_against_a_stop_or_twice() -> None:
    """Protects scancel, Slurm's own requeue, and the companion's: a second requeue would cut off the next run."""
    good = {"checkpoint": STEP_5, "ours": True}
    assert action(StartOutcome(STOP_CODE, stopped=True, warned=True, **good)) is Action.END  # type: ignore[arg-type]
    assert action(StartOutcome(KILLED, stopped=True, **good)) is Action.END  # type: ignore[arg-type]
    assert action(StartOutcome(KILLED, drained=True, **good)) is Action.END  # type: ignore[arg-type]
    assert action(StartOutcome(DONT_RESTART, warned=True, **good)) is Action.END  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.sampled_from([KILLED, HUNG, STOP_CODE, 1]), st.booleans(), st.integers(0, 3)), max_size=60),
    st.integers(0, 4),
    st.integers(0, 6),
)
def test_tries_are_bounded(ends: list[tuple[int, bool, int]], retries: int, requeues: int) -> None:
    """Protects the allocation and the queue, whatever happens in whatever order: no more requeues than allowed,
    never two without progress, and no more crashes in a row than allowed without progress.
    """
    tries, limits, step, row = Tries(), RestartLimits(retries, requeues), 1, 0
    asked, last = 0, -1
    for code, warned, gained in ends:
        step += gained
        row = 0 if gained else row
        name = f"step-{step:09d}"
        following = decide(StartOutcome(code, warned=warned, checkpoint=name, ours=True), tries, limits)
        if following.action is Action.RESTART:
            row += 1
            assert row <= retries
        elif following.action is Action.REQUEUE:
            asked += 1
            assert step > last
            last = step
        assert following.delay_s <= 30
        if following.action is not Action.END:
            tries = following.tries
    assert asked <= requeues and asked == tries.requeues


def test_cause() -> None:
    """Protects the decision from consequences: errors of ranks that lost their peer, and our own kills."""
    assert explaining_code([]) == explaining_code([0, 0]) == 0
    assert explaining_code([1, 137, 1]) == 137
    assert explaining_code([1, HUNG, 137]) == HUNG
    assert explaining_code([137, DONT_RESTART]) == DONT_RESTART
    assert explaining_code([STOP_CODE, 7, 1]) == 7
    assert explaining_code([0, STOP_CODE]) == STOP_CODE
    for cause in (7, KILLED, HUNG, DONT_RESTART, STOP_CODE):
        assert explaining_code([PEER_LOST, cause]) == cause
    assert explaining_code([0, PEER_LOST]) == PEER_LOST


def test_tries_are_kept_for_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects the count from another job in the same directory, and from a damaged file; nothing is tried without."""
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
    """Protects from requeues without a checkpoint of this run, and from requeueing what the companion drained."""
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
    """Protects the whole way: a rank dies, the others are ended, all start again within the same `ones-run` from
    the last checkpoint, and each sample has been used once in what counts.
    """
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
    """Protects the allocation from a script that always crashes; the exit code says how."""
    crashing = script(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)\n")
    run = Run(tmp_path / "job", script=crashing, ONES_RETRIES="1")
    assert run.end() == 139
    assert "from the beginning, try 1 of 1" in run.errors
    assert "tried 1 more times without a newer checkpoint" in run.errors
    assert run.errors.count("starting the ranks again") == 1


def test_hung_rank_is_ended_and_says_where_it_hangs(tmp_path: Path) -> None:
    """Protects the job's time: a rank that stands still is found, its stack is in the log, and training is tried
    again.
    """
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
    assert "local rank 1 at no step boundary for 4 s" in run.errors
    assert "in stands_still" in run.errors
    assert "the ranks hung; starting the ranks again" in run.errors
    assert sorted(run.output.splitlines()) == ["done 0 0", "done 0 1", "done 1 1"]


def slurm(folder: Path, scontrol: str = "") -> dict[str, str]:
    """The environment of job 7 on this machine."""
    return {**on_node(folder, scontrol=scontrol), "SLURM_JOB_ID": "7"}


def test_time_limit_requeues_once_and_not_without_progress(tmp_path: Path) -> None:
    """Protects a job at its time limit: checkpoint, requeue, counted; then a second warning before any progress
    requeues nothing; a refusal by Slurm is said and not counted.
    """
    env, job = slurm(tmp_path), tmp_path / "job"
    run = Run(job, "--step-ms", "30", "--epochs", "1000", **env)
    run.wait_for(Hello)
    run.signal(signal.SIGUSR2)
    assert run.end() == STOP_CODE, run.errors
    saved = run.of(Checkpoint)[-1]
    assert asked(tmp_path) == ["scontrol requeue 7"]
    assert f"requeue 1 of 20, to go on from {saved.name}" in run.errors
    assert read_tries(job, 7) == Tries(7, requeues=1, requeued_at=saved.name)

    nothing = script(tmp_path, "while True:\n    time.sleep(0.1)\n")
    second = Run(job, restart=1, script=nothing, **env)
    ranks_of(second)
    time.sleep(0.5)
    second.signal(signal.SIGUSR2)
    assert second.end() == STOP_CODE
    assert "made no checkpoint and loaded none" in second.errors
    assert asked(tmp_path) == ["scontrol requeue 7"]

    env = slurm(tmp_path, scontrol="echo 'Job requeue disabled' >&2; exit 1")
    third = Run(job, "--step-ms", "30", "--epochs", "1000", restart=2, **env)
    third.wait_for(Hello)
    time.sleep(0.5)
    third.signal(signal.SIGUSR2)
    assert third.end() == STOP_CODE
    assert "Job requeue disabled" in third.errors
    assert read_tries(job, 7).requeues == 1


def test_ranks_that_do_not_end_in_time_are_requeued_without(tmp_path: Path) -> None:
    """Protects the last durable checkpoint's worth: Slurm's end of the job would leave it TIMEOUT, not requeued."""
    job = tmp_path / "job"
    done = Run(job, "--epochs", "1", **slurm(tmp_path))
    assert done.end() == 0, done.errors
    reports = (job / "reports-0.jsonl").read_bytes()
    deaf = script(
        tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)\n"
    )
    (job / "reports-1.jsonl").write_bytes(reports)  # as if this run had loaded it
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 30)}
    run = Run(job, restart=1, script=deaf, **slurm(tmp_path), **end)
    ranks_of(run)
    time.sleep(0.5)
    run.signal(signal.SIGUSR2)
    assert run.end() == STOP_CODE
    assert asked(tmp_path) == ["scontrol requeue 7"]
