"""`ones-run --blocks`: which block starts its ranks, what they are told, and what follows their end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from ones_wrapper.files.job_directory import ExitCodes, summarize_reports
from ones_wrapper.files.places import find_job_directory
from ones_wrapper.launch import LaunchOptions, plan, wanted_block
from ones_wrapper.launch import blocks as blocks_module
from ones_wrapper.launch import slurm as slurm_module
from ones_wrapper.launch.blocks import OtherBlocks
from ones_wrapper.launch.node import Forks
from ones_wrapper.launch.restart_policy import MOST_FORKS, Tries, fork_delay_s
from ones_wrapper.launch.supervise import read_tries, write_tries
from ones_wrapper.membership.coming import Coming
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.membership.plan import Member, Plan
from ones_wrapper.network.client import StoreClient
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.process.block import Block, own_block
from ones_wrapper.process.exit_codes import DONT_RESTART, PEER_LOST, STOP_CODE
from ones_wrapper.protocol import Bye, Checkpoint, Membership, Order, encode, encode_report
from tests.marks import nightly
from tests.waiting import until
from tests.wrapper.launch.tools import asked, on_node
from tests.wrapper.preloaded import Started
from tests.wrapper.runs import Run, write_order

ARRAY = 7
IN_ARRAY = {
    "ONES_BLOCKS": "1",
    "SLURM_JOB_ID": "9",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_MIN": "0",
}
LEADER = Leader(0, "127.0.0.1", 12345, "secret", 0, 0)


def others(job_dir: Path, task: int = 3, *, lives: bool = True, **env: str) -> OtherBlocks:
    """As this task's `ones-run` sees them; every leader lives, or none."""
    return OtherBlocks(Block(ARRAY, task, 0), job_dir, IN_ARRAY | env, lambda leader: lives)


def leads(job_dir: Path, task: int, term: int = 0, restart: int = 0) -> HotFolder:
    hot = HotFolder(job_dir, ARRAY)
    hot.prepare()
    assert hot.claim(replace(LEADER, term=term, task=task, restart=restart))
    return hot


def members(job_dir: Path, *tasks: int, term: int = 0) -> None:
    """The leader's reports say that these train together."""
    report = Membership(1, tasks, (0,) * len(tasks), len(tasks), 1, len(tasks), 5, 32, 0.1)
    (job_dir / f"reports-{term}.jsonl").write_bytes(encode_report(1, 1.0, report))


# Before torch is imported.


def test_a_block_that_comes_late_has_nothing_to_do(tmp_path: Path) -> None:
    leads(tmp_path, 0).end()
    for task in (3, 0):
        assert "job 7 has ended" in others(tmp_path, task, lives=False).not_wanted()


def test_which_order_counts(tmp_path: Path) -> None:
    """The newest of the leader's term, from the spool too."""
    (spool := tmp_path / "spool").mkdir()
    leads(tmp_path, 0, term=2)
    (spool / "orders-7.json").write_bytes(encode(Order(5, 2, blocks=(0, 3))))
    write_order(tmp_path, Order(4, 2, blocks=(0,)))
    assert "not wanted" in others(tmp_path).not_wanted()
    assert others(tmp_path, ONES_SPOOL=str(spool)).not_wanted() == ""
    write_order(tmp_path, Order(8, 3, blocks=(0,)))
    assert others(tmp_path, ONES_SPOOL=str(spool)).not_wanted() == ""


@pytest.mark.parametrize(
    ("order", "task", "lives", "wait_s", "says"),
    [
        (Order(1, 0, blocks=(0, 2)), 3, True, 0.0, "task 3 is not wanted now; wanted tasks: 0, 2"),
        (Order(1, 0, blocks=(0, 2)), 2, False, 600.0, ""),  # waits for nobody
        (Order(1, 0, blocks=(0, 2)), 3, False, 0.0, ""),  # somebody must go on
        # An array without a throttle or a companion: one block trains, and the next task follows it.
        (None, 3, True, 0.0, "--array=0-7%1"),
        (Order(1, 0, batch=32), 3, True, 0.0, "--array=0-7%1"),
        (None, 3, False, 600.0, ""),
    ],
)
def test_who_is_wanted_next_to_a_leader(
    tmp_path: Path, order: Order | None, task: int, lives: bool, wait_s: float, says: str
) -> None:
    hot = leads(tmp_path, 0)
    if order is not None:
        write_order(tmp_path, order)
    found = others(tmp_path, task, lives=lives).not_wanted(wait_s)
    assert says in found and bool(found) == bool(says)
    assert hot.newest() == LEADER


