"""What `ones-run --fuse` does before the ranks start, and what the script is given."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.files.job_directory import LEFT, RESULT, TAKEN, checkpoints, newest_checkpoint
from ones_wrapper.launch.fused_start import FUSED, before_ranks
from ones_wrapper.protocol import (
    CHECKPOINTS,
    FUSION,
    MANIFEST,
    ORDERS,
    Bye,
    First,
    FusedMember,
    Order,
    decode_fusion,
    decode_report,
    encode,
)
from ones_wrapper.strategies.fusion.sweep import Sweep
from tests.waiting import until
from tests.wrapper.runs import Run

SWEPT = Path(__file__).parents[2] / "endtoend/swept.py"

ENV = {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "0"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "ones-1").mkdir()
    return tmp_path / "ones-1"


def answer(job: Path, *members: FusedMember, number: int = 1) -> None:
    (job / ORDERS).write_bytes(encode(Order(number, 0, members=members)))


def start(job: Path, *arguments: str, wait_s: float = 60.0, **env: str) -> tuple[int | None, dict[str, str]]:
    given = {**ENV, **env}
    return before_ranks(job, given, "train.py", arguments, wait_s), given


def swept(job: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Sweep:
    for name, value in {**env, "ONES_JOB_DIR": str(job)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.0)
    return Sweep(parser)


OTHERS = FusedMember(1, ("--lr", "0.1")), FusedMember(2, ("--lr", "0.2")), FusedMember(3, ("--lr", "0.3"))


def test_a_sweep_from_the_ask_to_each_ones_exit_code(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def companion() -> None:
        until((job / FUSION).exists)
        assert decode_fusion((job / FUSION).read_bytes()).asks
        answer(job, *OTHERS)

    asked = threading.Thread(target=companion)
    asked.start()
    code, env = start(job, "--fixed", "7", "--lr", "0.1")
    asked.join()
    assert code is None and env[FUSED] == str(job / FUSION)
    told = decode_fusion((job / FUSION).read_bytes())
    assert (told.asks, told.members) == (False, (2, 3))
    sweep = swept(job, env, monkeypatch, "--fixed", "7", "--lr", "0.1")
    its = {name: (args.fixed, args.lr) for name, args in sweep.members.items()}
    assert its == {"1": (7, 0.1), "2": (7, 0.2), "3": (7, 0.3)}
    assert sweep.left() == []
    sweep.done("2", 3)
    two, three = job.parent / "ones-2", job.parent / "ones-3"
    assert start(two, "--fixed", "7", "--lr", "0.2", SLURM_JOB_ID="2") == (3, {**ENV, "SLURM_JOB_ID": "2"})
    assert not (two / LEFT).exists()
    # The other starts before it has a result: it trains by itself, and is dropped.
    assert start(three, "--fixed", "7", "--lr", "0.3", SLURM_JOB_ID="3", wait_s=0)[0] is None
    assert (three / LEFT).exists()
    sweep._orders.skip_wait()
    assert sweep.left() == ["3"] and sweep.left() == []
    sweep.done("3")
    assert not (three / RESULT).exists()
    assert decode_fusion((job / FUSION).read_bytes()).members == (2,)
    # A restart has all rows, since its checkpoint has them, and goes on with those that are left.
    code, env = start(job, "--fixed", "7", "--lr", "0.1", SLURM_RESTART_COUNT="1")
    assert code is None and FUSED in env
    sweep = swept(job, env, monkeypatch, "--lr", "0.1")
    assert [*sweep.members] == ["1", "2", "3"]
    assert sweep.left() == ["3"] and sweep.left() == [] and [*sweep.members] == ["1", "2"]


def test_who_is_not_named_any_more_is_dropped(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(job, *OTHERS)
    _, env = start(job, "--lr", "0.1")
    sweep = swept(job, env, monkeypatch, "--lr", "0.1")
    answer(job, FusedMember(1), FusedMember(3), number=2)
    sweep._orders.skip_wait()
    assert sweep.left() == ["2"]
    answer(job, number=3)
    sweep._orders.skip_wait()
    assert sweep.left() == [], "an order for a job that asks"
    sweep.alone()
    assert [*sweep.members] == ["1"] and decode_fusion((job / FUSION).read_bytes()).members == ()
    sweep = swept(job, env, monkeypatch, "--lr", "0.1")
    assert [*sweep.members] == ["1"] and sweep.left() == []


def test_a_sweep_of_a_module(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ones-run --fuse -m package.module ARGS`: the module's name is none of its arguments."""
    mine, other, another = ("a.b", "--lr", "0.1"), ("a.b", "--lr", "0.2"), ("a.c", "--lr", "0.3")
    answer(job, FusedMember(1, mine), FusedMember(2, other), FusedMember(3, another))
    env = dict(ENV)
    assert before_ranks(job, env, "-m", mine, 60.0) is None
    sweep = swept(job, env, monkeypatch, "--lr", "0.1")
    assert {name: args.lr for name, args in sweep.members.items()} == {"1": 0.1, "2": 0.2}
    sweep.done("2", 4)
    two = job.parent / "ones-2"
    assert before_ranks(two, {"SLURM_JOB_ID": "2"}, "-m", other, 60.0) == 4


