"""Optimizer steps of a script that never calls `ones.init` are counted and reported, and nothing else is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ones_wrapper.files.job_io import ReportWriter
from ones_wrapper.launch import plain_steps
from ones_wrapper.protocol import Hello, Report, Throughput, decode_report

ENV = {"RANK": "0", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "SLURM_RESTART_COUNT": "1", "ONES_REPORT_EVERY_S": "3"}


def sgd() -> torch.optim.Optimizer:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def reports(folder: Path) -> list[Report]:
    path = folder / "reports-1.jsonl"
    return [decode_report(line)[2] for line in path.read_bytes().splitlines()] if path.exists() else []


def test_the_first_optimizer_is_counted(tmp_path: Path) -> None:
    """At the end of the first step and once an interval; there is no spec, by which it could be resized."""
    now = iter(range(100))
    env = ENV | {"ONES_JOB_DIR": str(tmp_path), "ONES_SPOOL": "/spool"}
    hook = plain_steps.PlainSteps(env, lambda: float(next(now)))
    one, other = sgd(), sgd()
    for optimizer in (one, *[other, one] * 4):
        hook(optimizer, (), {})
    hello, *intervals = reports(tmp_path)
    assert isinstance(hello, Hello) and (hello.nodes, hello.gpus_per_node, hello.world) == (2, 2, 4)
    assert (hello.batch, hello.step) == (0, 1)
    assert not hello.note, "it may call ones.init yet, and notes stay"
    assert (hello.directory, hello.spool) == (str(tmp_path), "/spool")
    assert intervals == [Throughput(0, 3, 0, 0, 4.0, 0, 1.0), Throughput(0, 5, 0, 0, 4.0, 0, 1.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["reports-1.jsonl"]


def test_a_fork_of_the_rank_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = plain_steps.PlainSteps(ENV | {"ONES_JOB_DIR": str(tmp_path)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        hook(sgd(), (), {})
    assert reports(tmp_path) == []
    hook(sgd(), (), {})
    assert len(reports(tmp_path)) == 1


def test_steps_of_any_optimizer_until_the_script_reports_by_itself(tmp_path: Path) -> None:
    """By torch's hook; `ones.init` ends it."""
    optimizer = sgd()
    env = ENV | {"ONES_JOB_DIR": str(tmp_path), "ONES_REPORT_EVERY_S": "0.0"}
    plain_steps.start(env)
    try:
        optimizer.step()
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.step()
    finally:
        plain_steps.stop()
    optimizer.step()
    assert [report.step for report in reports(tmp_path) if isinstance(report, (Hello, Throughput))] == [1, 2]


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"ONES_JOB_DIR": ""}, {"ONES_BLOCKS": "1", "SLURM_ARRAY_TASK_ID": "2"}])
def test_who_does_not_count(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks, scripts outside a job, and blocks, whose reports are the leader's."""

    def opened(*arguments: object) -> None:
        pytest.fail("reports were opened")

    monkeypatch.setattr(ReportWriter, "__init__", opened)
    plain_steps.start(ENV | {"ONES_JOB_DIR": str(tmp_path), "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9"} | env)
    try:
        sgd().step()
    finally:
        plain_steps.stop()