def test_who_waits_for_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from two memberships if all blocks start at once."""
    monkeypatch.setattr(blocks_module, "_LOOK_S", 0.02)
    started = time.monotonic()
    assert others(tmp_path, 0).not_wanted(60.0) == ""
    assert others(tmp_path, 3, SLURM_ARRAY_TASK_MIN="3").not_wanted(60.0) == ""
    assert others(tmp_path).not_wanted(0.3) == ""
    assert 0.3 <= time.monotonic() - started < 30
    write_order(tmp_path, Order(1, 0, blocks=(0, 3)))
    assert others(tmp_path).not_wanted(60.0) == ""  # ordered: no wait
    write_order(tmp_path, Order(2, 0, blocks=(0,)))
    monkeypatch.setattr("ones_wrapper.launch.blocks.time.sleep", lambda seconds: leads(tmp_path, 0))
    assert "not wanted" in others(tmp_path).not_wanted(60.0)


def test_its_own_leader_file_is_no_other(tmp_path: Path) -> None:
    """Nor if its ranks start again; its task's earlier start was another."""
    leads(tmp_path, 3)
    assert not others(tmp_path).others_train()
    assert others(tmp_path).not_wanted() == ""
    leads(tmp_path, 0, term=1)
    assert others(tmp_path).others_train()
    assert not others(tmp_path, lives=False).others_train()


# What is each block's own.


def test_blocks_leave_each_others_files(tmp_path: Path) -> None:
    """Exit codes and tries, also of two whose numbers begin alike."""
    for task, code in ((1, 5), (11, 6)):
        ExitCodes(tmp_path, 0, task).write(0, code)
        assert write_tries(tmp_path, Tries(20 + task, restarts=task), task)
    ExitCodes(tmp_path, 1, 1).write(0, 9)
    first, eleventh = ExitCodes(tmp_path, 0, 1), ExitCodes(tmp_path, 0, 11)
    assert (first.explaining(), eleventh.explaining(), ExitCodes(tmp_path, 0).explaining()) == (5, 6, 0)
    first.remove()
    again = ExitCodes(tmp_path, 1, 1)
    assert (first.explaining(), again.explaining(), eleventh.explaining()) == (0, 0, 6)
    assert read_tries(tmp_path, 21, 1) == Tries(21, restarts=1)
    assert read_tries(tmp_path, 31, 11) == Tries(31, restarts=11)
    assert read_tries(tmp_path, 21) == Tries(21)


# What follows the end of the ranks.


def test_starts_after_lost_peers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once the first time, then slower, then left to `ones-run`; progress counts from the start."""
    slept: list[float] = []
    monkeypatch.setattr("ones_wrapper.launch.node.time.sleep", slept.append)
    forks = Forks(tmp_path)
    for _ in range(MOST_FORKS):
        assert forks.wait(PEER_LOST)
    assert not forks.wait(PEER_LOST)
    assert slept == [fork_delay_s(row) for row in range(1, MOST_FORKS + 1)]
    assert (slept[0], max(slept)) == (0.0, 5.0) and slept == sorted(slept)
    newest = tmp_path / "checkpoints" / "step-000000005"
    newest.mkdir(parents=True)
    (newest / "manifest.json").write_text("{}")
    assert forks.wait(PEER_LOST) and slept[-1] == 0.0
    assert forks.wait(PEER_LOST) and slept[-1] > 0.0
    env = forks.env({})
    assert env["ONES_FORK"] == "22"
    assert "ONES_NEXT_TERM" not in env


def test_who_trains_together(tmp_path: Path) -> None:
    """The last membership in the newest term counts."""
    leads(tmp_path, 3, term=4)
    seen = others(tmp_path)
    assert seen.alone()
    members(tmp_path, 3, 0, term=4)
    assert (seen.term(), seen.alone(), summarize_reports(tmp_path, 4).tasks) == (4, False, (3, 0))
    with (tmp_path / "reports-4.jsonl").open("ab") as file:
        file.write(encode_report(2, 1.0, Membership(2, (3,), (0,), 1, 1, 1, 5, 32, 0.1)))
        file.write(encode_report(3, 1.0, Checkpoint("step-000000005", 0, 0, 5, 1, 0.1)))
    assert seen.alone()


def slurm(folder: Path, task: int = 0, scancel: str = "", **env: str) -> dict[str, str]:
    return {
        **IN_ARRAY,
        **on_node(folder, scancel=scancel),
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_MIN": str(task),
        **env,
    }


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's directory, with Slurm's tools in the PATH."""
    monkeypatch.setenv("PATH", slurm(tmp_path)["PATH"])
    (job := tmp_path / "job").mkdir()
    return job