@pytest.mark.slow
def test_a_checkpoint_fits_after_a_member_has_left(tmp_path: Path) -> None:
    """The fused model keeps the row of a member that left, also in a start after it."""
    job, names = tmp_path / "ones-0", (0, 2, 3)
    folders = {name: tmp_path / f"ones-{name}" for name in names}
    for folder in folders.values():
        folder.mkdir()
    rows = [
        {"job_id": name, "arguments": ["--lr", f"0.0{place}", "--epochs", "100"], "folder": str(folders[name])}
        for place, name in enumerate(names, 1)
    ]
    (job / FUSION).write_text(json.dumps({"restart": 0, "asks": False, "members": [2, 3], "rows": rows}))
    (folders[2] / LEFT).touch()
    env = {FUSED: str(job / FUSION)}
    first = Run(job, "--lr", "0.01", script=SWEPT, **env)
    first.wait_for(First)
    first.signal(signal.SIGTERM)
    assert first.end() == 143, first.errors
    assert decode_fusion((job / FUSION).read_bytes()).members == (3,) and checkpoints(job)
    (job / "hurry").touch()
    second = Run(job, "--lr", "0.01", script=SWEPT, restart=1, **env)
    assert second.end() == 0, second.errors
    assert "trained 0 3" in second.output and (folders[3] / RESULT).exists()
    assert not (folders[2] / RESULT).exists() and not (folders[2] / "2.pt").exists()


@pytest.mark.parametrize(
    "members", [(), OTHERS[:1], OTHERS[1:], (FusedMember(1, ("--lr", "9")), *OTHERS[1:]), (FusedMember(1), *OTHERS[1:])]
)
def test_it_trains_alone_where_the_answer_is_not_for_it(
    job: Path, capsys: pytest.CaptureFixture[str], members: tuple[FusedMember, ...]
) -> None:
    assert (
        start(job, "--lr", "0.1", wait_s=0.1) == (None, ENV) and "no companion has answered" in capsys.readouterr().err
    )
    answer(job, *members)
    assert start(job, "--lr", "0.1") == (None, ENV)
    assert not decode_fusion((job / FUSION).read_bytes()).asks and not (job.parent / "ones-2").exists()


def test_a_job_that_began_by_itself_is_not_taken(job: Path) -> None:
    for number, name in ((2, "reports-0.jsonl"), (3, LEFT)):
        (job.parent / f"ones-{number}").mkdir()
        (job.parent / f"ones-{number}" / name).touch()
    answer(job, *OTHERS)
    assert start(job, "--lr", "0.1") == (None, ENV)


@pytest.mark.parametrize(
    "result",
    [
        {"code": 0, "words": ["/elsewhere/train.py", "--lr", "0.2"]},
        {"code": 0},
        {"code": "0", "words": None},
        {"code": -1, "words": None},
        "no object",
    ],
)
def test_a_result_that_is_not_this_jobs_own_is_not_taken(job: Path, result: Any) -> None:
    if isinstance(result, dict) and result.get("words", 1) is None:
        result["words"] = [str(Path("train.py").resolve()), "--lr", "0.2"]
    (job / TAKEN).write_text('{"by": 9}')
    (job / RESULT).write_text(json.dumps(result))
    assert start(job, "--lr", "0.2", wait_s=0)[0] is None
    assert (job / LEFT).exists()


WORDS = [str(Path("train.py").resolve()), "--lr", "0.2"]


def leave_result(job: Path, code: int) -> None:
    """Another job has trained this one with its own."""
    (job / TAKEN).write_text('{"by": 9}')
    (job / RESULT).write_text(json.dumps({"by": 9, "code": code, "gpu_s": 12.5, "words": WORDS}))


@pytest.mark.parametrize("code", [0, 3])
def test_the_database_is_told_what_a_member_took(job: Path, code: int) -> None:
    """In the report of its own short run: of whose GPU, and how long."""
    leave_result(job, code)
    assert start(job, "--lr", "0.2")[0] == code
    (line,) = (job / "reports-0.jsonl").read_bytes().splitlines(keepends=True)
    note = "job 9 trained it: 12.50 s of that job's GPU"
    assert decode_report(line)[2] == Bye("error" if code else "finished", 0, code, note)


def test_a_job_that_has_trained_does_not_take_a_result(job: Path) -> None:
    leave_result(job, 0)
    (job / "reports-0.jsonl").touch()
    assert start(job, "--lr", "0.2", wait_s=0)[0] is None


@pytest.mark.parametrize("restart", ["0", "1"])
def test_who_starts_again_once_its_result_is_taken_is_told_the_same(job: Path, restart: str) -> None:
    """A loop in the batch script, or a requeue at the wrong moment."""
    leave_result(job, 3)
    assert start(job, "--lr", "0.2")[0] == 3
    assert start(job, "--lr", "0.2", SLURM_RESTART_COUNT=restart)[0] == 3
    assert not (job / LEFT).exists()
    assert start(job, "--lr", "0.3", wait_s=0)[0] is None, "other words"


def test_a_job_that_goes_on_from_checkpoints_neither_asks_nor_takes_a_result(job: Path) -> None:
    """As with --resume-from: the others begin anew."""
    folder = job / CHECKPOINTS / "step-000000001"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    assert newest_checkpoint(job) == folder
    answer(job, *OTHERS)
    assert start(job, "--lr", "0.1") == (None, ENV) and not (job / FUSION).exists()


def test_a_script_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FUSED, raising=False)
    sweep = swept(tmp_path, {"SLURM_JOB_ID": "5"}, monkeypatch, "--lr", "0.5")
    assert [*sweep.members] == ["5"] and sweep.members["5"].lr == 0.5 and sweep.folder("5") == tmp_path
    assert sweep.left() == []
    sweep.done("5")
    assert not (tmp_path / RESULT).exists()
