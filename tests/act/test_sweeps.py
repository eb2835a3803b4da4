"""Which jobs of a sweep may be trained within one: alike in all that Slurm shows of them, but for arguments' values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ones_db.reasons import reason
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import parse_comment
from slurm_ones.act.fusions import MOST, candidates, carries, members
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.slurm.model import SlurmJob
from tests.act.make import elastic

NOW = 1000.0
LINE = "sbatch --parsable job.sbatch train.py --lr 0.1"


def swept(job_id: int, *nodes: str, comment: str = "ones: gpus=1 fuse=a", **changes: Any) -> Elastic:
    found = elastic(job_id, Shape(1, 1), *nodes, **({"uid": 7, "work_dir": "/home/a"} | changes))
    return replace(found, optin=parse_comment(comment))


def line(job_id: int, text: str = LINE, command: str = "/home/a/job.sbatch") -> SlurmJob:
    return replace(swept(job_id).job.first, submit_line=text, command=command)


def test_a_running_job_of_one_gpu_may_carry_others() -> None:
    assert carries(swept(1, "n1"))
    assert not carries(swept(1))
    assert carries(swept(1, restart=1)) and not carries(swept(1, restart=1, held=True))
    assert not carries(swept(1, "n1", comment="ones: gpus=1"))
    assert not carries(swept(1, "n1", comment="ones: gpus=1-4 fuse=a"))
    assert not carries(swept(1, "n1", array=True))
    assert not carries(replace(swept(1, "n1"), refusal=reason("resize_off")))


@pytest.mark.parametrize(
    "other",
    [
        swept(2, uid=8),
        swept(2, comment="ones: gpus=1 fuse=b"),
        swept(2, comment="ones: gpus=1"),
        swept(2, account="x"),
        swept(2, partitions=("x",)),
        swept(2, work_dir="/home/a/b"),
        swept(2, time_limit_s=60.0),
        swept(2, held=True),
        swept(2, restart=1),
        swept(2, reason="Dependency"),
        swept(2, eligible_time=NOW + 1),
        swept(2, eligible_time=NOW + 1, reason="Priority"),
        swept(2, "n1"),
        replace(swept(2), refusal=reason("resize_off")),
        elastic(2, Shape(1, 2), uid=7, work_dir="/home/a"),
    ],
)
def test_a_job_that_is_another_kind_is_left_alone(other: Elastic) -> None:
    carrier = swept(1, "n1")
    assert candidates(carrier, [other, swept(3), carrier], (), NOW) == [swept(3)]


def test_a_job_that_waits_for_our_own_time_may_join() -> None:
    deferred, over = swept(2, eligible_time=NOW + 1), swept(3, eligible_time=NOW - 1, reason="BeginTime")
    assert candidates(swept(1, "n1"), [deferred, over], {2}, NOW) == [deferred, over]


def test_arguments_of_members() -> None:
    """Words after the script, of jobs that differ in values alone; two that are equal are one too many."""
    others = [
        line(2, "sbatch --parsable job.sbatch train.py --lr 0.2"),
        line(3, "sbatch --parsable job.sbatch train.py --lr -0.5"),
        line(4, "sbatch --parsable job.sbatch train.py --lr 0.2"),
    ]
    found = members(line(1), [line(1), *reversed(others)])
    assert [(one.job_id, one.arguments) for one in found] == [
        (1, ("train.py", "--lr", "0.1")),
        (2, ("train.py", "--lr", "0.2")),
        (3, ("train.py", "--lr", "-0.5")),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        LINE,
        "sbatch --parsable job.sbatch train.py --wd 0.1",
        "sbatch --parsable job.sbatch train.py --lr 0.2 --x 1",
        "sbatch --parsable --export=LR=2 job.sbatch train.py --lr 0.2",
        "sbatch --parsable job.sbatch train.py --lr '0 2'",
        "sbatch --parsable job.sbatch train.py --lr  2",
        "sbatch --parsable job.sbatch train.py --lr \x1b[2",
        "sbatch --parsable other.sbatch train.py --lr 0.2",
        "sbatch --parsable job.sbatch train.py --lr " + "9" * 9000,
    ],
)
def test_a_line_that_differs_in_more_is_no_members(text: str) -> None:
    assert members(line(1), [line(2, text)]) == ()


def test_no_more_than_an_order_holds() -> None:
    many = [line(n, f"sbatch --parsable job.sbatch train.py --lr {n}") for n in range(2, 500)]
    assert len(members(line(1), many)) == MOST
    long = [line(n, f"sbatch --parsable job.sbatch train.py --lr {n:01000}") for n in range(2, 500)]
    assert 1 < len(members(line(1), long)) < 12