CANCELLED = ["scancel --state=PENDING 7"]


@pytest.mark.parametrize(
    ("code", "stopped", "reason", "ends"),
    [
        (0, False, "finished", True),
        (0, False, "stopped", True),
        (0, False, "moved", False),
        (0, False, "error", False),
        (0, False, "", False),
        (STOP_CODE, True, "", False),
        (137, False, "", False),
        (1, True, "", False),
        (DONT_RESTART, False, "", True),
    ],
)
def test_a_leader_that_leaves(seen: Path, tmp_path: Path, code: int, stopped: bool, reason: str, ends: bool) -> None:
    """Protects from training again after the script's or owner's end, and a job that trains on."""
    leads(seen, 3)
    if reason:
        members(seen, 3)
        with (seen / "reports-0.jsonl").open("ab") as file:
            file.write(encode_report(2, 1.0, Bye(reason, 5)))
    others(seen, 3).ended(code, stopped)
    assert asked(tmp_path) == CANCELLED * ends
    assert HotFolder(seen, ARRAY).over() is ends


def test_a_script_that_fails(seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects the queue from one failure a task; but not while others train, or if it was one of several."""
    others(seen, 0).ended(7, False)  # before it led
    assert asked(tmp_path) == CANCELLED
    assert "would fail again" in capsys.readouterr().err
    leads(seen, 3)
    others(seen, 0).ended(7, False)  # another leads
    members(seen, 3, 0)
    others(seen, 3).ended(7, False)  # task 0 founds the next term
    assert asked(tmp_path) == CANCELLED
    assert not HotFolder(seen, ARRAY).over()  # its owner may requeue a task


def test_a_script_that_fails_as_it_loads(seen: Path, tmp_path: Path) -> None:
    """The blocks have met, and no report tells it yet. Once the others are alone, it is the script's error."""
    members(seen, 3, 0, term=4)
    hot = leads(seen, 3, term=5)
    plan = Plan(7, 5, (Member(3, 0, "a", 1, 1, 1), Member(0, 0, "b", 1, 1, 1)))
    hot.announce(Coming(plan, 1.0, 2.0).fields())
    others(seen, 3).ended(7, False)
    assert asked(tmp_path) == []
    leads(seen, 0, term=6)
    others(seen, 0).ended(7, False)
    assert asked(tmp_path) == CANCELLED


def test_a_refusal_to_cancel_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code does not change by it, nor by a Slurm that does not answer."""
    leads(tmp_path, 3).end()
    monkeypatch.setenv("PATH", slurm(tmp_path, scancel="echo 'Invalid user' >&2; exit 1")["PATH"])
    others(tmp_path, 0).ended(0, False)
    assert asked(tmp_path) == [], "the others leave it to the leader"
    others(tmp_path).ended(0, False)
    assert "waiting tasks were not cancelled (Invalid user); cancel them: scancel 7" in capsys.readouterr().err
    slurm(tmp_path, scancel="exec sleep 60")
    monkeypatch.setattr(slurm_module, "TIMEOUT_S", 0.2)
    others(tmp_path).ended(0, False)
    assert "no answer" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    others(tmp_path).ended(0, False)
    assert capsys.readouterr().err == ""


# Real processes from here on.

LISTENS = """
import os, signal, sys, time
from pathlib import Path
from ones_wrapper.membership.files import HotFolder, Leader\nfrom ones_wrapper.process.block import own_block
from ones_wrapper.network.job_network import JobNetwork
env, block = os.environ, own_block(os.environ)
words = " ".join([env["RANK"], env["WORLD_SIZE"], env.get("ONES_FORK", "0"), str(block)])
os.write(1, (words + "\\n").encode())
hot, fork, rank = HotFolder(Path(env["ONES_JOB_DIR"]), block.array), int(env.get("ONES_FORK", "0")), int(env["RANK"])
def lead():
    if rank == 0:
        term, network = hot.next_term(hot.newest()), JobNetwork.found(env, hot.path)
        board = network.client("host", f"term-{term}-{fork}")
        assert hot.claim(Leader(term, network.host, network.port, board.place, block.task, block.restart))
        return board
def meet():
    here = [Path(env["ONES_JOB_DIR"]) / f"came-{block.task}-{fork}-{one}" for one in range(int(env["WORLD_SIZE"]))]
    here[rank].touch()
    while not all(path.exists() for path in here):
        time.sleep(0.02)
"""


def block_of(folder: Path, text: str, task: int = 0, *, ranks: int = 1, **env: str) -> Run:
    script = folder / f"script{task}.py"
    script.write_text(LISTENS + text)
    place: dict[str, Any] = slurm(folder, task) | env
    return Run(folder / "job", script=script, ranks=ranks, **place)


def leading(job: Path, term: int, task: int) -> StoreClient:
    """Another block that leads the job, as long as this connection is open."""
    hot = HotFolder(job, ARRAY)
    network = JobNetwork.here(secret=JobSecret.make(hot.path))
    board = network.client("host", f"term-{term}-aa")
    assert hot.claim(Leader(term, network.host, network.port, board.place, task, 0))
    return board


@pytest.mark.slow
def test_ranks_that_lost_the_others_start_at_once(tmp_path: Path) -> None:
    """The same `ones-run`, the same launcher, new ranks; nothing is counted as a failure."""
    # A rank that goes while another still begins has that one ended too.
    run = block_of(tmp_path, f"lead()\nmeet()\nsys.exit({PEER_LOST} if fork < 2 else 0)\n", task=3, ranks=2)
    assert run.end() == 0, run.errors
    lines = sorted(run.output.splitlines(), key=lambda line: line.split()[2::-1])
    assert lines == [f"{r} 2 {f} {Block(7, 3, 0)}" for f in range(3) for r in range(2)]
    assert run.errors.count("other blocks were lost; starting the ranks again") == 2
    assert not (tmp_path / "job/tries-3.json").exists()
    assert not list((tmp_path / "job").glob(".exit*"))
    assert asked(tmp_path) == []


SRUN = """#!/bin/bash
# As srun on two nodes: options first; ends all where one fails.
while [ "${1#-}" != "$1" ]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
trap 'kill -USR2 $first $second' USR2
wait -n; code=$?
[ $code -ne 0 ] && kill -9 $first $second 2>/dev/null
while wait -n; now=$?; [ $now -ne 127 ]; do code=$((code ? code : now)); done
exit $code
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_nodes_of_a_block_start_again_alike(tmp_path: Path) -> None:
    """Ranks find each other again; if one node's rank was killed, the whole block starts again by `ones-run`."""
    env: dict[str, Any] = slurm(
        tmp_path, 3, SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="localhost,localhost", ONES_LAUNCHER="srun"
    )
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\n"
        'os.write(1, f\'{env["RANK"]} of {int(total)} in {env["ONES_ATTEMPT"]}.{fork}\\n\'.encode())\n'
        "if rank == 1 and fork == 1 and env['ONES_ATTEMPT'] == '0':\n    os.kill(os.getpid(), 9)\n"
        f"dist.barrier()\nsys.exit({PEER_LOST} if fork == 0 else 0)\n"
    )
    text = f"try:\n{indent(text, '    ')}except RuntimeError:\n    sys.exit({PEER_LOST})\n"
    run = block_of(tmp_path, text, task=3, **env)
    assert run.end() == 0, run.errors
    lines = [line for line in run.output.splitlines() if " of " in line]
    assert sorted(lines) == sorted(f"{r} of 2 in {start}" for r in (0, 1) for start in ("0.0", "0.1", "1.0", "1.1"))
    assert "killed by signal 9; starting the ranks again" in run.errors
    assert read_tries(tmp_path / "job", 9, 3).restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [nightly(False), True])
def test_a_rescue_may_take_its_time(tmp_path: Path, killed: bool) -> None:
    """One rank writes a checkpoint from its memory, while the other has ended or was killed, which is counted."""
    first = "os.kill(os.getpid(), 9)" if killed else f"sys.exit({PEER_LOST})"
    text = (
        f"os.chdir({str(tmp_path)!r})\n"
        "if Path('rescued').exists():\n    sys.exit(0)\n"
        f"if rank == 1:\n    {first}\n"
        f"time.sleep(6)\nPath('rescued').touch()\nsys.exit({PEER_LOST})\n"
    )
    run = block_of(tmp_path, text, ranks=2)
    assert run.end() == 0, run.errors
    assert ("killed by signal 9; starting the ranks again" in run.errors) is killed
    assert ("other blocks were lost" in run.errors) is not killed
    assert read_tries(tmp_path / "job", 9, 0).restarts == killed


LATE = """
import os, time
forks = []
os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: time.sleep(2.0 * (len(forks) == 2)))
"""


def test_a_rank_may_end_before_another_begins(tmp_path: Path) -> None:
    """It waited for the word of others that had ended, and failed the job."""
    (tmp_path / "late.py").write_text(LATE)
    run = block_of(tmp_path, "", ranks=2, ONES_PRELOAD="late")
    assert run.end() == 0, run.errors
    assert sorted(line.split()[0] for line in run.output.splitlines()) == ["0", "1"]


@pytest.mark.slow
def test_a_plain_job_has_no_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nsys.exit({PEER_LOST} if os.environ['ONES_ATTEMPT'] == '0' else 0)\n")
    run = Run(tmp_path / "job", script=script)
    assert run.end() == 0, run.errors
    assert "starting the ranks again from the beginning, try 1 of 3" in run.errors


def test_a_stop_ends_a_block_that_lost_the_others(tmp_path: Path) -> None:
    text = (
        "told = []\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), told.append(1)))\n"
        f"Path({str(tmp_path / 'up')!r}).touch()\nwhile not told:\n    time.sleep(0.02)\nsys.exit({PEER_LOST})\n"
    )
    run = block_of(tmp_path, text)
    until((tmp_path / "up").exists)
    run.signal(signal.SIGTERM)
    assert run.end() == STOP_CODE, run.errors
    assert len(run.output.splitlines()) == 1
    assert asked(tmp_path) == []


TRAINS = """
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.protocol import Checkpoint, encode_report
kept = lead()
if rank == 0 and kept:
    job = Path(env["ONES_JOB_DIR"])
    (job / "checkpoints/step-000000005").mkdir(parents=True, exist_ok=True)
    (job / "checkpoints/step-000000005/manifest.json").write_text("{}")
    line = encode_report(1, 1.0, Checkpoint("step-000000005", 0, 0, 5, 1, 0.1))
    (job / f"reports-{hot.newest().term}.jsonl").write_bytes(line)
FLAGS.armed = True
(Path(env["ONES_JOB_DIR"]) / f"up{block.task}").touch()
while not FLAGS.stop:
    time.sleep(0.02)
sys.exit(143)
"""


@pytest.mark.parametrize("reports", [True, False])
def test_the_last_block_is_requeued_by_its_own_name(tmp_path: Path, reports: bool) -> None:
    """A requeue by the array's id would take its other tasks too. If its ranks wait, or still load, the checkpoint that
    it would go on from is in the reports of the term before."""
    waits = "" if reports else "after = lead()\n"
    run = block_of(tmp_path, TRAINS.replace("FLAGS.armed", f"{waits}FLAGS.armed"), task=3)
    until((tmp_path / "job/up3").exists)
    run.signal(signal.SIGUSR2)
    assert run.end() == STOP_CODE, run.errors
    assert others(tmp_path / "job").term() == (0 if reports else 1)
    assert asked(tmp_path) == ["scontrol requeue 7_3"]
    assert read_tries(tmp_path / "job", 9, 3).requeued_at == "step-000000005"


def test_a_block_whose_time_is_over_goes_while_others_train(tmp_path: Path) -> None:
    run = block_of(tmp_path, TRAINS, task=3)
    until((tmp_path / "job/up3").exists)
    board = leading(tmp_path / "job", term=1, task=0)
    run.signal(signal.SIGUSR2)
    run.end()
    board.close()
    assert "other blocks of the job still train" in run.errors
    assert asked(tmp_path) == []


def test_blocks_of_a_job_one_after_the_other(tmp_path: Path) -> None:
    """Without a companion: the first ends the job, and the next does not even import torch."""
    first = block_of(tmp_path, "server = lead()\nhot.end()\n")
    assert first.end() == 0, first.errors
    assert asked(tmp_path) == CANCELLED
    assert (tmp_path / "job/hot").stat().st_mode & 0o777 == 0o700
    (tmp_path / "none").mkdir()
    (tmp_path / "none/torch.py").write_text("raise AssertionError('torch is imported')\n")
    second = block_of(tmp_path, "raise AssertionError\n", task=1, PYTHONPATH=str(tmp_path / "none"))
    assert second.end() == 0, second.errors
    assert "job 7 has ended" in second.errors and second.output == ""
    assert "torch" not in second.errors
    assert asked(tmp_path) == CANCELLED


def test_a_block_that_is_not_wanted_any_more_is_not_started_again(tmp_path: Path) -> None:
    text = (
        f"os.chdir({str(tmp_path)!r})\nPath('up').touch()\n"
        "while not Path('ordered').exists():\n    time.sleep(0.02)\nos.kill(os.getpid(), 9)\n"
    )
    run = block_of(tmp_path, text, task=0)
    until((tmp_path / "up").exists)
    board = leading(tmp_path / "job", term=0, task=1)
    write_order(tmp_path / "job", Order(1, 0, blocks=(1,)))
    (tmp_path / "ordered").touch()
    assert run.end() == 0, run.errors
    board.close()
    assert "task 0 is not wanted now" in run.errors


def ones_run(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text("import os\nprint(os.environ.get('ONES_BLOCKS'), os.environ['ONES_JOB_DIR'])\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | env
    run = Started([*options, str(script)], clean)
    output, errors = run.communicate(180)
    return subprocess.CompletedProcess(run.args, run.wait(), output, errors)


@pytest.mark.parametrize(
    ("asked", "given", "block"),
    [(True, None, Block(7, 3, 0)), (False, "1", Block(7, 3, 0)), (False, "0", None), (False, None, None)],
)
def test_the_option_and_the_variable(asked: bool, given: str | None, block: Block | None) -> None:
    """Without either a sweep's tasks are jobs. Ranks are given the same, whatever starts them."""
    env = {k: v for k, v in IN_ARRAY.items() if k != "ONES_BLOCKS"}
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "2"}
    env |= {"ONES_BLOCKS": given} if given else {}
    options = LaunchOptions("mpirun")
    assert wanted_block(env, asked, options) == block
    place: dict[str, Any] = {"find": lambda name: name, "ask": lambda command: "mpirun (Open MPI) 5.0.7"}
    launch = plan(env, "t.py", [], job_dir=find_job_directory(env, Path("/w")), options=options, **place)
    assert own_block(launch.env) == block
    assert launch.env["ONES_JOB_DIR"] == ("/w/ones-7" if block else "/w/ones-9")
    assert {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"} <= set(launch.command)
    assert ("ONES_BLOCKS" in launch.command) is bool(block)


@pytest.mark.slow
def test_blocks_outside_an_array(tmp_path: Path) -> None:
    """On a workstation, or at a site that bans arrays."""
    done = ones_run(tmp_path, "--blocks", ONES_JOB_DIR=str(tmp_path / "job"))
    assert (done.returncode, done.stdout.split()[0]) == (0, "None")
    assert done.stderr.count("trains as a plain job") == 1
    assert not (tmp_path / "job/hot").exists()


@pytest.mark.parametrize(
    ("options", "env", "says"),
    [
        (["--blocks", "--backend=mpi"], {}, "can't join or leave"),
        (["--blocks", "--launcher=srun", "--mpi=pmi2"], {}, "can't join or leave"),
        ([], {"ONES_BLOCKS": "1", "ONES_BACKEND": "mpi"}, "can't join or leave"),
        ([], {"ONES_BLOCKS": "yes"}, "ONES_BLOCKS='yes': must be 1 or 0"),
    ],
)
def test_refusals(tmp_path: Path, options: list[str], env: dict[str, str], says: str) -> None:
    """Protects from eight trainings side by side, each of which takes the array for its own."""
    plain = {k: v for k, v in slurm(tmp_path, 3).items() if k not in ("ONES_BLOCKS", "ONES_LAUNCHER")}
    done = ones_run(tmp_path, *options, **plain, **env)
    assert done.returncode == 2
    assert says in done.stderr
    assert own_block(plain) is None
